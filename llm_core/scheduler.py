"""Decides what each step computes. Moves sequences between two deques and hands out slots.

The one rule: every running sequence's computed count chases its length. A step gives each the rows
it wants, those that are decoding first (one row each), then prompts in order of arrival, as far as
the row budget goes. Prompts are cut where the budget ends. No tensors here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from llm_core.errors import EngineBusyError
from llm_core.sequence import TokenSequence
from llm_core.slots import PrefixCopy, SlotTable


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [start, start + length) of ``sequence``; ``wants_logits`` of the last of them."""

    sequence: TokenSequence
    start: int
    length: int
    wants_logits: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Copies to make, in order, and then the chunks to compute in one batch."""

    copies: tuple[PrefixCopy, ...]
    chunks: tuple[Chunk, ...]


class Scheduler:
    """First come, first served, with decoding ahead of prompts."""

    def __init__(
        self, *, num_slots: int, max_waiting: int, prompt_budget: int = 96, mixed_budget: int = 64
    ) -> None:
        """``prompt_budget``: rows of a step when nobody is decoding; ``mixed_budget``: prompt rows
        of a step that decodes too, small because every listener waits for that step."""
        assert prompt_budget > 0 and mixed_budget > 0, "a step can always compute something"
        self._slots = SlotTable(num_slots)
        self._max_waiting = max_waiting
        self._prompt_budget = prompt_budget
        self._mixed_budget = mixed_budget
        # Bounded: add() refuses with EngineBusyError when max_waiting are waiting that the free
        # slots, handed out by the next step, do not take.
        self._waiting: deque[TokenSequence] = deque()
        self._running: deque[TokenSequence] = deque()

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def slots(self) -> SlotTable:
        return self._slots

    def add(self, sequence: TokenSequence) -> None:
        """Queues a sequence. Raises EngineBusyError when the queue is full."""
        if len(self._waiting) >= self._max_waiting + self._slots.num_free:
            raise EngineBusyError(
                f"{len(self._running)} requests are running and {len(self._waiting)} waiting; "
                "try again later"
            )
        self._waiting.append(sequence)

    def remove(self, sequence: TokenSequence) -> None:
        """Takes a sequence out, finished or not; its slot is free at once."""
        if sequence.slot is None:
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)
            self._slots.release(sequence)

    def schedule(self) -> StepPlan:
        """The next step. Its copies and chunks must be run before anything else is called."""
        decoding = [sequence for sequence in self._running if sequence.is_decoding]
        chunks = [_chunk(sequence, sequence.remaining_len) for sequence in decoding]
        budget = self._mixed_budget if decoding else self._prompt_budget
        for sequence in self._running:
            if budget > 0 and not sequence.is_decoding:
                chunks.append(_chunk(sequence, min(budget, sequence.remaining_len)))
                budget -= chunks[-1].length
        copies = []
        while budget > 0 and self._waiting and self._slots.num_free > 0:
            sequence = self._waiting.popleft()
            copy = self._slots.acquire(sequence)
            if copy is not None:
                copies.append(copy)
            self._running.append(sequence)
            chunks.append(_chunk(sequence, min(budget, sequence.remaining_len)))
            budget -= chunks[-1].length
        return StepPlan(tuple(copies), tuple(chunks))

    def commit(self, plan: StepPlan) -> None:
        """Counts the plan's rows as computed; only now may others share them."""
        for chunk in plan.chunks:
            chunk.sequence.computed_len += chunk.length
            chunk.sequence.num_steps += 1

    def check(self) -> None:
        """Asserts the invariants; true between any two calls."""
        self._slots.check(list(self._running))
        for sequence in self._waiting:
            assert sequence.slot is None and sequence.computed_len == 0, "waiting has no KV"
        for sequence in (*self._waiting, *self._running):
            assert 0 <= sequence.cached_len <= sequence.computed_len <= len(sequence.token_ids)
            assert sequence.cached_len < sequence.prompt_len <= len(sequence.token_ids)
            assert len(sequence.token_ids) <= sequence.max_len
        ids = [sequence.seq_id for sequence in (*self._waiting, *self._running)]
        assert len(set(ids)) == len(ids), "an id is used once"
        assert len(self._waiting) <= self._max_waiting + self._slots.num_free, "bounded"


def _chunk(sequence: TokenSequence, length: int) -> Chunk:
    assert length > 0, "a running sequence always wants rows"
    return Chunk(
        sequence=sequence,
        start=sequence.computed_len,
        length=length,
        wants_logits=sequence.generates and length == sequence.remaining_len,
    )
