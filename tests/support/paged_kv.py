"""A KV pool that remembers what each row was computed from, and a scheduler driven by hand.

A row is all tokens up to its position; so a row that is missing, stale, of another sequence or
written under a reader's hand is found at once.
"""

from __future__ import annotations

from typing import Any

from llm_core.messages import PolicyName
from llm_core.scheduling.block_tables import BlockTables
from llm_core.scheduling.policy import make_policy
from llm_core.scheduling.scheduler import Scheduler, StepPlan
from llm_core.scheduling.sequence import TokenSequence


class PagedKv:
    """Runs plans; asserts that what a step builds on is really there."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.rows: list[tuple[int, ...]] = [()] * (num_blocks * block_size)

    def run(self, plan: StepPlan) -> None:
        for copy in plan.copies:
            assert copy.source != copy.target and 0 < copy.num_rows <= self.block_size
            src, dst = copy.source * self.block_size, copy.target * self.block_size
            self.rows[dst : dst + copy.num_rows] = self.rows[src : src + copy.num_rows]
        written: set[int] = set()
        for chunk in plan.chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.length
            for position in range(chunk.start):
                row = self.rows[self.place(sequence, position)]
                assert row == tuple(sequence.token_ids[: position + 1]), f"row {position}"
            for position in range(chunk.start, end):
                at = self.place(sequence, position)
                assert at not in written, "a row is written once"
                written.add(at)
                self.rows[at] = tuple(sequence.token_ids[: position + 1])

    def place(self, sequence: TokenSequence, position: int) -> int:
        block, row = divmod(position, self.block_size)
        return sequence.block_ids[block] * self.block_size + row


class Harness:
    """A scheduler, its KV, and a rule that says which token follows."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_running: int = 2,
        max_waiting: int = 64,
        policy: PolicyName = "fcfs",
        **budgets: int,
    ) -> None:
        self.tables = BlockTables(num_blocks, block_size)
        self.scheduler = Scheduler(
            self.tables,
            make_policy(policy),
            max_running=max_running,
            max_waiting=max_waiting,
            **budgets,
        )
        self.kv = PagedKv(num_blocks, block_size)
        self.now_ns = 0
        self.next_id = 0

    def make(self, tokens: list[int], max_new: int = 3, **options: Any) -> TokenSequence:
        self.next_id += 1
        options.setdefault("arrival_ns", self.next_id)
        max_len = len(tokens) + (max_new if options.get("generates", True) else 0)
        if options.get("is_open"):
            max_len = 10_000
        return TokenSequence(self.next_id, tokens, max_len=max_len, **options)

    def add(self, tokens: list[int], max_new: int = 3, **options: Any) -> TokenSequence:
        sequence = self.make(tokens, max_new, **options)
        self.scheduler.add(sequence)
        return sequence

    def draft(self, tokens: list[int], **options: Any) -> TokenSequence:
        return self.add(tokens, is_open=True, generates=False, **options)

    def step(self) -> StepPlan:
        """One step; a token follows from a sequence's tokens, so mixed-up rows would show."""
        self.scheduler.check()
        plan = self.scheduler.schedule(self.now_ns)
        self.kv.run(plan)
        self.scheduler.commit(plan)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if chunk.wants_logits:
                sequence.append(next_token(sequence.token_ids))
                if len(sequence.token_ids) == sequence.max_len:
                    self.scheduler.remove(sequence)
            elif sequence.remaining_len == 0 and not sequence.is_open:
                self.scheduler.remove(sequence)
        self.scheduler.check()
        return plan

    def run(self) -> None:
        while self.scheduler.has_work:
            assert self.step().chunks, "there is work, so a step does some"

    def assert_all_free(self) -> None:
        self.scheduler.check()
        assert self.tables.num_available == self.tables.pool.num_blocks


def next_token(token_ids: list[int]) -> int:
    return (sum(token_ids) * 31 + len(token_ids)) % 50


def shape(plan: StepPlan) -> list[tuple[int, int, int]]:
    return [(c.sequence.seq_id, c.start, c.length) for c in plan.chunks]


def continued_alone(sequence: TokenSequence) -> list[int]:
    """What the sequence's prompt becomes when nobody else is there."""
    alone = sequence.token_ids[: sequence.prompt_len]
    while len(alone) < len(sequence.token_ids):
        alone.append(next_token(alone))
    return alone
