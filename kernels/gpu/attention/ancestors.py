"""Ancestor bit masks of the rows of draft trees, computed on the device from parent indices."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.cost import Cost
from kernels.gpu.launch import cdiv, power_of_2


@triton.jit(
    do_not_specialize=["num_rows_total", "num_sequences", "max_query_len"],
    do_not_specialize_on_alignment=["parents_ptr", "query_starts_ptr"],
)
def ancestor_bits_kernel(
    parents_ptr,
    query_starts_ptr,
    out_ptr,
    num_rows_total,
    num_sequences,
    max_query_len,
    NUM_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
):
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_place = place < num_rows_total
    # Finds the sequence of each row by a linear scan, as there are few sequences.
    first = tl.full((ROWS,), 0, tl.int32)
    covered = tl.full((ROWS,), 0, tl.int1)
    for sequence in range(num_sequences):
        begin = tl.load(query_starts_ptr + sequence).to(tl.int32)
        end = tl.load(query_starts_ptr + sequence + 1).to(tl.int32)
        inside = (place >= begin) & (place < end)
        first = tl.where(inside, begin, first)
        covered |= inside
    covered &= is_place
    word = tl.arange(0, WORDS)
    bits = tl.zeros((ROWS, WORDS), tl.int32)
    current = tl.where(covered, place - first, -1)
    # A parent precedes its child, so a path has at most as many steps as the sequence has rows.
    for _ in range(max_query_len):
        bit = tl.full((ROWS,), 1, tl.int32) << (current & 31)
        is_word = (word[None, :] == (current // 32)[:, None]) & (current >= 0)[:, None]
        bits |= tl.where(is_word, bit[:, None], 0)
        current = tl.load(parents_ptr + first + current, mask=current >= 0, other=-1).to(tl.int32)
    tl.store(
        out_ptr + place[:, None] * NUM_WORDS + word[None, :],
        bits,
        mask=is_place[:, None] & (word < NUM_WORDS)[None, :],
    )


def ancestor_bits_cost(parents: torch.Tensor, max_query_len: int) -> Cost:
    """Reads the parents and writes one bit per pair of rows."""
    written = 4 * cdiv(max_query_len, 32) * parents.shape[0]
    return Cost(parents.numel() * parents.element_size() + written, 0)


def ancestor_bits(
    parents: torch.Tensor, query_starts: torch.Tensor, *, max_query_len: int
) -> torch.Tensor:
    """See ``ops.GpuOps``."""
    num_rows, num_words = parents.shape[0], cdiv(max_query_len, 32)
    out = torch.empty(num_rows, num_words, dtype=torch.int32, device=parents.device)
    if num_rows:
        rows = 32
        ancestor_bits_kernel[(cdiv(num_rows, rows),)](
            parents,
            query_starts,
            out,
            num_rows,
            query_starts.shape[0] - 1,
            max_query_len,
            NUM_WORDS=num_words,
            WORDS=power_of_2(num_words),
            ROWS=rows,
            num_warps=1,
        )
    return out
