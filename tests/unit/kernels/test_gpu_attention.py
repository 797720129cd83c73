"""Paged attention of the GPU kernels against the reference, in Triton's interpreter."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from kernels.gpu import KvPages, load_ops
from kernels.gpu.attention import prefill, split
from kernels.gpu.attention.ancestors import ancestor_bits_cost
from kernels.gpu.attention.blocks import attention_cost
from kernels.gpu.tuning import TUNER
from tests.support.gpu_guard import NUM_CASES_FACTOR, Guards, assert_close, fresh_rng, guarded
from tests.support.gpu_pages import make_pages, make_ragged

TRITON, ORACLE = load_ops("triton"), load_ops("oracle")

# (activations, cache): every dtype of each, in the pairs that a decoder uses
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.int8),
    (torch.float32, torch.int8),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.float32, torch.bfloat16),
]
HEAD_DIMS = (64, 80, 96, 128)
MAX_GROUP = 9  # query heads of a key/value head


def draw_case(
    rng: random.Random, guards: Guards, index: int, first_group: int, num_blocks: int = 64
) -> tuple[KvPages, int, torch.dtype, dict[str, Any]]:
    """(pages, number of query heads, dtype of activations, options). Dtypes and head dimensions are
    gone through in each test, and groups from ``first_group`` on: in all tests together, all."""
    dtype, kv_dtype = DTYPES[index % len(DTYPES)]
    num_kv_heads = rng.choice((1, 1, 2))
    group = (first_group + index) % MAX_GROUP + 1
    shape = (num_blocks, rng.choice((16, 16, 32, 8)))
    pages = make_pages(guards, num_kv_heads, HEAD_DIMS[index % len(HEAD_DIMS)], shape, kv_dtype)
    options = {
        "scale": rng.uniform(0.5, 1.5) * pages.head_dim**-0.5,
        "softcap": rng.choice((None, None, 2.0)),
        "window": rng.choice((None, None, 1, 9, 40)),
    }
    print(f"case {index}: {dtype}, {kv_dtype}, {shape}, {group=}, {num_kv_heads=}, {options}")
    return pages, num_kv_heads * group, dtype, options


def lengths_of(rng: random.Random, block_size: int, num_sequences: int) -> list[int]:
    """Of sequences: one position, a page and one, anything in between."""
    choices = (1, block_size - 1, block_size, block_size + 1, 2 * block_size, 3 * block_size + 1)
    return [rng.choice((*choices, rng.randint(1, 150))) for _ in range(num_sequences)]


@pytest.mark.parametrize("index", range(len(DTYPES) * NUM_CASES_FACTOR))
def test_decode(index: int) -> None:
    rng = fresh_rng()
    with guarded() as guards:
        pages, num_heads, dtype, options = draw_case(rng, guards, index, 0)
        lengths = lengths_of(rng, pages.block_size, 2)
        lengths.insert(rng.randint(0, 2), 0)  # fills up a bucket
        starts = [max(length - 1, 0) for length in lengths]
        ragged = make_ragged(rng, guards, [int(n > 0) for n in lengths], starts, pages)
        query = guards.wrap(torch.randn(3, num_heads, pages.head_dim).to(dtype))
        call = (query, pages, ragged.block_tables, guards.wrap(torch.tensor(lengths).int()))
        # A bound that is far too large asks for parts that nobody fills.
        bound = max(lengths) * rng.choice((1, 4))
        found = TRITON.decode_attention(*call, max_length=bound, **options)
        expected = ORACLE.decode_attention(*call, max_length=bound, **options)
    assert_close(found, expected, dtype)
    assert not found[lengths.index(0)].any(), "length 0 gives zeros"


def test_decode_over_a_long_context_is_split() -> None:
    rng = fresh_rng()
    with guarded() as guards:
        pages = make_pages(guards, 1, 64, (40, 32), torch.float32)
        lengths = [1100, 3, 70]
        ragged = make_ragged(rng, guards, [1, 1, 1], [n - 1 for n in lengths], pages)
        query = guards.wrap(torch.randn(3, 3, 64))
        call = (query, pages, ragged.block_tables, guards.wrap(torch.tensor(lengths).int()))
        for window in (None, 500):
            options: dict[str, Any] = {"max_length": 1100, "scale": 0.125, "window": window}
            found = TRITON.decode_attention(*call, **options)
            assert_close(found, ORACLE.decode_attention(*call, **options), torch.float32)


@pytest.mark.parametrize("index", range(len(DTYPES) * NUM_CASES_FACTOR))
def test_prefill(index: int) -> None:
    rng = fresh_rng()
    with guarded() as guards:
        pages, num_heads, dtype, options = draw_case(rng, guards, index, 3)
        lengths = [rng.choice((1, 2, 17, rng.randint(1, 40))) for _ in range(2)]
        lengths.insert(rng.randint(0, 2), 0)
        starts = [rng.choice((0, pages.block_size, rng.randint(1, 100))) for _ in lengths]
        ragged = make_ragged(rng, guards, lengths, starts, pages)
        num_extra = rng.randint(0, 2)  # rows of no sequence
        shape = (ragged.num_rows + num_extra, num_heads, pages.head_dim)
        query = guards.wrap(torch.randn(shape).to(dtype))
        call = (query, pages, ragged.block_tables, ragged.query_starts, ragged.starts)
        bound = max(lengths) + rng.randint(0, 3)
        found = TRITON.prefill_attention(*call, max_query_len=bound, **options)
        expected = ORACLE.prefill_attention(*call, max_query_len=bound, **options)
    assert_close(found[: ragged.num_rows], expected[: ragged.num_rows], dtype)
    assert bool(found[ragged.num_rows :].isnan().all()), "rows of no sequence are not written"


@pytest.mark.parametrize("index", range(len(DTYPES) * NUM_CASES_FACTOR))
def test_tree(index: int) -> None:
    rng = fresh_rng()
    with guarded() as guards:
        pages, num_heads, dtype, options = draw_case(rng, guards, index, 6)
        lengths = [rng.choice((1, 2, 4)), rng.choice((1, 3, 5))]
        lengths.insert(rng.randint(0, 2), 0)
        starts = [n - 1 for n in lengths_of(rng, pages.block_size, 3)]
        ragged = make_ragged(rng, guards, lengths, starts, pages)
        longest = max(lengths)
        reach = max(s + n for s, n in zip(starts, lengths, strict=True)) * rng.choice((1, 3))
        bits = TRITON.ancestor_bits(ragged.parents, ragged.query_starts, max_query_len=longest)
        query = guards.wrap(torch.randn(ragged.num_rows, num_heads, pages.head_dim).to(dtype))
        call = (query, pages, ragged.block_tables, ragged.query_starts, ragged.starts)
        call += (ragged.positions, bits)
        options |= {"max_query_len": longest, "max_length": reach}
        found = TRITON.tree_attention(*call, **options)
        expected = ORACLE.tree_attention(*call, **options)
    assert_close(found, expected, dtype)


def test_tree_of_more_than_32_rows() -> None:
    rng = fresh_rng()
    with guarded() as guards:
        pages = make_pages(guards, 1, 64, (16, 16), torch.float32)
        ragged = make_ragged(rng, guards, [2, 40], [20, 70], pages)
        bits = TRITON.ancestor_bits(ragged.parents, ragged.query_starts, max_query_len=40)
        query = guards.wrap(torch.randn(42, 1, 64))
        call = (query, pages, ragged.block_tables, ragged.query_starts, ragged.starts)
        call += (ragged.positions, bits)
        options: dict[str, Any] = {"max_query_len": 40, "max_length": 110, "scale": 0.3}
        found = TRITON.tree_attention(*call, **options)
        expected = ORACLE.tree_attention(*call, **options)
    assert_close(found, expected, torch.float32)


def test_a_chain_gives_the_same_as_tree_and_as_chunk() -> None:
    """Verifying a chain, a prefill chunk, and one row after another are the same attention."""
    rng = fresh_rng()
    with guarded() as guards:
        pages = make_pages(guards, 2, 64, (16, 16), torch.float32)
        ragged = make_ragged(rng, guards, [4], [30], pages)
        chain = torch.tensor([-1, 0, 1, 2], dtype=torch.int32)
        query = guards.wrap(torch.randn(4, 6, 64))
        bits = TRITON.ancestor_bits(chain, ragged.query_starts, max_query_len=4)
        assert bits.flatten().tolist() == [0b1, 0b11, 0b111, 0b1111]
        call = (query, pages, ragged.block_tables, ragged.query_starts, ragged.starts)
        positions = torch.arange(30, 34, dtype=torch.int32)
        options: dict[str, Any] = {"scale": 0.2, "window": 25}
        tree = TRITON.tree_attention(
            *call, positions, bits, max_query_len=4, max_length=34, **options
        )
        chunk = TRITON.prefill_attention(*call, max_query_len=4, **options)
        rows = TRITON.decode_attention(
            query,
            pages,
            guards.wrap(ragged.block_tables.expand(4, -1)),
            positions + 1,
            max_length=34,
            **options,
        )
    assert_close(tree, chunk, torch.float32)
    assert_close(rows, chunk, torch.float32)


def test_ancestor_bits() -> None:
    rng = fresh_rng()
    for num_rows in (1, 40):
        with guarded() as guards:
            pages = make_pages(guards, 1, 64, (16, 16), torch.float32)
            ragged = make_ragged(rng, guards, [0, num_rows, 3], [0, 5, 9], pages)
            parents = guards.wrap(torch.cat((ragged.parents, torch.tensor([7, 7]).int())))
            call = (parents, ragged.query_starts)
            found = TRITON.ancestor_bits(*call, max_query_len=num_rows + 2)
            expected = ORACLE.ancestor_bits(*call, max_query_len=num_rows + 2)
        assert torch.equal(found, expected)
        assert not found[-2:].any(), "rows of no sequence see nothing"


def test_every_launch_configuration_gives_the_same() -> None:
    rng = fresh_rng()
    with guarded() as guards:
        pages = make_pages(guards, 1, 64, (16, 16), torch.float32)
        ragged = make_ragged(rng, guards, [22], [90], pages)
        query = guards.wrap(torch.randn(22, 3, 64))
        call = (query, pages, ragged.block_tables, ragged.query_starts, ragged.starts)
        expected = ORACLE.prefill_attention(*call, max_query_len=22, scale=0.1)
        configs = (*prefill.CONFIGS, *prefill.SMALL_CONFIGS)
        for config in (*configs, *prefill.SMALLER):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(TUNER, "choose", lambda *_, config=config: config)
                found = TRITON.prefill_attention(*call, max_query_len=22, scale=0.1)
            assert_close(found, expected, torch.float32)
        lengths = guards.wrap(torch.tensor([112], dtype=torch.int32))
        decode = (query[-1:], pages, ragged.block_tables, lengths)
        for config in (*split.CONFIGS, *split.SMALLER):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(TUNER, "choose", lambda *_, config=config: config)
                found = TRITON.decode_attention(*decode, max_length=112, scale=0.1)
            assert_close(found, expected[-1:], torch.float32)


def test_empty_batches() -> None:
    with guarded() as guards:
        pages = make_pages(guards, 1, 64, (2, 16), torch.float32)
        nothing = torch.zeros(0, dtype=torch.int32)
        tables = torch.zeros(0, 1, dtype=torch.int32)
        query = torch.zeros(0, 2, 64)
        edges = torch.zeros(1, dtype=torch.int32)
        decoded = TRITON.decode_attention(query, pages, tables, nothing, max_length=1, scale=1.0)
        chunk = TRITON.prefill_attention(
            query, pages, tables, edges, nothing, max_query_len=1, scale=1.0
        )
        bits = TRITON.ancestor_bits(nothing, edges, max_query_len=1)
    assert decoded.shape == chunk.shape == (0, 2, 64)
    assert bits.shape == (0, 1)


def test_cost_counts_bytes_read() -> None:
    pages = KvPages(torch.zeros(4, 32, 64, dtype=torch.int8), torch.zeros(4, 32), 16)
    cost = attention_cost(torch.zeros(3, 6, 64), pages, num_keys=20, num_pairs=50)
    assert cost.num_bytes == 20 * 4 * (64 + 4) + 2 * 3 * 6 * 64 * 4
    assert cost.num_flops == 50 * 6 * 64 * 2 * 2
    assert ancestor_bits_cost(torch.zeros(9, dtype=torch.int32), 33).num_bytes == 9 * 4 + 9 * 8
