"""Scheduling and slots without tensors: a fake KV that remembers which token each row holds."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_core.errors import EngineBusyError
from llm_core.scheduler import Scheduler, StepPlan
from llm_core.sequence import TokenSequence
from llm_core.slots import PrefixCopy, common_prefix_len

MAX_CONTEXT = 1000


class FakeKv:
    """Rows of each slot; asserts that what a step builds on is really there."""

    def __init__(self, num_slots: int) -> None:
        self.rows: list[list[int]] = [[] for _ in range(num_slots)]

    def run(self, plan: StepPlan) -> None:
        for copy in plan.copies:
            assert copy.source != copy.target
            assert len(self.rows[copy.source]) >= copy.length > 0
            self.rows[copy.target] = self.rows[copy.source][: copy.length]
        slots = [chunk.sequence.slot for chunk in plan.chunks]
        assert len(set(slots)) == len(slots), "a slot occurs once in a batch"
        for chunk in plan.chunks:
            assert chunk.sequence.slot is not None
            rows = self.rows[chunk.sequence.slot]
            assert rows[: chunk.start] == chunk.sequence.token_ids[: chunk.start]
            end = chunk.start + chunk.length
            rows[chunk.start :] = chunk.sequence.token_ids[chunk.start : end]


class Harness:
    def __init__(self, num_slots: int = 2, max_waiting: int = 64, **budgets: int) -> None:
        self.scheduler = Scheduler(num_slots=num_slots, max_waiting=max_waiting, **budgets)
        self.kv = FakeKv(num_slots)
        self.next_id = 0

    def add(self, tokens: list[int], max_new: int = 3, generates: bool = True) -> TokenSequence:
        self.next_id += 1
        max_len = len(tokens) + (max_new if generates else 0)
        sequence = TokenSequence(self.next_id, tokens, max_len=max_len, generates=generates)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> StepPlan:
        """One step; a token follows from a sequence's tokens, so mixed-up rows would show."""
        self.scheduler.check()
        plan = self.scheduler.schedule()
        self.kv.run(plan)
        self.scheduler.commit(plan)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if chunk.wants_logits:
                sequence.append(next_token(sequence.token_ids))
                if len(sequence.token_ids) == sequence.max_len:
                    self.scheduler.remove(sequence)
            elif sequence.remaining_len == 0:
                self.scheduler.remove(sequence)
        self.scheduler.check()
        return plan

    def run(self) -> None:
        while self.scheduler.has_work:
            assert self.step().chunks, "there is work, so a step does some"


def next_token(token_ids: list[int]) -> int:
    return (sum(token_ids) * 31 + len(token_ids)) % 50


def shape(plan: StepPlan) -> list[tuple[int, int, int]]:
    return [(c.sequence.seq_id, c.start, c.length) for c in plan.chunks]


def test_prompt_then_one_row_a_step() -> None:
    harness = Harness()
    sequence = harness.add([1, 2, 3, 4], max_new=3)
    assert shape(harness.step()) == [(1, 0, 4)]
    assert shape(harness.step()) == [(1, 4, 1)]
    assert shape(harness.step()) == [(1, 5, 1)]
    assert not harness.scheduler.has_work
    assert sequence.num_steps == 3
    assert shape(harness.step()) == []


def test_a_long_prompt_is_cut_into_chunks_and_asks_for_logits_once() -> None:
    harness = Harness(prompt_budget=10)
    harness.add(list(range(25)), max_new=1)
    plans = [harness.step() for _ in range(3)]
    assert [shape(plan) for plan in plans] == [[(1, 0, 10)], [(1, 10, 10)], [(1, 20, 5)]]
    assert [plan.chunks[0].wants_logits for plan in plans] == [False, False, True]


def test_decoding_goes_first_and_shrinks_the_prompt_budget() -> None:
    harness = Harness(prompt_budget=100, mixed_budget=8)
    harness.add([1, 2], max_new=10)
    harness.step()
    harness.add(list(range(100, 120)))
    assert shape(harness.step()) == [(1, 2, 1), (2, 0, 8)]
    assert shape(harness.step()) == [(1, 3, 1), (2, 8, 8)]
    assert shape(harness.step()) == [(1, 4, 1), (2, 16, 4)]
    assert shape(harness.step()) == [(1, 5, 1), (2, 20, 1)]


def test_prompts_share_the_budget_in_order_of_arrival() -> None:
    harness = Harness(num_slots=3, prompt_budget=10)
    for first in (0, 100, 200):
        harness.add(list(range(first, first + 7)))
    assert shape(harness.step()) == [(1, 0, 7), (2, 0, 3)]


def test_waiting_for_a_slot() -> None:
    harness = Harness(num_slots=1)
    first = harness.add([1, 2], max_new=2)
    second = harness.add([3, 4], max_new=1)
    harness.step()
    assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (1, 1)
    harness.step()
    assert first.slot is None and second.slot is None
    assert shape(harness.step()) == [(2, 0, 2)]


def test_full_queue_is_busy() -> None:
    harness = Harness(num_slots=2, max_waiting=2)
    for token in range(4):  # no step yet: two of them will not wait
        harness.add([token])
    with pytest.raises(EngineBusyError, match="0 requests are running and 4 waiting"):
        harness.add([9])
    harness.step()
    with pytest.raises(EngineBusyError, match="2 requests are running and 2 waiting"):
        harness.add([9])
    harness.run()
    harness.add([9])


def test_prefill_only_computes_the_whole_prompt_and_leaves_it_cached() -> None:
    harness = Harness()
    harness.add(list(range(20)), generates=False)
    plan = harness.step()
    assert [chunk.wants_logits for chunk in plan.chunks] == [False]
    assert not harness.scheduler.has_work
    assert harness.scheduler.slots.cached_len == 20
    again = harness.add(list(range(20)))
    assert shape(harness.step()) == [(2, 19, 1)]
    assert again.cached_len == 19


def test_the_next_turn_goes_on_in_the_same_slot() -> None:
    harness = Harness(num_slots=4)
    first = harness.add(list(range(30)), max_new=5)
    harness.run()
    second = harness.add([*first.token_ids, 7, 8, 9])
    plan = harness.step()
    assert plan.copies == ()
    # The last generated token never was computed.
    assert second.cached_len == 34
    assert second.slot == 0


def test_a_cut_reply_goes_on_in_place() -> None:
    harness = Harness()
    first = harness.add(list(range(40)), max_new=20)
    harness.run()
    second = harness.add([*first.token_ids[:45], 99, 98])
    assert harness.step().copies == ()
    assert second.cached_len == 45


def test_a_shared_system_prompt_is_copied_from_a_busy_slot() -> None:
    harness = Harness()
    system = list(range(50))
    first = harness.add([*system, 1], max_new=10)
    harness.step()
    second = harness.add([*system, 2, 3])
    plan = harness.step()
    assert plan.copies == (PrefixCopy(source=first.slot or 0, target=1, length=50),)
    assert second.cached_len == 50


def test_rows_of_the_same_step_are_not_shared() -> None:
    harness = Harness()
    first, second = harness.add(list(range(30))), harness.add(list(range(30)))
    plan = harness.step()
    assert plan.copies == ()
    assert (first.cached_len, second.cached_len) == (0, 0)


def test_a_long_idle_conversation_is_not_spoiled_by_a_shared_beginning() -> None:
    harness = Harness()
    system = list(range(50))
    first = harness.add([*system, *range(100, 300)], max_new=2)
    harness.run()
    second = harness.add([*system, 1, 2])
    assert harness.step().copies == (PrefixCopy(0, 1, 50),)
    assert second.slot == 1
    harness.run()
    third = harness.add([*first.token_ids, 5])
    harness.step()
    assert third.cached_len == len(first.token_ids) - 1


def test_the_longest_unused_slot_is_given_up() -> None:
    harness = Harness(num_slots=3)

    def cached_len_of(first: int) -> int:
        sequence = harness.add(list(range(first, first + 40)), max_new=1)
        harness.run()
        return sequence.cached_len

    assert [cached_len_of(first) for first in (0, 100, 200)] == [0, 0, 0]
    assert cached_len_of(0) == 39  # which makes 100 the longest unused
    assert cached_len_of(300) == 0
    assert [cached_len_of(first) for first in (200, 0, 300)] == [39, 39, 39]
    assert cached_len_of(100) == 0


def test_aborting_frees_at_every_stage() -> None:
    harness = Harness(num_slots=1, prompt_budget=4)
    running = harness.add(list(range(10)), max_new=5)
    waiting = harness.add(list(range(10)))
    harness.step()  # in the middle of the prompt
    harness.scheduler.remove(waiting)
    harness.scheduler.remove(running)
    harness.scheduler.check()
    assert not harness.scheduler.has_work
    assert harness.scheduler.slots.num_free == 1
    assert harness.scheduler.slots.cached_len == 4
    next_one = harness.add(list(range(10)))
    harness.step()
    assert next_one.cached_len == 4
    while not next_one.is_decoding:
        harness.step()
    harness.scheduler.remove(next_one)
    harness.scheduler.check()
    assert harness.scheduler.slots.num_free == 1


@given(
    a=st.lists(st.integers(0, 2), max_size=40),
    b=st.lists(st.integers(0, 2), max_size=40),
    shared=st.lists(st.integers(0, 9), max_size=200),
    limit=st.integers(0, 300),
)
@settings(deadline=None)
def test_common_prefix(a: list[int], b: list[int], shared: list[int], limit: int) -> None:
    left, right = shared + a, shared + b
    count = 0
    while count < min(limit, len(left), len(right)) and left[count] == right[count]:
        count += 1
    assert common_prefix_len(left, right, limit) == count


@given(
    seed=st.integers(0, 10**6),
    num_slots=st.integers(1, 4),
    prompt_budget=st.integers(1, 40),
    mixed_budget=st.integers(1, 20),
)
@settings(max_examples=150, deadline=None)
def test_any_arrivals_and_aborts_give_what_each_gives_alone(
    seed: int, num_slots: int, prompt_budget: int, mixed_budget: int
) -> None:
    """Conversations that grow, share beginnings, are cut and aborted; rows are checked by FakeKv,
    tokens against a run alone."""
    rng = random.Random(seed)
    harness = Harness(num_slots, prompt_budget=prompt_budget, mixed_budget=mixed_budget)
    histories = [[9] * rng.randint(0, 30) for _ in range(3)]
    live: list[TokenSequence] = []
    done: list[TokenSequence] = []
    for _ in range(60):
        action = rng.random()
        if action < 0.35:
            history = rng.choice(histories)
            tokens = history[: rng.randint(0, len(history))] if rng.random() < 0.3 else history
            tokens = [*tokens, *(rng.randint(0, 3) for _ in range(rng.randint(1, 12)))]
            live.append(harness.add(tokens, rng.randint(1, 6), generates=rng.random() < 0.8))
        elif action < 0.45 and live:
            victim = live.pop(rng.randrange(len(live)))
            harness.scheduler.remove(victim)
            harness.scheduler.check()
        else:
            harness.step()
        for sequence in [s for s in live if len(s.token_ids) == s.max_len and s.slot is None]:
            if sequence.num_steps:
                live.remove(sequence)
                done.append(sequence)
                histories[rng.randrange(3)] = sequence.token_ids
    harness.run()
    assert harness.scheduler.slots.num_free == num_slots
    for sequence in done:
        alone = sequence.token_ids[: sequence.prompt_len]
        while len(alone) < len(sequence.token_ids):
            alone.append(next_token(alone))
        assert sequence.token_ids == alone
