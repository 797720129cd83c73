"""Attention of few rows per sequence over a long cache: decoding and verification of draft trees.

Reading the cache dominates, and a batch of one has fewer KV heads than a GPU has multiprocessors.
So positions are split into parts (flash-decoding, Dao et al. 2023): each program attends to one
part and writes a partial result, and a second kernel combines them. The number of parts depends on
``max_length``, not on the lengths, which only the device knows; programs of parts beyond a short
sequence return at once.
"""

from __future__ import annotations

from dataclasses import dataclass

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
from kernels.gpu.launch import cdiv, dependent, num_splits, power_of_2, wait_for_inputs
from kernels.gpu.tuning import TUNER, Config

_MAX_TILE = 64
_MAX_SPLITS = 64
_FEW_PARTS = 8
CONFIGS: tuple[Config, ...] = (
    {"BLOCK_N": 64, "num_warps": 4, "num_stages": 3},
    {"BLOCK_N": 128, "num_warps": 4, "num_stages": 2},
    {"BLOCK_N": 128, "num_warps": 8, "num_stages": 3},
    {"BLOCK_N": 32, "num_warps": 2, "num_stages": 4},
)
# For wide heads on GPUs with little shared memory.
SMALLER: tuple[Config, ...] = ({"BLOCK_N": 16, "num_warps": 4, "num_stages": 1},)


@triton.jit(
    do_not_specialize=[
        *("num_rows_total", "table_stride", "num_words", "window", "num_parts", "num_tiles")
    ],
    do_not_specialize_on_alignment=[
        *("tables_ptr", "query_starts_ptr", "starts_ptr", "positions_ptr", "ancestors_ptr")
    ],
)
def split_attention_kernel(
    query_ptr,
    data_ptr,
    scales_ptr,
    tables_ptr,
    query_starts_ptr,
    starts_ptr,
    positions_ptr,
    ancestors_ptr,
    out_ptr,
    partial_ptr,
    weight_ptr,
    num_rows_total,
    num_kv_heads,
    head_stride,
    position_stride,
    scales_stride,
    table_stride,
    num_words,
    scale,
    softcap,
    window,
    num_parts,
    num_tiles,
    MANY_TILES: tl.constexpr,
    IS_TREE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_QUANTISED: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    sequence = tl.program_id(0)
    tile = 0
    if MANY_TILES:
        sequence = tl.program_id(0) // num_tiles
        tile = tl.program_id(0) % num_tiles
    kv_head = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    if IS_TREE:
        first_row = tl.load(query_starts_ptr + sequence).to(tl.int64)
        num_rows = (tl.load(query_starts_ptr + sequence + 1) - first_row).to(tl.int32)
        start = tl.load(starts_ptr + sequence).to(tl.int32)
        length = start + num_rows
    else:
        first_row = sequence.to(tl.int64)
        num_rows = 1
        length = tl.load(starts_ptr + sequence).to(tl.int32)
        start = length - 1
    if tile * BLOCK_M >= num_rows * GROUP:
        return

    # rows of the tile: | row 0: GROUP heads | row 1: GROUP heads | ...
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = m // GROUP
    is_row = row < num_rows
    head = kv_head * GROUP + m % GROUP
    d = tl.arange(0, BLOCK_D)
    num_heads = num_kv_heads * GROUP
    # [BLOCK_M]: index of (row, head) among all of the step
    place = (first_row + row) * num_heads + head
    row_mask = is_row[:, None] & (d < HEAD_DIM)[None, :]
    at = place[:, None] * HEAD_DIM + d[None, :]
    query = tl.load(query_ptr + at, mask=row_mask, other=0.0)

    # positions | outside all windows | lowest ... length |, split into parts of whole blocks
    lowest = 0
    if HAS_WINDOW:
        lowest = tl.maximum(start + 1 - window, 0) // BLOCK_N * BLOCK_N
    blocks_per_part = tl.cdiv(tl.cdiv(tl.maximum(length - lowest, 0), BLOCK_N), num_parts)
    begin = lowest + part * blocks_per_part * BLOCK_N
    end = tl.minimum(begin + blocks_per_part * BLOCK_N, length)

    keys_ptr = data_ptr + kv_head * head_stride
    values_ptr = data_ptr + (num_kv_heads + kv_head) * head_stride
    key_scales_ptr = scales_ptr + kv_head * scales_stride
    value_scales_ptr = scales_ptr + (num_kv_heads + kv_head) * scales_stride
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    if IS_TREE:
        own = tl.load(positions_ptr + first_row + row, mask=is_row, other=0).to(tl.int32)
    else:
        own = start + row

    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for first in range(begin, end, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        is_key = n < end
        slots = slots_of(table_ptr, n, is_key, BLOCK_SIZE)
        scores = score_block(
            query, keys_ptr, key_scales_ptr, slots, is_key, position_stride, scale, softcap,
            HEAD_DIM, BLOCK_D, HAS_SOFTCAP, IS_QUANTISED,
        )  # fmt: skip
        seen = is_key[None, :] & is_row[:, None]
        if IS_TREE:
            drafted = n - start  # the row of the tree that lies at n, negative in the prefix
            is_drafted = is_key & (drafted >= 0)
            words = tl.load(
                ancestors_ptr + (first_row + row)[:, None] * num_words + (drafted // 32)[None, :],
                mask=is_row[:, None] & is_drafted[None, :],
                other=-1,  # the whole prefix is visible
            )
            seen &= ((words >> (drafted & 31)[None, :]) & 1) != 0
            if HAS_WINDOW:
                place_of_key = tl.load(
                    positions_ptr + first_row + drafted, mask=is_drafted, other=0
                ).to(tl.int32)
                place_of_key = tl.where(is_drafted, place_of_key, n)
                seen &= place_of_key[None, :] > own[:, None] - window
        elif HAS_WINDOW:
            seen &= n[None, :] > own[:, None] - window
        scores = tl.where(seen, scores, float("-inf"))
        acc, largest, total = accumulate_block(
            scores, acc, largest, total, values_ptr, value_scales_ptr, slots, is_key,
            position_stride, query.dtype, HEAD_DIM, BLOCK_D, IS_QUANTISED,
        )  # fmt: skip

    # An empty part has total 0, and so result and weight 0.
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if IS_SPLIT:
        part_place = part.to(tl.int64) * num_rows_total * num_heads + place
        part_at = part_place[:, None] * HEAD_DIM + d[None, :]
        tl.store(partial_ptr + part_at, result, mask=row_mask)
        # log2 of the part's sum of exponentials
        weight = tl.where(total > 0.0, largest + tl.log2(tl.maximum(total, 1e-37)), float("-inf"))
        tl.store(weight_ptr + part_place, weight, mask=is_row)
    else:
        tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=row_mask)


@triton.jit(
    do_not_specialize=["num_rows_total", "num_parts", "max_rows"],
    do_not_specialize_on_alignment=["query_starts_ptr"],
)
def combine_kernel(
    partial_ptr,
    weight_ptr,
    query_starts_ptr,
    out_ptr,
    num_rows_total,
    num_parts,
    max_rows,
    IS_TREE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    sequence = tl.program_id(0) // max_rows
    row = tl.program_id(0) % max_rows
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    if IS_TREE:
        first_row = tl.load(query_starts_ptr + sequence)
        if row >= tl.load(query_starts_ptr + sequence + 1) - first_row:
            return
        place = (first_row + row).to(tl.int64) * num_heads + head
    else:
        place = sequence.to(tl.int64) * num_heads + head
    part = tl.arange(0, PARTS)
    d = tl.arange(0, BLOCK_D)
    is_part = part < num_parts
    part_place = part.to(tl.int64) * num_rows_total * num_heads + place
    weight = tl.load(weight_ptr + part_place, mask=is_part, other=float("-inf"))
    largest = tl.max(weight, 0)
    share = tl.exp2(weight - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(share, 0)
    partial = tl.load(
        partial_ptr + part_place[:, None] * HEAD_DIM + d[None, :],
        mask=is_part[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    )
    result = tl.sum(partial * share[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    out_at = out_ptr + place * HEAD_DIM + d
    tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)


def decode_attention(
    query: torch.Tensor,
    pages: KvPages,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    *,
    max_length: int,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """See ``ops.GpuOps``."""
    call = _Call(query, pages, block_tables, lengths, max_length, scale, softcap, window)
    return call.run(num_sequences=query.shape[0], max_rows=1)


def tree_attention(
    query: torch.Tensor,
    pages: KvPages,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    starts: torch.Tensor,
    positions: torch.Tensor,
    ancestors: torch.Tensor,
    *,
    max_query_len: int,
    max_length: int,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """See ``ops.GpuOps``."""
    tree = _Tree(query_starts, positions, ancestors)
    call = _Call(query, pages, block_tables, starts, max_length, scale, softcap, window, tree)
    return call.run(num_sequences=starts.shape[0], max_rows=max_query_len)


@dataclass(frozen=True, slots=True)
class _Tree:
    query_starts: torch.Tensor
    positions: torch.Tensor
    ancestors: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Call:
    """Arguments shared by decoding and verification. ``starts`` are lengths in decoding."""

    query: torch.Tensor
    pages: KvPages
    block_tables: torch.Tensor
    starts: torch.Tensor
    max_length: int
    scale: float
    softcap: float | None
    window: int | None
    tree: _Tree | None = None

    def run(self, num_sequences: int, max_rows: int) -> torch.Tensor:
        query, pages = self.query, self.pages
        num_rows, num_heads, head_dim = query.shape
        group = num_heads // pages.num_kv_heads
        out = torch.empty_like(query)
        assert query.is_contiguous() and self.block_tables.stride(1) == 1, "dense tensors"
        if num_rows == 0 or num_sequences == 0:
            return out
        block_m = max(16, min(_MAX_TILE, power_of_2(max_rows * group)))
        num_tiles = cdiv(max_rows * group, block_m)
        num_programs = num_sequences * num_tiles * pages.num_kv_heads
        reach = self.max_length if self.window is None else min(self.max_length, self.window)

        def launch(config: Config) -> None:
            pieces = cdiv(reach + max_rows, config["BLOCK_N"])
            parts = num_splits(num_programs, pieces, query.device, _MAX_SPLITS)
            self._launch(out, config, (num_sequences, num_tiles, parts), block_m, group, max_rows)

        key = (
            *(str(query.dtype), str(pages.data.dtype), head_dim, group, block_m),
            *(power_of_2(num_programs), power_of_2(reach)),
        )
        TUNER.launch("split_attention", key, CONFIGS, launch, SMALLER)
        return out

    def _launch(
        self,
        out: torch.Tensor,
        config: Config,
        shape: tuple[int, int, int],
        block_m: int,
        group: int,
        max_rows: int,
    ) -> None:
        query, pages, tree = self.query, self.pages, self.tree
        num_sequences, num_tiles, parts = shape
        num_rows, num_heads, head_dim = query.shape
        partial = weight = out
        if parts > 1:
            partial = query.new_empty(parts, num_rows, num_heads, head_dim, dtype=torch.float32)
            weight = query.new_empty(parts, num_rows, num_heads, dtype=torch.float32)
        starts, scales = self.starts, pages.scales
        split_attention_kernel[(num_sequences * num_tiles, pages.num_kv_heads, parts)](
            query,
            pages.data,
            partial if scales is None else scales,
            self.block_tables,
            starts if tree is None else tree.query_starts,
            starts,
            starts if tree is None else tree.positions,
            starts if tree is None else tree.ancestors,
            out,
            partial,
            weight,
            num_rows,
            pages.num_kv_heads,
            pages.data.stride(0),
            pages.data.stride(1),
            0 if scales is None else scales.stride(0),
            self.block_tables.stride(0),
            0 if tree is None else tree.ancestors.stride(0),
            score_factor(self.scale, self.softcap),
            self.softcap or 0.0,
            self.window or 0,
            parts,
            num_tiles,
            MANY_TILES=num_tiles > 1,
            IS_TREE=tree is not None,
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_D=power_of_2(head_dim),
            BLOCK_M=block_m,
            BLOCK_SIZE=pages.block_size,
            IS_SPLIT=parts > 1,
            HAS_WINDOW=self.window is not None,
            HAS_SOFTCAP=self.softcap is not None,
            IS_QUANTISED=scales is not None,
            **config,
            **dependent(query.device),
        )
        if parts > 1:
            combine_kernel[(num_sequences * max_rows, num_heads)](
                partial,
                weight,
                starts if tree is None else tree.query_starts,
                out,
                num_rows,
                parts,
                max_rows,
                IS_TREE=tree is not None,
                HEAD_DIM=head_dim,
                BLOCK_D=power_of_2(head_dim),
                # Few variants, so that a new length or batch size does not trigger a compilation.
                PARTS=_FEW_PARTS if parts <= _FEW_PARTS else _MAX_SPLITS,
                num_warps=4,
                **dependent(query.device),
            )
