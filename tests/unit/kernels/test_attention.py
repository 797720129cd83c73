"""Attention over runs of cached positions: the CPU implementation against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import reference
from kernels.kv_runs import KvRun, first_visible
from kernels.torch_cpu import attention

TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
NUM_HEADS, HEAD_DIM = 9, 10
CUTS = {"one run": (), "two runs": (0.4,), "five runs": (0.1, 0.15, 0.5, 0.9)}
WINDOWS = {"all": None, "window 1": 1, "window 7": 7, "window 64": 64}


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def cut(keys: torch.Tensor, values: torch.Tensor, at: tuple[float, ...]) -> list[KvRun]:
    """The same positions as runs that lie apart in memory."""
    length = keys.shape[1]
    edges = sorted({0, *(max(1, int(part * length)) for part in at), length})
    return [
        KvRun(keys[:, first:last].clone(), values[:, first:last].clone())
        for first, last in zip(edges, edges[1:], strict=False)
    ]


def attend(module: Any, query: torch.Tensor, runs: list[KvRun], mask: Any, **kwargs: Any) -> Any:
    out = torch.full(query.shape, float("nan"), dtype=query.dtype)
    module.attention_(query, runs, mask, out, **kwargs)
    return out


@pytest.mark.parametrize("at", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("num_kv_heads", [1, 3, 9])
@pytest.mark.parametrize(("start", "length"), [(0, 1), (0, 5), (12, 1), (12, 5), (1, 40), (299, 1)])
def test_fast_equals_reference(
    num_kv_heads: int, start: int, length: int, at: tuple[float, ...]
) -> None:
    cache = rand(2 * num_kv_heads, 400, HEAD_DIM, seed=2)[:, : start + length]
    # Heads that are a part of a wider row, as in the decoder.
    query = rand(length, NUM_HEADS + 4, HEAD_DIM)[:, :NUM_HEADS]
    keys, values = cache[:num_kv_heads], cache[num_kv_heads:]
    runs = cut(keys, values, at)
    fast_mask = attention.attention_mask(start, length)
    fast = attend(attention, query, runs, fast_mask, scale=0.3)
    mask = reference.attention_mask(start, length)
    plain = attend(reference, query, [KvRun(keys, values)], mask, scale=0.3)
    torch.testing.assert_close(fast, plain, **TOLERANCE)


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS.keys())
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(("start", "length"), [(0, 1), (0, 20), (90, 1), (90, 20)])
def test_window_and_softcap_follow_their_definition(
    start: int, length: int, softcap: float | None, window: int | None
) -> None:
    """Each row by hand: its own last ``window`` positions, scores bounded before the softmax."""
    end, first = start + length, first_visible(start, window)
    keys, values, query = rand(1, end, 8), rand(1, end, 8, seed=1), rand(length, 2, 8, seed=2)
    for module in (attention, reference):
        runs = cut(keys[:, first:], values[:, first:], (0.5,))
        mask = module.attention_mask(start, length, window)
        result = attend(module, query, runs, mask, scale=1.5, softcap=softcap)
        for row in range(length):
            at = start + row
            seen = slice(0 if window is None else max(0, at - window + 1), at + 1)
            scores = 1.5 * keys[0, seen] @ query[row].T
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            expected = torch.softmax(scores, 0).T @ values[0, seen]
            torch.testing.assert_close(result[row], expected, **TOLERANCE)


def test_many_rows_are_processed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, values, query = rand(3, 50, 8), rand(3, 50, 8, seed=1), rand(20, 9, 8, seed=2)
    runs, mask = cut(keys, values, (0.3,)), reference.attention_mask(30, 20)
    whole = attend(attention, query, runs, mask, scale=1.0)
    monkeypatch.setattr(attention, "_MAX_SCORES", 9 * 50 * 3)
    torch.testing.assert_close(attend(attention, query, runs, mask, scale=1.0), whole)


@pytest.mark.parametrize(("start", "length"), [(40, 1), (20, 21)])
@pytest.mark.parametrize("at", CUTS.values(), ids=CUTS.keys())
def test_int8_runs_equal_dequantised_runs(start: int, length: int, at: tuple[float, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(-127, 128, (6, 41, 8), generator=generator, dtype=torch.int8)
    scales = torch.rand(6, 41, generator=generator) / 40
    numbers = codes.float() * scales.unsqueeze(-1)
    edges = [0, *(int(part * 41) for part in at), 41]
    runs = [
        KvRun(codes[:3, a:b], codes[3:, a:b], scales[:3, a:b], scales[3:, a:b])
        for a, b in zip(edges, edges[1:], strict=False)
    ]
    query = rand(length, 9, 8)
    mask = reference.attention_mask(start, length)
    plain = attend(reference, query, [KvRun(numbers[:3], numbers[3:])], mask, scale=0.4)
    for module in (attention, reference):
        result = attend(module, query, runs, module.attention_mask(start, length), scale=0.4)
        torch.testing.assert_close(result, plain, **TOLERANCE)


def test_large_scores_are_finite() -> None:
    query, keys = 1e4 * rand(1, 2, 8), 1e4 * rand(1, 6, 8, seed=1)
    out = attend(attention, query, [KvRun(keys, rand(1, 6, 8, seed=2))], None, scale=0.35)
    assert bool(out.isfinite().all())
