"""The kernel cases of ``bench.gpu.run``: fresh random inputs, and the floor of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from kernels.gpu import (
    GpuOps,
    GpuWeight,
    KvPages,
    SamplingInputs,
    pack_float8,
    pack_int4,
    pack_int8,
)
from kernels.gpu.attention.blocks import attention_cost
from kernels.gpu.cost import Cost, num_bytes
from kernels.gpu.embed import embed_cost
from kernels.gpu.matmul.dispatch import matmul_cost
from kernels.gpu.matmul.gated import gated_cost
from kernels.gpu.move_rows import move_rows_cost
from kernels.gpu.norm import rms_norm_cost
from kernels.gpu.rope_store import rope_store_cost
from llm_core.quant.formats import quantize_float8, quantize_int8

BLOCK_SIZE = 16
BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model, and of the steps that kernels are tried with."""

    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    inner: int = 14336
    vocab: int = 128256
    many_rows: int = 4096
    prompt_rows: int = 2048
    product_rows: int = 2048
    batch: int = 64
    context: int = 1024
    long_context: int = 8192
    rows: tuple[int, ...] = (1, 8, 64)
    kv_dtypes: tuple[torch.dtype, ...] = (BF16, torch.int8, torch.float8_e4m3fn)


SMOKE_SIZES = Sizes(
    *(64, 2, 1, 16, 64, 40, 2, 2, 65, 2, 18, 18),
    rows=(1, 2),
    kv_dtypes=(BF16, torch.float8_e4m3fn),
)


@dataclass(frozen=True, slots=True)
class Case:
    """``run`` gives tensors that are compared, and ``written`` what of its inputs it has changed;
    these are fresh copies of ``inputs`` (CPU) where it is compared. ``limit`` is on |difference| /
    |expected|."""

    name: str
    inputs: dict[str, Any]
    run: Callable[[GpuOps, dict[str, Any]], tuple[torch.Tensor, ...]]
    cost: Cost
    limit: float = 0.01
    written: Callable[[dict[str, Any]], tuple[torch.Tensor, ...]] = lambda inputs: ()


def moved(value: Any, device: torch.device | str) -> Any:
    """A copy on ``device`` of tensors, and of dictionaries and dataclasses with tensors."""
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    if isinstance(value, dict):
        return {name: moved(item, device) for name, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: moved(getattr(value, f.name), device) for f in fields(value)}
        return replace(value, **parts)
    return value


def difference(result: torch.Tensor, expected: torch.Tensor) -> float:
    """|result - expected| / |expected|; infinite where the result is not finite."""
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return float("inf")
    result, expected = result.double().cpu(), expected.double().cpu()
    error = float((result - expected).norm() / expected.norm().clamp_min(1e-9))
    return error if error == error else float("inf")


def cases(sizes: Sizes) -> list[Callable[[], Case]]:
    """Makers of all cases: inputs are made one case at a time."""
    s = sizes
    made: list[Callable[[], Case]] = [
        lambda: _norm(s, s.many_rows),
        lambda: _gated(s, s.many_rows),
        lambda: _embed(s, s.many_rows),
        lambda: _sample(s, s.rows[-2]),
        lambda: _move(s),
    ]
    for dtype in s.kv_dtypes:
        made += [
            lambda dtype=dtype: _rope(s, s.many_rows, dtype),  # type: ignore[misc]
            lambda dtype=dtype: _decode(s, 1, s.long_context, dtype),  # type: ignore[misc]
            lambda dtype=dtype: _decode(s, s.batch, s.context, dtype),  # type: ignore[misc]
            lambda dtype=dtype: _tree(s, s.rows[1], s.long_context, dtype),  # type: ignore[misc]
            lambda dtype=dtype: _prefill(s, s.prompt_rows, dtype),  # type: ignore[misc]
        ]
    for form in ("bf16", "int4", "int8", "fp8"):
        for rows in sorted({*s.rows, s.product_rows}):
            made.append(lambda form=form, rows=rows: _matmul(s, form, rows))  # type: ignore[misc]
        made.append(lambda form=form: _matmul(s, form, s.rows[0], is_gated=True))  # type: ignore[misc]
    return made


def _norm(s: Sizes, rows: int) -> Case:
    x = torch.randn(rows, s.hidden).to(BF16)
    inputs = {"residual": torch.randn(rows, s.hidden), "x": x, "weight": torch.rand(s.hidden)}

    def run(ops: GpuOps, i: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        return (ops.add_rms_norm_(i["residual"], i["x"], i["weight"], 1e-5),)

    extra = 2 * rows * s.hidden * 2  # the residual is float32, the cost counts it as x's dtype
    cost = rms_norm_cost(x, has_residual=True) + Cost(extra, 0)
    return Case(f"add_rms_norm {rows}", inputs, run, cost, written=lambda i: (i["residual"],))


def _gated(s: Sizes, rows: int) -> Case:
    inputs = {"x": torch.randn(rows, 2 * s.inner).to(BF16)}
    cost = gated_cost(inputs["x"])
    return Case(f"gated {rows}", inputs, lambda ops, i: (ops.gated(i["x"]),), cost)


def _embed(s: Sizes, rows: int) -> Case:
    vocab = -(-s.vocab // 8)  # the rest only takes time to be drawn
    inputs = {
        "table": torch.randn(vocab, s.hidden).to(BF16),
        "ids": torch.randint(vocab, (rows,)),
    }
    cost = embed_cost(inputs["table"], rows)
    return Case(
        f"embed {rows}", inputs, lambda ops, i: (ops.embed(i["table"], i["ids"], 1.0),), cost
    )


def _sample(s: Sizes, rows: int) -> Case:
    choice = SamplingInputs(
        temperature=torch.full((rows,), 0.7),
        top_k=torch.full((rows,), 50, dtype=torch.int32),
        top_p=torch.full((rows,), 0.9),
        min_p=torch.zeros(rows),
        seeds=torch.randint(1 << 60, (rows,)),
        positions=torch.arange(rows),
    )
    logits = torch.randn(rows, s.vocab) * 3
    return Case(
        f"sample {rows}",
        {"logits": logits, "choice": choice},
        lambda ops, i: (ops.sample(i["logits"], i["choice"]),),
        Cost(num_bytes(logits), 4 * logits.numel()),
        limit=0.0,
    )


def _move(s: Sizes) -> Case:
    count, layers = s.batch * BLOCK_SIZE, 4
    inputs = {
        "data": torch.randn(layers, 2 * s.kv_heads, count, s.head_dim).to(BF16),
        "sources": torch.arange(s.batch).view(-1, 1) * BLOCK_SIZE + torch.tensor([[3, 5, 9]]),
        "targets": torch.arange(s.batch).view(-1, 1) * BLOCK_SIZE + torch.tensor([[1, 2, 3]]),
    }

    def run(ops: GpuOps, i: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        ops.move_rows(i["data"], None, i["sources"], i["targets"])
        return ()

    cost = move_rows_cost(inputs["data"], None, 3 * s.batch)
    name = f"move_rows {3 * s.batch}"
    return Case(name, inputs, run, cost, limit=0.0, written=lambda i: (i["data"],))


def _pages(s: Sizes, num_blocks: int, dtype: torch.dtype) -> KvPages:
    shape = (2 * s.kv_heads, num_blocks * BLOCK_SIZE)
    values = torch.randn(*shape, s.head_dim)
    if dtype == BF16:
        return KvPages(values.to(BF16), None, BLOCK_SIZE)
    largest = 127.0 if dtype == torch.int8 else 448.0
    scales = values.abs().amax(-1) / largest
    codes = values / scales.unsqueeze(-1)
    codes = codes.round().to(dtype) if dtype == torch.int8 else codes.to(dtype)
    return KvPages(codes, scales, BLOCK_SIZE)


def _paged(s: Sizes, batch: int, context: int, rows: int, dtype: torch.dtype) -> dict[str, Any]:
    """Queries of ``rows`` rows of each of ``batch`` sequences, whose last rows end at ``context``;
    blocks are scattered over the pool."""
    per_sequence = -(-context // BLOCK_SIZE)
    return {
        "query": torch.randn(batch * rows, s.heads, s.head_dim).to(BF16),
        "pages": _pages(s, batch * per_sequence, dtype),
        "tables": torch.randperm(batch * per_sequence).view(batch, -1).to(torch.int32),
        "row_starts": (torch.arange(batch + 1) * rows).to(torch.int32),
        "starts": torch.full((batch,), context - rows, dtype=torch.int32),
    }


def _short(dtype: torch.dtype) -> str:
    return {BF16: "bf16", torch.int8: "int8", torch.float8_e4m3fn: "fp8"}[dtype]


def _limit(dtype: torch.dtype) -> float:
    """Of attention: with scales, each probability is rounded to 8 bits once more."""
    return 0.01 if dtype == BF16 else 0.02


def _rope(s: Sizes, rows: int, dtype: torch.dtype) -> Case:
    angles = torch.rand(rows, s.head_dim // 2) * 6
    inputs = {
        "qkv": torch.randn(rows, (s.heads + 2 * s.kv_heads) * s.head_dim).to(BF16),
        "rotations": torch.stack((angles.cos(), angles.sin()), -1),
        "positions": torch.arange(rows, dtype=torch.int32),
        "slots": torch.randperm(-(-rows // BLOCK_SIZE) * BLOCK_SIZE)[:rows],
        "pages": _pages(s, -(-rows // BLOCK_SIZE), dtype),
    }

    def run(ops: GpuOps, i: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        out = ops.rope_store(
            *(i["qkv"], i["rotations"], i["positions"], i["slots"], i["pages"]), num_heads=s.heads
        )
        return (out,)

    def written(i: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        data = i["pages"].data.float()
        return (data if i["pages"].scales is None else data * i["pages"].scales.unsqueeze(-1),)

    cost = rope_store_cost(inputs["qkv"], inputs["pages"], s.heads)
    return Case(f"rope_store {rows} kv {_short(dtype)}", inputs, run, cost, written=written)


def _decode(s: Sizes, batch: int, context: int, dtype: torch.dtype) -> Case:
    inputs = _paged(s, batch, context, 1, dtype)
    inputs["lengths"] = inputs["starts"] + 1

    def run(ops: GpuOps, i: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        out = ops.decode_attention(
            *(i["query"], i["pages"], i["tables"], i["lengths"]),
            max_length=context,
            scale=s.head_dim**-0.5,
        )
        return (out,)

    cost = attention_cost(inputs["query"], inputs["pages"], batch * context, batch * context)
    name = f"decode_attention {batch}x{context} kv {_short(dtype)}"
    return Case(name, inputs, run, cost, _limit(dtype))


def _tree(s: Sizes, rows: int, context: int, dtype: torch.dtype) -> Case:
    inputs = _paged(s, 1, context, rows, dtype)
    parents = [(row - 1) // 2 if row else -1 for row in range(rows)]
    depths, words = [], torch.zeros(rows, 1, dtype=torch.int32)
    for row, parent in enumerate(parents):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        words[row] = (words[parent] if parent >= 0 else 0) | 1 << row
    inputs["positions"] = (context - rows + torch.tensor(depths)).to(torch.int32)
    inputs["ancestors"] = words

    def run(ops: GpuOps, i: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        out = ops.tree_attention(
            *(i["query"], i["pages"], i["tables"], i["row_starts"], i["starts"]),
            *(i["positions"], i["ancestors"]),
            max_query_len=rows,
            max_length=context,
            scale=s.head_dim**-0.5,
        )
        return (out,)

    cost = attention_cost(inputs["query"], inputs["pages"], context, rows * context)
    name = f"tree_attention {rows} of {context} kv {_short(dtype)}"
    return Case(name, inputs, run, cost, _limit(dtype))


def _prefill(s: Sizes, rows: int, dtype: torch.dtype) -> Case:
    inputs = _paged(s, 1, rows, rows, dtype)

    def run(ops: GpuOps, i: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        out = ops.prefill_attention(
            *(i["query"], i["pages"], i["tables"], i["row_starts"], i["starts"]),
            max_query_len=rows,
            scale=s.head_dim**-0.5,
        )
        return (out,)

    cost = attention_cost(inputs["query"], inputs["pages"], rows, rows * (rows + 1) // 2)
    return Case(f"prefill_attention {rows} kv {_short(dtype)}", inputs, run, cost, _limit(dtype))


def _matmul(s: Sizes, form: str, rows: int, *, is_gated: bool = False) -> Case:
    num_out = s.inner if rows == s.product_rows else 2 * s.inner  # enough to be worth timing
    values = torch.randn(num_out, s.hidden) * s.hidden**-0.5
    weight: GpuWeight = values.to(BF16)
    if form == "int4":
        group = 128 if s.hidden % 128 == 0 else 32
        codes = torch.randint(16, (num_out, s.hidden), dtype=torch.uint8)
        scale = torch.rand(num_out, s.hidden // group) * s.hidden**-0.5
        weight = pack_int4(codes, scale, -7.5 * scale, group)
    elif form == "int8":
        weight = pack_int8(*quantize_int8(values))
    elif form == "fp8":
        weight = pack_float8(*quantize_float8(values))
    inputs = {"x": torch.randn(rows, s.hidden).to(BF16), "weight": weight}
    out = torch.empty(rows, num_out // 2 if is_gated else num_out, dtype=BF16)
    cost = matmul_cost(inputs["x"], weight, out)
    size = f"{form} {rows}x{num_out}x{s.hidden}"
    if is_gated:
        run = lambda ops, i: (ops.matmul_gated(i["x"], i["weight"]),)  # noqa: E731
        return Case(f"matmul_gated {size}", inputs, run, cost)
    return Case(f"matmul {size}", inputs, lambda ops, i: (ops.matmul(i["x"], i["weight"]),), cost)
