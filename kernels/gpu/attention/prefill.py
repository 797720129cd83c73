"""Causal attention of prompt chunks over pages, with many rows per sequence.

Each program handles some rows of one sequence and all query heads of one KV head, and iterates over
the positions that they see. Only blocks with a position that some row does not see are masked.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.attention.blocks import (
    accumulate_block,
    score_block,
    score_factor,
    slots_of,
)
from kernels.gpu.attention.pages import KvPages
from kernels.gpu.launch import cdiv, power_of_2
from kernels.gpu.tuning import TUNER, Config

CONFIGS: tuple[Config, ...] = (
    {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3},
    {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3},
    {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 2},
    {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3},
)
SMALL_CONFIGS: tuple[Config, ...] = (
    {"BLOCK_M": 16, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3},
    {"BLOCK_M": 32, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3},
)
# For wide heads on GPUs with little shared memory.
SMALLER: tuple[Config, ...] = (
    {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 1},
    {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 1},
)


@triton.jit(
    do_not_specialize=["table_stride", "window"],
    do_not_specialize_on_alignment=["tables_ptr", "query_starts_ptr", "starts_ptr"],
)
def prefill_attention_kernel(
    query_ptr,
    data_ptr,
    scales_ptr,
    tables_ptr,
    query_starts_ptr,
    starts_ptr,
    out_ptr,
    num_kv_heads,
    head_stride,
    position_stride,
    scales_stride,
    table_stride,
    scale,
    softcap,
    window,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_QUANTISED: tl.constexpr,
):
    # The last rows see the most positions, so they are started first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2)
    first_row = tl.load(query_starts_ptr + sequence).to(tl.int64)
    num_rows = (tl.load(query_starts_ptr + sequence + 1) - first_row).to(tl.int32)
    if tile * BLOCK_M >= num_rows * GROUP:
        return
    start = tl.load(starts_ptr + sequence).to(tl.int32)

    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = m // GROUP
    is_row = row < num_rows
    own = start + row
    d = tl.arange(0, BLOCK_D)
    place = (first_row + row) * (num_kv_heads * GROUP) + kv_head * GROUP + m % GROUP
    row_mask = is_row[:, None] & (d < HEAD_DIM)[None, :]
    at = place[:, None] * HEAD_DIM + d[None, :]
    query = tl.load(query_ptr + at, mask=row_mask, other=0.0)

    # positions | lowest ... | plain: seen by all rows | ... end: seen by some |
    first_own = start + tile * BLOCK_M // GROUP
    last_own = start + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, num_rows - 1)
    end = last_own + 1
    lowest = 0
    plain_end = (first_own + 1) // BLOCK_N * BLOCK_N
    if HAS_WINDOW:
        lowest = tl.maximum(first_own + 1 - window, 0) // BLOCK_N * BLOCK_N
        plain_end = lowest  # windows are short, so all of their blocks are masked

    keys_ptr = data_ptr + kv_head * head_stride
    values_ptr = data_ptr + (num_kv_heads + kv_head) * head_stride
    key_scales_ptr = scales_ptr + kv_head * scales_stride
    value_scales_ptr = scales_ptr + (num_kv_heads + kv_head) * scales_stride
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride

    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for first in range(lowest, plain_end, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        is_key = n < end
        slots = slots_of(table_ptr, n, is_key, BLOCK_SIZE)
        scores = score_block(
            query, keys_ptr, key_scales_ptr, slots, is_key, position_stride, scale, softcap,
            HEAD_DIM, BLOCK_D, HAS_SOFTCAP, IS_QUANTISED,
        )  # fmt: skip
        acc, largest, total = accumulate_block(
            scores, acc, largest, total, values_ptr, value_scales_ptr, slots, is_key,
            position_stride, query.dtype, HEAD_DIM, BLOCK_D, IS_QUANTISED,
        )  # fmt: skip
    for first in range(plain_end, end, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        is_key = n < end
        slots = slots_of(table_ptr, n, is_key, BLOCK_SIZE)
        scores = score_block(
            query, keys_ptr, key_scales_ptr, slots, is_key, position_stride, scale, softcap,
            HEAD_DIM, BLOCK_D, HAS_SOFTCAP, IS_QUANTISED,
        )  # fmt: skip
        seen = is_key[None, :] & (n[None, :] <= own[:, None])
        if HAS_WINDOW:
            seen &= n[None, :] > own[:, None] - window
        scores = tl.where(seen, scores, float("-inf"))
        acc, largest, total = accumulate_block(
            scores, acc, largest, total, values_ptr, value_scales_ptr, slots, is_key,
            position_stride, query.dtype, HEAD_DIM, BLOCK_D, IS_QUANTISED,
        )  # fmt: skip
    # Rows of the tile beyond the sequence may have total 0; they are not stored.
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=row_mask)


def prefill_attention(
    query: torch.Tensor,
    pages: KvPages,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    starts: torch.Tensor,
    *,
    max_query_len: int,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """See ``ops.GpuOps``."""
    num_rows, num_heads, head_dim = query.shape
    num_sequences, group = starts.shape[0], num_heads // pages.num_kv_heads
    assert query.is_contiguous() and block_tables.stride(1) == 1, "dense tensors"
    out = torch.empty_like(query)
    if num_rows == 0 or num_sequences == 0:
        return out
    scales = pages.scales

    def launch(config: Config) -> None:
        num_tiles = cdiv(max_query_len * group, config["BLOCK_M"])
        prefill_attention_kernel[(num_tiles, pages.num_kv_heads, num_sequences)](
            query,
            pages.data,
            out if scales is None else scales,
            block_tables,
            query_starts,
            starts,
            out,
            pages.num_kv_heads,
            pages.data.stride(0),
            pages.data.stride(1),
            0 if scales is None else scales.stride(0),
            block_tables.stride(0),
            score_factor(scale, softcap),
            softcap or 0.0,
            window or 0,
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_D=power_of_2(head_dim),
            BLOCK_SIZE=pages.block_size,
            HAS_WINDOW=window is not None,
            HAS_SOFTCAP=softcap is not None,
            IS_QUANTISED=scales is not None,
            **config,
        )

    candidates = CONFIGS if max_query_len * group >= 64 else SMALL_CONFIGS
    key = (
        *(str(query.dtype), str(pages.data.dtype), head_dim, group),
        *(power_of_2(max_query_len), "window" if window else "all"),
    )
    TUNER.launch("prefill_attention", key, candidates, launch, SMALLER)
    return out
