"""Row-wise GPU kernels against the reference, in Triton's interpreter."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from kernels.gpu import GpuOps, KvPages, load_ops
from kernels.gpu.embed import embed_cost
from kernels.gpu.matmul.gated import gated_cost
from kernels.gpu.move_rows import move_rows_cost
from kernels.gpu.norm import rms_norm_cost
from kernels.gpu.ops import GateName
from kernels.gpu.rope_store import rope_store_cost
from tests.support.gpu_guard import NUM_CASES_FACTOR, Guards, assert_close, fresh_rng, guarded
from tests.support.gpu_pages import make_pages

TRITON, ORACLE = load_ops("triton"), load_ops("oracle")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KV_DTYPES = (*DTYPES, torch.int8, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("repeat", range(NUM_CASES_FACTOR))
def test_norms(dtype: torch.dtype, repeat: int) -> None:
    rng = fresh_rng()
    for size in (1, 576, rng.randint(2, 1500)):
        with guarded() as guards:
            num_rows = rng.randint(1, 4)
            wide = guards.wrap((3 * torch.randn(num_rows, size + 24)).to(dtype))
            x = wide[:, 8 : 8 + size]  # rows that do not follow one another
            weight = guards.wrap(torch.randn(size).to(dtype))
            assert_close(TRITON.rms_norm(x, weight, 1e-5), ORACLE.rms_norm(x, weight, 1e-5), dtype)
            post = rng.choice((None, guards.wrap(torch.randn(size))))
            start = torch.randn(num_rows, size).to(dtype)
            sums = [guards.wrap(start), guards.wrap(start)]
            found, expected = (
                ops.add_rms_norm_(total, x, weight, 1e-6, post_weight=post)
                for ops, total in zip((TRITON, ORACLE), sums, strict=True)
            )
        assert_close(found, expected, dtype)
        assert_close(sums[0], sums[1], dtype)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 8])
def test_parts_of_a_product_are_summed(num_parts: int) -> None:
    rng = fresh_rng()
    with guarded() as guards:
        parts = guards.wrap(torch.randn(num_parts, 3, 96))
        weight, start = guards.wrap(torch.randn(96)), torch.randn(3, 96)
        sums = [guards.wrap(start), guards.wrap(start)]
        normed = [
            ops.add_rms_norm_(total, parts, weight, 1e-6, out_dtype=torch.bfloat16)
            for ops, total in zip((TRITON, ORACLE), sums, strict=True)
        ]
        case = draw_rope_case(rng, guards, 64)
        whole, num_kv_heads = case.pop("qkv"), case.pop("num_kv_heads")
        case["qkv"] = guards.wrap(torch.randn(num_parts, *whole.shape))
        pages = [make_pages(guards, num_kv_heads, 64, (4, 16), torch.float32) for _ in range(2)]
        pages[1].data.copy_(pages[0].data)
        queries = [
            ops.rope_store(pages=kept, out_dtype=torch.bfloat16, **case)
            for ops, kept in zip((TRITON, ORACLE), pages, strict=True)
        ]
    assert_close(sums[0], sums[1], torch.float32)
    assert_close(pages[0].data, pages[1].data, torch.float32)
    for found, expected in (normed, queries):
        assert found.dtype == expected.dtype == torch.bfloat16
        assert_close(found, expected, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
def test_gated(dtype: torch.dtype, gate: GateName) -> None:
    rng = fresh_rng()
    for size in (1, 100, rng.randint(1000, 2100)):
        with guarded() as guards:
            gate_up = guards.wrap((4 * torch.randn(rng.randint(1, 3), 2 * size)).to(dtype))
            found = TRITON.gated(gate_up, gate)
        assert_close(found, ORACLE.gated(gate_up, gate), dtype)


def test_gates_are_finite_for_huge_values() -> None:
    gate_up = torch.tensor([[1e4, -1e4, 60.0, -60.0, 1.0, 1.0, 1.0, 1.0]])
    for gate in ("silu", "gelu_tanh"):
        found = TRITON.gated(gate_up, gate)
        torch.testing.assert_close(found, torch.tensor([[1e4, 0.0, 60.0, 0.0]]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embed(dtype: torch.dtype) -> None:
    rng = fresh_rng()
    with guarded() as guards:
        size = rng.choice((1, 63, 1100))
        table = guards.wrap(torch.randn(37, size).to(dtype))
        ids = guards.wrap(torch.tensor([36, 0, -1, 37, 5, 1 << 40]))
        found = TRITON.embed(table, ids, 1.5)
    assert_close(found, ORACLE.embed(table, ids, 1.5), dtype)


def test_embed_takes_tokens_sampled_by_the_previous_step() -> None:
    fresh_rng()
    with guarded() as guards:
        table = guards.wrap(torch.randn(37, 70).bfloat16())
        ids = guards.wrap(torch.tensor([5, -1, 7, 36], dtype=torch.int32))
        sources = guards.wrap(torch.tensor([-1, 1, -1, 2], dtype=torch.int32))
        chosen = guards.wrap(torch.tensor([30, 31, 99]))
        found, expected = (
            ops.embed(table, ids, 2.0, sources=sources, chosen=chosen, out_dtype=torch.float32)
            for ops in (TRITON, ORACLE)
        )
    assert found.dtype == torch.float32 and torch.equal(found, expected)
    wanted = torch.stack([*table[[5, 31, 7]].float(), torch.zeros(70)])
    assert torch.equal(found, 2 * wanted), "an id outside of the vocabulary gives zeros"


def draw_rope_case(rng: random.Random, guards: Guards, head_dim: int) -> dict[str, Any]:
    """Arguments of ``rope_store`` but for the pages."""
    num_heads, num_kv_heads = rng.choice(((1, 1), (4, 2), (9, 3), (7, 1)))
    num_rows = rng.randint(1, 4)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    norm = rng.choice((None, guards.wrap(torch.randn(head_dim))))
    slots = torch.randperm(64)[:num_rows]
    slots[rng.randrange(num_rows)] = -1
    rotations = torch.randn(50, head_dim // 2, 2)
    return {
        "qkv": guards.wrap(torch.randn(num_rows, width)),
        "rotations": guards.wrap(rotations),
        "positions": guards.wrap(torch.randint(0, 50, (num_rows,), dtype=torch.int32)),
        "slots": guards.wrap(slots),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "bias": rng.choice((None, guards.wrap(torch.randn(width)))),
        "query_norm": norm,
        "key_norm": rng.choice((norm, None)),
        "eps": 1e-5,
    }


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("repeat", range(2 * NUM_CASES_FACTOR))
def test_rope_store(kv_dtype: torch.dtype, repeat: int) -> None:
    rng = fresh_rng()
    dtype, head_dim = rng.choice(DTYPES), rng.choice(((64, 96), (80, 128))[repeat % 2])
    with guarded() as guards:
        case = draw_rope_case(rng, guards, head_dim)
        case["qkv"] = guards.wrap(case["qkv"].to(dtype))
        num_kv_heads = case.pop("num_kv_heads")
        before = make_pages(guards, num_kv_heads, head_dim, (4, 16), kv_dtype)

        def run(ops: GpuOps) -> tuple[torch.Tensor, KvPages]:
            scales = None if before.scales is None else guards.wrap(before.scales)
            pages = KvPages(guards.wrap(before.data), scales, 16)
            return ops.rope_store(pages=pages, **case), pages

        (found, stored), (expected, expected_stored) = run(TRITON), run(ORACLE)
    assert_close(found, expected, dtype)
    kept = case["slots"][case["slots"] >= 0]
    others = torch.ones(64, dtype=torch.bool)
    others[kept] = False
    raw, raw_before = stored.data.view(torch.uint8), before.data.view(torch.uint8)
    assert torch.equal(raw[:, others], raw_before[:, others]), "only the rows' slots are written"
    if stored.scales is None or expected_stored.scales is None:
        assert_close(stored.data, expected_stored.data, kv_dtype)
        return
    torch.testing.assert_close(stored.scales, expected_stored.scales, rtol=1e-5, atol=0)
    # A value between two codes may fall to either: one step of int8, one of 3-bit fractions.
    found_codes, codes = stored.data.float(), expected_stored.data.float()
    step = 1.0 if kv_dtype == torch.int8 else codes.abs().clamp_min(2.0**-6) / 8
    assert bool(((found_codes - codes).abs() <= step).all())
    assert float((found_codes != codes).float().mean()) < 0.01


def test_rope_store_of_zeros_keeps_zeros() -> None:
    with guarded() as guards:
        for kv_dtype in (torch.int8, torch.float8_e4m3fn):
            pages = make_pages(guards, 1, 64, (1, 16), kv_dtype)
            qkv = guards.wrap(torch.zeros(1, 3 * 64))
            table = guards.wrap(torch.randn(2, 32, 2))
            where = guards.wrap(torch.tensor([1])), guards.wrap(torch.tensor([3]))
            query = TRITON.rope_store(qkv, table, *where, pages, num_heads=1)
            assert not query.any() and not pages.data[:, 3].float().any()
            assert pages.scales is not None and not pages.scales[:, 3].any()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_move_rows(kv_dtype: torch.dtype) -> None:
    rng = fresh_rng()
    with guarded() as guards:
        layers = [make_pages(guards, 2, rng.choice((64, 80)), (4, 16), kv_dtype)]
        layers.append(layers[0])
        data = torch.stack([p.data.view(torch.uint8) for p in layers]).view(kv_dtype)
        scales = None
        if layers[0].scales is not None:
            scales = torch.stack([p.scales for p in layers if p.scales is not None])
        # 17 -> 16 -> 15: each target is another row's source.
        sources = guards.wrap(torch.tensor([[15, 17, 18, -1], [40, 41, 45, 46]]))
        targets = guards.wrap(torch.tensor([[14, 15, 17, 2], [40, 41, 42, 43]]))

        def run(ops: GpuOps) -> list[torch.Tensor]:
            pools = [guards.wrap(data)] + ([] if scales is None else [guards.wrap(scales)])
            ops.move_rows(pools[0], pools[1] if len(pools) > 1 else None, sources, targets)
            return pools

        for found, expected in zip(run(TRITON), run(ORACLE), strict=True):
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_no_rows() -> None:
    nothing = torch.zeros(0, 64)
    pages = KvPages(torch.zeros(2, 16, 64), None, 16)
    ids = torch.zeros(0, dtype=torch.int64)
    assert TRITON.rms_norm(nothing, torch.ones(64), 1e-5).shape == (0, 64)
    assert TRITON.gated(nothing).shape == (0, 32)
    assert TRITON.embed(torch.zeros(3, 8), ids, 1.0).shape == (0, 8)
    query = TRITON.rope_store(
        torch.zeros(0, 192), torch.zeros(1, 32, 2), ids, ids, pages, num_heads=1
    )
    assert query.shape == (0, 1, 64)
    TRITON.move_rows(pages.data[None], None, ids.view(0, 0), ids.view(0, 0))
    assert not pages.data.any()


def test_invalid_pages_are_rejected_by_name() -> None:
    data, scales = torch.zeros(4, 32, 64), torch.zeros(4, 32)
    with pytest.raises(ValueError, match="not a multiple of block_size 24"):
        KvPages(data, None, 24)
    with pytest.raises(ValueError, match="expected scales"):
        KvPages(data.to(torch.int8), None, 16)
    with pytest.raises(ValueError, match="expected no scales"):
        KvPages(data, scales, 16)
    with pytest.raises(ValueError, match=r"expected float32 \(4, 32\)"):
        KvPages(data.to(torch.int8), scales[:2], 16)
    with pytest.raises(ValueError, match="dense last dimension"):
        KvPages(data.transpose(1, 2), None, 16)


def test_costs_count_bytes_moved() -> None:
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    assert rms_norm_cost(x, has_residual=False).num_bytes == (2 * 3 + 1) * 64 * 2
    assert rms_norm_cost(x, has_residual=True).num_bytes == (4 * 3 + 1) * 64 * 2
    assert gated_cost(x).num_bytes == 3 * (64 + 32) * 2
    assert embed_cost(x, 5).num_bytes == 5 * (2 * 64 * 2 + 8)
    pages = KvPages(torch.zeros(2, 16, 64, dtype=torch.int8), torch.zeros(2, 16), 16)
    qkv = torch.zeros(3, 4 * 64, dtype=torch.bfloat16)
    read, written = 4 * 64 * 2 + 64 * 4 + 12, 2 * 64 * 2 + 2 * (64 + 4)
    assert rope_store_cost(qkv, pages, 2).num_bytes == 3 * (read + written)
    assert move_rows_cost(pages.data[None], None, 5).num_bytes == 2 * 5 * 2 * 64
