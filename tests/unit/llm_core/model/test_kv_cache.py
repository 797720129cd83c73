"""The KV cache: layout, contiguous runs, and the error of quantised dtypes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_core.batch import ForwardBatch, Segment
from llm_core.config import KvDtype
from llm_core.model.kv_cache import KvCache, contiguous_runs
from tests.support.random_llama import random_tokens, run_chunk, tiny_config, tiny_runner


def batch_of(*segments: Segment) -> ForwardBatch:
    num_rows = sum(segment.length for segment in segments)
    return ForwardBatch(torch.zeros(num_rows, dtype=torch.int64), segments, torch.arange(0))


def test_positions_follow_the_block_table() -> None:
    cache = KvCache(tiny_config(), 8, block_size=4)
    batch = batch_of(Segment((3, 1), 2, 4), Segment((7,), 0, 2))
    assert cache.positions(batch).tolist() == [14, 15, 4, 5, 28, 29]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_runs_return_what_was_written(dtype: KvDtype) -> None:
    config = tiny_config()
    cache = KvCache(config, 8, block_size=4, dtype=dtype)
    segment = Segment((5, 6, 2), 0, 10)
    rows = torch.randn(2 * config.num_kv_heads, 10, config.head_dim)
    for layer in range(config.num_layers):
        cache.write(layer, cache.positions(batch_of(segment)), (layer + 1) * rows)
    for layer, runs in enumerate(cache.runs(segment.block_ids, 1, 10)):
        assert [run.length for run in runs] == [7, 2], "blocks 5 and 6 are one view"
        keys = torch.cat([run.keys.float() for run in runs], 1)
        if dtype == "int8":
            assert all(run.key_scales is not None for run in runs)
            scales = torch.cat([run.key_scales for run in runs if run.key_scales is not None], 1)
            keys = keys * scales.unsqueeze(-1)
        expected = (layer + 1) * rows[: config.num_kv_heads, 1:]
        # Half a step of 127 for a head's largest magnitude; eight bits for bfloat16.
        bound = {"float32": 0.0, "bfloat16": 2**-8, "int8": 0.51 / 127}[dtype]
        largest = expected.abs().amax(-1, keepdim=True)
        assert bool(((keys - expected).abs() <= bound * largest).all())


def test_int8_of_zeros_and_of_large_numbers() -> None:
    cache = KvCache(tiny_config(), 2, block_size=4, dtype="int8")
    rows = torch.zeros(4, 2, 16)
    rows[0, 1] = 1e30
    cache.write(0, torch.tensor([0, 1]), rows)
    (run,) = cache.runs((0,), 0, 2)[0]
    assert run.key_scales is not None
    numbers = run.keys * run.key_scales.unsqueeze(-1)
    assert bool(numbers.isfinite().all())
    assert numbers[0, 0].abs().max() == 0
    torch.testing.assert_close(numbers[0, 1], torch.full((16,), 1e30))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_copied_rows_include_their_scales(dtype: KvDtype) -> None:
    config = tiny_config()
    tokens = random_tokens(config, 12)
    runner = tiny_runner(config, kv_dtype=dtype)
    expected = run_chunk(runner, tokens)[8:]
    runner.copy_block_rows(0, 9, 8)
    again = run_chunk(runner, tokens[8:], block_ids=(9,), start=8)
    torch.testing.assert_close(again, expected, atol=2e-5, rtol=2e-5)


def test_num_bytes() -> None:
    config = tiny_config()  # 2 layers, 2 + 2 heads of 16
    per_position = {
        dtype: KvCache.num_bytes(config, 1, 1, dtype) for dtype in ("float32", "bfloat16", "int8")
    }
    assert per_position == {"float32": 512, "bfloat16": 256, "int8": 2 * 4 * (16 + 4)}
    for dtype, num_bytes in per_position.items():
        cache = KvCache(config, 3, 4, dtype)
        held = cache.data.nbytes + (0 if cache.scales is None else cache.scales.nbytes)
        assert held == 12 * num_bytes


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.08), ("int8", 0.12)])
def test_drift_does_not_grow_with_length(dtype: KvDtype, most: float) -> None:
    """Without scales of their own, positions far away would add up to more and more error."""
    config = tiny_config(context_len=512)
    tokens = random_tokens(config, 512)
    logits = {}
    for kind in ("float32", dtype):
        runner = tiny_runner(config, kv_dtype=kind)
        logits[kind] = torch.cat(
            [run_chunk(runner, tokens[at : at + 32], start=at) for at in range(0, 512, 32)]
        )
    drift = (logits[dtype] - logits["float32"]).abs().amax(-1)
    assert 0 < drift.max() < most
    early, late = drift[32:128].mean(), drift[-96:].mean()
    assert late < 1.5 * early


@given(
    block_ids=st.lists(st.integers(0, 30), min_size=1, max_size=12, unique=True),
    block_size=st.integers(1, 5),
    data=st.data(),
)
@settings(deadline=None)
def test_runs_are_minimal_and_cover_each_position_once(
    block_ids: list[int], block_size: int, data: st.DataObject
) -> None:
    end = data.draw(st.integers(1, len(block_ids) * block_size))
    first = data.draw(st.integers(0, end - 1))
    runs = contiguous_runs(block_ids, block_size, first, end)
    covered = [at for start, stop in runs for at in range(start, stop)]
    assert covered == [
        block_ids[at // block_size] * block_size + at % block_size for at in range(first, end)
    ]
    assert all(a[1] != b[0] for a, b in zip(runs, runs[1:], strict=False))
