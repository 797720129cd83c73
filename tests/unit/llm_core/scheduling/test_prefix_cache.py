"""What is reused of earlier requests, whom it is shared with, and what is given up when."""

from __future__ import annotations

import pytest

from llm_core.scheduling import prefix_cache
from llm_core.scheduling.prefix_cache import CachedBlock
from tests.support.paged_kv import Harness, shape


def tokens_from(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def test_the_next_turn_reuses_all_of_the_last_one() -> None:
    harness = Harness()
    first = harness.add(tokens_from(0, 30), max_new=5)
    harness.run()
    second = harness.add([*first.token_ids, 7, 8, 9])
    plan = harness.step()
    assert second.cached_len == 34  # the last generated token was never computed
    assert plan.copies == [], "a block that was left unfinished is taken over"


@pytest.mark.parametrize("cut", range(30, 46))
def test_a_reply_cut_at_any_token_keeps_the_rest(cut: int) -> None:
    """Barge-in: the history has what was heard. The blocks that others see never change."""
    harness = Harness()
    first = harness.add(tokens_from(0, 30), max_new=20)
    harness.run()
    heard = first.token_ids[:cut]
    second = harness.add([*heard, 99, 98], max_new=3)
    harness.step()
    assert second.cached_len == cut
    # What was said in full is still there for whoever goes on from it.
    third = harness.add([*first.token_ids, 97], max_new=3)
    harness.run()
    assert third.cached_len >= 48


def test_a_shared_system_prompt_is_shared_while_its_first_reader_runs() -> None:
    harness = Harness()
    system = tokens_from(0, 51)
    first = harness.add([*system, 99], max_new=10)
    harness.step()
    second = harness.add([*system, 77, 78])
    harness.step()
    assert second.cached_len == 51, "twelve blocks, and three rows of one that goes on differently"
    assert first.block_ids[:12] == second.block_ids[:12]


def test_rows_of_the_same_step_are_not_shared() -> None:
    """Two requests with the same prefix in one step: a hash is known only after the forward."""
    harness = Harness()
    first, second = harness.add(tokens_from(0, 30)), harness.add(tokens_from(0, 30))
    plan = harness.step()
    assert (first.cached_len, second.cached_len) == (0, 0)
    assert shape(plan) == [(1, 0, 30), (2, 0, 30)]
    harness.run()
    harness.assert_all_free()


def test_a_whole_cached_prompt_leaves_one_token() -> None:
    for length in (16, 17, 19):
        harness = Harness()
        harness.add(tokens_from(0, length), generates=False)
        harness.run()
        again = harness.add(tokens_from(0, length))
        assert shape(harness.step()) == [(2, length - 1, 1)]
        assert again.cached_len == length - 1


def test_tenants_share_nothing() -> None:
    harness = Harness()
    harness.add(tokens_from(0, 30), salt="a", generates=False)
    harness.run()
    other = harness.add(tokens_from(0, 30), salt="b")
    same = harness.add(tokens_from(0, 30), salt="a")
    harness.step()
    assert (other.cached_len, same.cached_len) == (0, 29)


def test_tokens_are_compared_when_hashes_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys equal: still nobody gets a block of other tokens."""
    harness = Harness()
    monkeypatch.setattr(harness.tables.cache, "_hash", lambda parent, content: b"same")
    harness.add([1, 2, 3, 4, 5], generates=False)
    harness.run()
    other = harness.add([6, 7, 8, 9, 10], max_new=2)
    harness.run()  # PagedKv checks every row that is read
    assert other.cached_len == 0


def test_the_longest_unused_goes_first_and_ends_before_beginnings() -> None:
    harness = Harness(num_blocks=12)

    def cached_len_of(first: int) -> int:
        sequence = harness.add(tokens_from(first, 16), max_new=1)
        harness.run()
        return sequence.cached_len

    assert [cached_len_of(first) for first in (0, 100, 200)] == [0, 0, 0]
    assert cached_len_of(0) == 15  # which makes 100 the longest unused
    assert cached_len_of(300) == 0
    assert cached_len_of(200) == 15
    assert harness.tables.cache.counts.evicted_blocks >= 4
    assert cached_len_of(100) == 0
    # A block less was needed than the oldest has: its beginning is still of use.
    smaller = Harness(num_blocks=12)
    smaller.add(tokens_from(0, 16), max_new=1)
    smaller.run()
    smaller.add(tokens_from(100, 40), max_new=1)
    smaller.run()
    again = smaller.add(tokens_from(0, 16), max_new=1)
    smaller.step()
    assert again.cached_len == 8


def test_a_full_pool_gives_the_copy_its_own_source() -> None:
    """Nothing is free but the block whose rows are to be copied."""
    harness = Harness(num_blocks=3)
    harness.add(tokens_from(0, 12), generates=False)
    harness.run()
    again = harness.add([*tokens_from(0, 10), 90, 91], max_new=0, generates=False)
    harness.run()
    assert again.cached_len == 10
    harness.assert_all_free()


def test_short_beginnings_of_known_blocks_are_not_kept_twice() -> None:
    harness = Harness()
    for length in (18, 17, 19, 18):
        harness.add(tokens_from(0, length), generates=False)
        harness.run()
    assert harness.tables.cache.cached_len == 19


def test_counts() -> None:
    harness = Harness()
    for _ in range(2):
        harness.add(tokens_from(0, 20), generates=False)
        harness.run()
    counts = harness.tables.cache.counts
    assert (counts.prompt_tokens, counts.hit_tokens) == (40, 19)


def test_many_siblings_are_looked_at_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "_MAX_SIBLINGS", 3)
    harness = Harness(num_blocks=200)
    for first in range(100, 110):
        harness.add([*tokens_from(0, 4), first, first + 1], generates=False)
        harness.run()
    cached_lens = []
    for first in (109, 100):
        sequence = harness.add([*tokens_from(0, 4), first, first + 1, 5], generates=False)
        harness.run()
        cached_lens.append(sequence.cached_len)
    assert cached_lens == [6, 4]


def test_damage_is_noticed() -> None:
    harness = Harness()
    harness.add(tokens_from(0, 9), generates=False)
    harness.run()
    cache = harness.tables.cache
    block, entry = next(iter(cache._by_block.items()))
    cache._by_block[block] = CachedBlock(block, entry.parent, (*entry.tokens[:-1], 99), entry.key)
    with pytest.raises(AssertionError):
        harness.scheduler.check()
