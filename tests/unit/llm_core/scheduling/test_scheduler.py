"""Scheduling without tensors: order, budgets, admission, preemption, deadlines, drafts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_core.errors import EngineBusyError
from llm_core.messages import PolicyName
from llm_core.scheduling.sequence import TokenSequence, common_prefix_len
from tests.support.paged_kv import Harness, continued_alone, shape

SECOND_NS = 1_000_000_000


def tokens_from(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def test_prompt_then_one_row_a_step() -> None:
    harness = Harness()
    sequence = harness.add([1, 2, 3, 4], max_new=3)
    assert shape(harness.step()) == [(1, 0, 4)]
    assert shape(harness.step()) == [(1, 4, 1)]
    assert shape(harness.step()) == [(1, 5, 1)]
    assert not harness.scheduler.has_work
    assert sequence.num_steps == 3
    assert shape(harness.step()) == []
    harness.assert_all_free()


def test_a_long_prompt_is_cut_into_chunks_and_asks_for_logits_once() -> None:
    harness = Harness(prompt_budget=10)
    harness.add(tokens_from(0, 25), max_new=1)
    plans = [harness.step() for _ in range(3)]
    assert [shape(plan) for plan in plans] == [[(1, 0, 10)], [(1, 10, 10)], [(1, 20, 5)]]
    assert [plan.chunks[0].wants_logits for plan in plans] == [False, False, True]


def test_streams_go_first_and_a_long_prompt_takes_one_chunk_a_step() -> None:
    """A 4,000-token prompt does not stall a stream by more than one chunk."""
    harness = Harness(num_blocks=2000, prompt_budget=100, mixed_budget=64, policy="deadline")
    harness.add([1, 2], max_new=100)
    harness.step()
    harness.add(tokens_from(100, 4000), max_new=1)
    for step in range(62):
        harness.now_ns += SECOND_NS  # the prompt's own deadline passes, and changes nothing
        assert shape(harness.step()) == [(1, 2 + step, 1), (2, 64 * step, 64)]
    assert shape(harness.step()) == [(1, 64, 1), (2, 3968, 32)]


def test_prompts_share_the_budget_in_order_of_arrival() -> None:
    harness = Harness(max_running=3, prompt_budget=10)
    for first in (0, 100, 200):
        harness.add(tokens_from(first, 7))
    assert shape(harness.step()) == [(1, 0, 7), (2, 0, 3)]


def test_waiting_for_a_place() -> None:
    harness = Harness(max_running=1)
    first = harness.add([1, 2], max_new=2)
    second = harness.add([3, 4], max_new=1)
    harness.step()
    assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (1, 1)
    harness.step()
    assert not first.block_ids and not second.block_ids
    assert shape(harness.step()) == [(2, 0, 2)]


def test_full_queue_is_busy() -> None:
    harness = Harness(max_running=2, max_waiting=2)
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
    harness.add(tokens_from(0, 22), generates=False)
    plan = harness.step()
    assert [chunk.wants_logits for chunk in plan.chunks] == [False]
    assert not harness.scheduler.has_work
    assert harness.tables.cache.cached_len == 22
    again = harness.add(tokens_from(0, 22))
    assert shape(harness.step()) == [(2, 21, 1)]
    assert again.cached_len == 21


def test_aborting_frees_at_every_stage() -> None:
    harness = Harness(max_running=1, prompt_budget=4)
    running = harness.add(tokens_from(0, 10), max_new=5)
    waiting = harness.add(tokens_from(0, 10))
    harness.step()  # in the middle of the prompt
    harness.scheduler.remove(waiting)
    harness.scheduler.remove(running)
    assert not harness.scheduler.has_work
    harness.assert_all_free()
    assert harness.tables.cache.cached_len == 4
    next_one = harness.add(tokens_from(0, 10))
    harness.step()
    assert next_one.cached_len == 4
    while not next_one.is_decoding:
        harness.step()
    harness.scheduler.remove(next_one)
    harness.assert_all_free()


# Preemption and admission


def test_admission_leaves_a_block_for_each_who_runs() -> None:
    harness = Harness(num_blocks=6, max_running=3)
    harness.add(tokens_from(0, 8), max_new=9)
    harness.step()
    assert harness.tables.num_available == 4
    # The stream takes one more now; with three for the newcomer there would be none left.
    late = harness.add(tokens_from(50, 12), max_new=1)
    harness.step()
    assert harness.scheduler.num_waiting == 1
    harness.scheduler.remove(late)
    harness.add(tokens_from(50, 8), max_new=1)
    harness.step()
    assert harness.scheduler.num_waiting == 0


def test_a_long_prompt_is_not_overtaken_by_short_ones() -> None:
    harness = Harness(num_blocks=8, max_running=4)
    harness.add(tokens_from(0, 12), max_new=12)
    harness.step()
    long_one = harness.add(tokens_from(100, 24), max_new=1)
    short = harness.add([1, 2, 3], max_new=1)
    harness.step()
    assert not long_one.block_ids and not short.block_ids
    harness.run()
    assert long_one.num_steps > 0 and short.num_steps > 0


def test_the_last_to_come_is_preempted_and_says_the_same() -> None:
    harness = Harness(num_blocks=8, max_running=2)
    first = harness.add(tokens_from(0, 8), max_new=16)
    second = harness.add(tokens_from(50, 8), max_new=16)
    harness.run()
    assert harness.scheduler.num_preempted >= 1
    assert first.num_steps == 16, "the first one never waits"
    for sequence in (first, second):
        assert sequence.token_ids == continued_alone(sequence)
    harness.assert_all_free()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "deadline"])
def test_a_full_cache_does_not_thrash(policy: PolicyName) -> None:
    """Eight streams that need twice the pool: each is preempted a few times, not each step."""
    harness = Harness(num_blocks=32, max_running=8, policy=policy)
    live = [harness.add(tokens_from(100 * n, 8), max_new=24) for n in range(8)]
    num_steps = 0
    while harness.scheduler.has_work:
        assert harness.step().chunks
        num_steps += 1
    assert harness.scheduler.num_preempted <= 16
    assert num_steps <= 150
    for sequence in live:
        assert sequence.token_ids == continued_alone(sequence)
    harness.assert_all_free()


def test_idle_drafts_give_up_their_blocks_before_anyone_who_runs() -> None:
    harness = Harness(num_blocks=8, max_running=2)
    draft = harness.draft(tokens_from(0, 12))
    harness.step()
    assert len(draft.block_ids) == 3
    first = harness.add(tokens_from(100, 20), max_new=10)
    harness.run()
    assert harness.scheduler.num_preempted == 0
    assert first.num_steps == 10
    assert not draft.block_ids and harness.scheduler.num_parked == 1
    draft.replace(tokens_from(0, 14))
    harness.scheduler.changed(draft)
    harness.run()
    assert draft.computed_len == 14


def test_pinned_blocks_are_never_taken() -> None:
    harness = Harness(num_blocks=8, max_running=1)
    pinned = harness.draft(tokens_from(0, 8))
    pinned.is_pinned = True
    harness.run()
    blocks = list(pinned.block_ids)
    for first in (100, 200, 300):
        harness.add(tokens_from(first, 16), max_new=6)
        harness.run()
    assert pinned.block_ids == blocks
    reader = harness.add([*tokens_from(0, 8), 99, 98])
    harness.step()
    assert reader.cached_len == 8


# Policies


def test_priority_goes_first_and_loses_its_blocks_last() -> None:
    harness = Harness(max_running=1, policy="priority")
    low = harness.add([1, 2], max_new=1, priority=-1)
    high = harness.add([3, 4], max_new=1, priority=1)
    assert shape(harness.step()) == [(high.seq_id, 0, 2)]
    assert shape(harness.step()) == [(low.seq_id, 0, 2)]
    crowded = Harness(num_blocks=8, max_running=2, policy="priority")
    low = crowded.add(tokens_from(0, 8), max_new=16, priority=0)
    high = crowded.add(tokens_from(50, 8), max_new=16, priority=5)
    while high.num_generated < 16:
        crowded.step()
    assert crowded.scheduler.num_preempted == 1
    assert not low.block_ids and low.num_generated < 16
    crowded.run()
    assert low.token_ids == continued_alone(low)


@pytest.mark.parametrize("policy", ["priority", "deadline"])
def test_who_speaks_takes_the_place_of_one_who_writes(policy: PolicyName) -> None:
    """Not only its turn: answers that are written may take minutes, and all places."""
    harness = Harness(max_running=2, policy=policy)
    writers = [harness.add(tokens_from(20 * n, 8), max_new=30, priority=-1) for n in range(2)]
    for _ in range(3):
        harness.step()
    speaker = harness.add([1, 2], max_new=2)
    assert speaker.seq_id in {seq_id for seq_id, _, _ in shape(harness.step())}
    assert harness.scheduler.num_preempted == 1
    equal = harness.add([3, 4], max_new=2)
    other = harness.add([5, 6], max_new=2)
    harness.step()
    assert {equal.num_steps, other.num_steps} == {0, 1}, "equals wait for each other"
    harness.run()
    for sequence in (*writers, speaker, equal, other):
        assert sequence.token_ids == continued_alone(sequence)
    harness.assert_all_free()


def test_nobody_takes_a_place_by_the_order_of_arrival() -> None:
    harness = Harness(max_running=1, policy="fcfs")
    first = harness.add([1, 2], max_new=5, priority=-1)
    harness.add([3, 4], max_new=1, priority=5)
    while first.num_generated < 5:
        harness.step()
    assert harness.scheduler.num_preempted == 0


def test_who_speaks_gets_the_blocks_of_one_who_writes() -> None:
    harness = Harness(num_blocks=10, max_running=4, policy="deadline")
    writer = harness.add(tokens_from(0, 24), max_new=12, priority=-1)
    harness.step()
    speaker = harness.add(tokens_from(50, 16), max_new=2)
    for _ in range(3):
        harness.step()
    assert speaker.num_generated > 0 and writer.num_generated < 12
    harness.run()
    assert writer.token_ids == continued_alone(writer)
    harness.assert_all_free()


def test_those_who_write_leave_room_to_wait() -> None:
    harness = Harness(max_running=1, max_waiting=8, policy="deadline")
    for _ in range(7):
        harness.add([1, 2], priority=-1)
    with pytest.raises(EngineBusyError):
        harness.add([1, 2], priority=-1)
    speakers = [harness.add([3, 4]) for _ in range(2)]
    with pytest.raises(EngineBusyError):
        harness.add([3, 4])
    harness.run()
    assert all(sequence.num_generated == 3 for sequence in speakers)


def test_the_earliest_deadline_goes_first_and_can_change() -> None:
    harness = Harness(max_running=1, policy="deadline")
    late = harness.add([1, 2], max_new=1, deadline_ns=9 * SECOND_NS)
    soon = harness.add([3, 4], max_new=1, deadline_ns=8 * SECOND_NS)
    late.deadline_ns = 7 * SECOND_NS
    assert shape(harness.step()) == [(late.seq_id, 0, 2)]
    assert shape(harness.step()) == [(soon.seq_id, 0, 2)]


def test_a_stream_with_speech_in_hand_gives_way_to_a_prompt_until_it_runs_dry() -> None:
    harness = Harness(policy="deadline", prompt_budget=10, mixed_budget=5)
    stream = harness.add([1, 2], max_new=50)
    harness.step()
    stream.deadline_ns = 4 * SECOND_NS
    harness.add(tokens_from(100, 60), max_new=1, deadline_ns=SECOND_NS)
    assert shape(harness.step()) == [(2, 0, 10)]
    harness.now_ns = int(3.8 * SECOND_NS)
    assert shape(harness.step()) == [(1, 2, 1), (2, 10, 5)]


def test_streams_give_way_to_nobody_when_no_prompt_can_run() -> None:
    harness = Harness(policy="deadline", max_running=1)
    stream = harness.add([1, 2], max_new=50, deadline_ns=100 * SECOND_NS)
    harness.step()
    harness.add([5, 6])  # waits for a place
    assert shape(harness.step()) == [(stream.seq_id, 2, 1)]


def test_a_request_without_a_deadline_is_not_starved_by_those_with_one() -> None:
    harness = Harness(policy="deadline", max_running=1)
    plain = harness.add([1], max_new=1, arrival_ns=0)
    for _ in range(50):
        harness.now_ns += SECOND_NS // 10
        harness.add([2], max_new=1, deadline_ns=harness.now_ns + SECOND_NS)
        harness.step()
        if plain.num_steps:
            break
    assert plain.num_steps == 1
    assert harness.now_ns <= 2 * SECOND_NS


# Drafts


def test_a_draft_computes_only_what_changed() -> None:
    harness = Harness()
    draft = harness.draft(tokens_from(0, 10))
    assert shape(harness.step()) == [(1, 0, 10)]
    assert not harness.scheduler.has_work and harness.scheduler.num_parked == 1
    assert draft.replace([*tokens_from(0, 6), 90, 91, 92, 93, 94]) == 6
    harness.scheduler.changed(draft)
    plan = harness.step()
    assert shape(plan) == [(1, 6, 5)]
    assert [copy.num_rows for copy in plan.copies] == [2], "the published block stays as it was"
    assert draft.replace(tokens_from(0, 6)) == 6
    harness.scheduler.changed(draft)
    assert not harness.scheduler.has_work
    harness.scheduler.remove(draft)
    harness.assert_all_free()


def test_a_draft_that_changes_while_it_is_computed() -> None:
    harness = Harness(prompt_budget=4)
    draft = harness.draft(tokens_from(0, 10))
    harness.step()
    draft.replace([0, 1, 2, 50, 51])
    harness.scheduler.changed(draft)
    assert shape(harness.step()) == [(1, 3, 2)]
    draft.replace([0, 1, 2])
    harness.scheduler.changed(draft)
    assert not harness.scheduler.has_work
    harness.scheduler.remove(draft)
    harness.assert_all_free()


def test_forks_share_blocks_and_copy_what_they_change() -> None:
    harness = Harness(max_running=4)
    draft = harness.draft(tokens_from(0, 10))
    harness.step()
    fork = harness.make(tokens_from(0, 10), is_open=True, generates=False)
    harness.scheduler.fork(draft, fork)
    assert fork.block_ids == draft.block_ids
    for sequence, tail in ((draft, 60), (fork, 70)):
        sequence.replace([*tokens_from(0, 10), tail])
        harness.scheduler.changed(sequence)
    plan = harness.step()
    assert shape(plan) == [(1, 10, 1), (2, 10, 1)]
    assert len(plan.copies) == 1, "one copies, the other has the block to itself then"
    assert draft.block_ids[:2] == fork.block_ids[:2]
    assert draft.block_ids[2] != fork.block_ids[2]
    for sequence in (draft, fork):
        harness.scheduler.remove(sequence)
    harness.assert_all_free()


def test_too_many_drafts_are_refused() -> None:
    harness = Harness(max_waiting=2, max_running=2)
    for token in (1, 2):
        harness.draft([token])
    harness.run()
    with pytest.raises(EngineBusyError, match="2 drafts are open"):
        harness.draft([3])


@given(
    a=st.lists(st.integers(0, 2), max_size=40),
    b=st.lists(st.integers(0, 2), max_size=40),
    shared=st.lists(st.integers(0, 9), max_size=200),
)
@settings(deadline=None)
def test_common_prefix(a: list[int], b: list[int], shared: list[int]) -> None:
    left, right = shared + a, shared + b
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    assert common_prefix_len(left, right) == count


@given(
    seed=st.integers(0, 10**6),
    num_blocks=st.integers(14, 60),
    max_running=st.integers(1, 4),
    policy=st.sampled_from(("fcfs", "priority", "deadline")),
    prompt_budget=st.integers(1, 40),
    mixed_budget=st.integers(1, 20),
)
@settings(max_examples=120, deadline=None)
def test_any_arrivals_and_aborts_give_what_each_gives_alone(
    seed: int,
    num_blocks: int,
    max_running: int,
    policy: PolicyName,
    prompt_budget: int,
    mixed_budget: int,
) -> None:
    """Conversations that grow, share beginnings, are cut and aborted; rows are checked by PagedKv,
    tokens against a run alone."""
    rng = random.Random(seed)
    harness = Harness(
        num_blocks=num_blocks,
        max_running=max_running,
        policy=policy,
        prompt_budget=prompt_budget,
        mixed_budget=mixed_budget,
    )
    histories = [[9] * rng.randint(0, 20) for _ in range(3)]
    live: list[TokenSequence] = []
    done: list[TokenSequence] = []
    for _ in range(60):
        harness.now_ns += SECOND_NS // 10
        action = rng.random()
        if action < 0.35:
            history = rng.choice(histories)[:30]
            tokens = history[: rng.randint(0, len(history))] if rng.random() < 0.3 else history
            tokens = [*tokens, *(rng.randint(0, 3) for _ in range(rng.randint(1, 12)))]
            options = {
                "generates": rng.random() < 0.8,
                "priority": rng.randint(0, 2),
                "deadline_ns": rng.choice([None, harness.now_ns + rng.randint(0, 3) * SECOND_NS]),
                "salt": rng.choice(["", "", "other"]),
            }
            live.append(harness.add(tokens, rng.randint(1, 6), **options))
        elif action < 0.45 and live:
            victim = live.pop(rng.randrange(len(live)))
            harness.scheduler.remove(victim)
            harness.scheduler.check()
        else:
            harness.step()
        for sequence in [s for s in live if len(s.token_ids) == s.max_len and not s.block_ids]:
            if sequence.num_steps:
                live.remove(sequence)
                done.append(sequence)
                histories[rng.randrange(3)] = sequence.token_ids
    harness.run()
    harness.assert_all_free()
    for sequence in done:
        assert sequence.token_ids == continued_alone(sequence)
