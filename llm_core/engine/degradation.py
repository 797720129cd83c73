"""What a request may give up to be in time, and when it does.

A caller who would wait too long can be given a shorter answer, or one that is based on the last
turn alone. Only who allows it gets it, only when its deadline is at risk, and the answer says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llm_core.engine.prompt import Prompt
from llm_core.messages import ChatMessage, Downgrade

SHORT_ANSWER_TOKENS = 48
# Leaving turns out is worth it only where it saves much: what is left out is missed.
_LEAST_GAIN = 0.5


@dataclass(frozen=True, slots=True)
class Outlook:
    """When a prompt's first token would come, were it asked for now; None while unknown."""

    first_token_ns: Callable[[Prompt], int | None]
    now_ns: int
    deadline_ns: int | None

    def is_late(self, prompt: Prompt) -> bool:
        expected_ns = self.first_token_ns(prompt)
        if expected_ns is None or self.deadline_ns is None:
            return False
        return expected_ns > self.deadline_ns


def last_turn(messages: Sequence[ChatMessage]) -> tuple[list[ChatMessage], int]:
    """The system prompt and all from the last thing that the user said; and how many messages that
    leaves out. Tools stand on the first message and stay on offer."""
    start = max((i for i, m in enumerate(messages) if m.role == "user"), default=0)
    system = [m for m in messages[:start] if m.role == "system"]
    num_dropped = start - len(system)
    if start > 0 and messages[0].role != "system" and messages[0].tools:
        system.insert(0, ChatMessage(role="system", content="", tools=messages[0].tools))
    return [*system, *messages[start:]], num_dropped


def choose(
    allowed: Sequence[Downgrade],
    outlook: Outlook,
    prompt: Prompt,
    shortened: Callable[[], Prompt],
) -> tuple[Prompt, tuple[Downgrade, ...]]:
    """The prompt to serve, and what was given up for it: nothing, if all is in time."""
    if not allowed or not outlook.is_late(prompt):
        return prompt, ()
    taken: list[Downgrade] = []
    if "partial_context" in allowed:
        partial = shortened()
        wait_ns, partial_wait_ns = (
            (outlook.first_token_ns(p) or outlook.now_ns) - outlook.now_ns
            for p in (prompt, partial)
        )
        if partial_wait_ns <= _LEAST_GAIN * wait_ns:
            prompt = partial
            taken.append("partial_context")
    if "shorter_answer" in allowed:
        taken.append("shorter_answer")
    return prompt, tuple(taken)
