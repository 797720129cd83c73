"""In which order requests are served: three policies with one face. No tensors here.

``deadline`` is earliest deadline first (Liu and Layland 1973) with slack: a caller who still has
seconds of speech to hear can do without the next token for a moment, and lets one pass who hears
nothing yet.
"""

from __future__ import annotations

from typing import Protocol

from llm_core.messages import PolicyName
from llm_core.scheduling.sequence import TokenSequence

# A prompt without a deadline is treated as if it had to be answered after this time, so that it
# is neither starved by those that have one nor ahead of them.
_DEFAULT_DEADLINE_NS = 2_000_000_000
# A stream gives way, and does without drafts, while its deadline is further off than this: a few
# steps of a busy engine.
COMFORT_NS = 600_000_000


class Policy(Protocol):
    """``rank`` sorts: the smallest is served first, the largest is the first to lose its blocks.
    ``gives_way`` is whether a decoding sequence leaves the step to prompts that wait, ``displaces``
    whether one that waits takes the place of one that runs."""

    def rank(self, sequence: TokenSequence) -> tuple[int, ...]: ...

    def displaces(self, waiting: TokenSequence, running: TokenSequence) -> bool: ...

    def gives_way(self, sequence: TokenSequence, now_ns: int) -> bool: ...


class FirstComeFirstServed:
    """By arrival."""

    def rank(self, sequence: TokenSequence) -> tuple[int, ...]:
        return (sequence.arrival_ns, sequence.seq_id)

    def displaces(self, waiting: TokenSequence, running: TokenSequence) -> bool:
        return False

    def gives_way(self, sequence: TokenSequence, now_ns: int) -> bool:
        return False


class ByPriority:
    """The highest priority first; among equals by arrival."""

    def rank(self, sequence: TokenSequence) -> tuple[int, ...]:
        return (-sequence.priority, sequence.arrival_ns, sequence.seq_id)

    def displaces(self, waiting: TokenSequence, running: TokenSequence) -> bool:
        return waiting.priority > running.priority

    def gives_way(self, sequence: TokenSequence, now_ns: int) -> bool:
        return False


class EarliestDeadlineFirst:
    """The earliest deadline first within the same priority."""

    def rank(self, sequence: TokenSequence) -> tuple[int, ...]:
        deadline_ns = sequence.deadline_ns
        if deadline_ns is None:
            deadline_ns = sequence.arrival_ns + _DEFAULT_DEADLINE_NS
        return (-sequence.priority, deadline_ns, sequence.seq_id)

    def displaces(self, waiting: TokenSequence, running: TokenSequence) -> bool:
        # Not for an earlier deadline: what two equals would do to each other is thrash.
        return waiting.priority > running.priority

    def gives_way(self, sequence: TokenSequence, now_ns: int) -> bool:
        return sequence.deadline_ns is not None and sequence.deadline_ns - now_ns > COMFORT_NS


def make_policy(name: PolicyName) -> Policy:
    """The policy of that name."""
    policies: dict[PolicyName, type[Policy]] = {
        "deadline": EarliestDeadlineFirst,
        "fcfs": FirstComeFirstServed,
        "priority": ByPriority,
    }
    return policies[name]()
