"""The pool of blocks: nothing lost, nothing twice, neighbours where possible."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_core.scheduling.block_pool import BlockPool


def test_blocks_behind_the_last_one_come_first() -> None:
    pool = BlockPool(20)
    first = pool.allocate(4)
    assert first == list(range(first[0], first[0] + 4))
    assert pool.allocate(3, after=first[-1]) == [first[-1] + n for n in (1, 2, 3)]
    pool.check(range(first[0], first[0] + 7))


def test_two_that_grow_in_turns_stay_in_one_piece() -> None:
    pool = BlockPool(64)
    tables = [pool.allocate(4), pool.allocate(4)]
    for _ in range(8):
        for table in tables:
            table += pool.allocate(1, after=table[-1])
    for table in tables:
        assert table == list(range(table[0], table[0] + 12))


def test_pieces_are_used_when_no_run_is_long_enough() -> None:
    pool = BlockPool(6)
    pool.allocate(6)
    for block in (0, 2, 3, 5):
        pool.release(block)
    assert sorted(pool.allocate(4)) == [0, 2, 3, 5]
    assert pool.num_free == 0


def test_after_the_last_block_there_is_another_place() -> None:
    pool = BlockPool(3)
    pool.allocate(3)
    pool.release(0)
    assert pool.allocate(1, after=2) == [0]


def test_shared_blocks_are_free_with_the_last_holder() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.retain(block)
    pool.release(block)
    assert pool.num_free == 1
    pool.check([block])
    pool.release(block)
    assert pool.num_free == 2
    pool.check([])


def test_misuse_is_caught() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 free"):
        pool.allocate(3)
    with pytest.raises(AssertionError, match="is free"):
        pool.release(0)
    with pytest.raises(AssertionError, match="is free"):
        pool.retain(0)
    (block,) = pool.allocate(1)
    with pytest.raises(AssertionError, match="1 of 2 references"):
        pool.check([block, block])


@given(seed=st.integers(0, 10**6), num_blocks=st.integers(1, 40))
@settings(deadline=None)
def test_random_use_keeps_the_books(seed: int, num_blocks: int) -> None:
    rng = random.Random(seed)
    pool, held = BlockPool(num_blocks), list[int]()
    for _ in range(60):
        action = rng.random()
        if action < 0.5 and pool.num_free:
            after = rng.choice([None, rng.randrange(num_blocks)])
            count = rng.randint(0, pool.num_free)
            got = pool.allocate(count, after=after)
            assert len(set(got)) == count and not set(got) & set(held)
            held += got
        elif held:
            block = held[rng.randrange(len(held))]
            if action < 0.7:
                pool.retain(block)
                held.append(block)
            else:
                pool.release(block)
                held.remove(block)
        pool.check(held)
