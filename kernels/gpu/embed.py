"""Rows of the embedding table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.cost import Cost
from kernels.gpu.launch import cdiv, dependent, wait_for_inputs

_BLOCK = 1024


@triton.jit(do_not_specialize=["scale"], do_not_specialize_on_alignment=["ids_ptr"])
def embed_kernel(table_ptr, ids_ptr, out_ptr, vocab_size, size, scale, BLOCK: tl.constexpr,
                 EARLY: tl.constexpr):  # fmt: skip
    wait_for_inputs(EARLY)
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids_ptr + row)
    is_known = (token >= 0) & (token < vocab_size)
    mask = (columns < size) & is_known
    values = tl.load(table_ptr + token * size + columns, mask=mask, other=0.0).to(tl.float32)
    out_at = out_ptr + row * size + columns
    tl.store(out_at, (values * scale).to(out_ptr.dtype.element_ty), mask=columns < size)


def embed(table: torch.Tensor, token_ids: torch.Tensor, scale: float) -> torch.Tensor:
    """See ``ops.GpuOps``."""
    vocab_size, size = table.shape
    assert table.is_contiguous() and token_ids.dtype == torch.int64, "a dense table, int64 ids"
    out = table.new_empty(token_ids.shape[0], size)
    if token_ids.shape[0]:
        grid = (cdiv(size, _BLOCK), token_ids.shape[0])
        early = dependent(table.device)
        embed_kernel[grid](table, token_ids, out, vocab_size, size, scale, BLOCK=_BLOCK, **early)
    return out


def embed_cost(table: torch.Tensor, num_rows: int) -> Cost:
    """Each row is read and written; the ids are 8 bytes."""
    row_bytes = table.shape[1] * table.element_size()
    return Cost(num_rows * (2 * row_bytes + 8), num_rows * table.shape[1])
