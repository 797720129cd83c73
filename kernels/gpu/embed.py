"""Embedding lookup."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.cost import Cost
from kernels.gpu.launch import cdiv, dependent, wait_for_inputs

_BLOCK = 1024


@triton.jit(do_not_specialize=["scale"], do_not_specialize_on_alignment=["ids_ptr", "sources_ptr"])
def embed_kernel(
    table_ptr,
    ids_ptr,
    sources_ptr,
    chosen_ptr,
    out_ptr,
    vocab_size,
    size,
    scale,
    HAS_SOURCES: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids_ptr + row).to(tl.int64)
    if HAS_SOURCES:
        source = tl.load(sources_ptr + row)
        token = tl.load(chosen_ptr + source, mask=source >= 0, other=token)
    is_known = (token >= 0) & (token < vocab_size)
    mask = (columns < size) & is_known
    values = tl.load(table_ptr + token * size + columns, mask=mask, other=0.0).to(tl.float32)
    out_at = out_ptr + row * size + columns
    tl.store(out_at, (values * scale).to(out_ptr.dtype.element_ty), mask=columns < size)


def embed(
    table: torch.Tensor,
    token_ids: torch.Tensor,
    scale: float,
    *,
    sources: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See ``ops.GpuOps``."""
    vocab_size, size = table.shape
    assert table.is_contiguous() and (sources is None) == (chosen is None), "a dense table"
    dtype = out_dtype or table.dtype
    out = torch.empty(token_ids.shape[0], size, dtype=dtype, device=table.device)
    if token_ids.shape[0]:
        grid = (cdiv(size, _BLOCK), token_ids.shape[0])
        embed_kernel[grid](
            table,
            token_ids,
            token_ids if sources is None else sources,
            token_ids if chosen is None else chosen,
            out,
            vocab_size,
            size,
            scale,
            HAS_SOURCES=sources is not None,
            BLOCK=_BLOCK,
            **dependent(table.device),
        )
    return out


def embed_cost(table: torch.Tensor, num_rows: int) -> Cost:
    """Reads and writes each row once; ids have 8 bytes."""
    row_bytes = table.shape[1] * table.element_size()
    return Cost(num_rows * (2 * row_bytes + 8), num_rows * table.shape[1])
