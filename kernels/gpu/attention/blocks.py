"""Processing of one block of keys and values, shared by all attention kernels.

Softmax is computed online (Milakov and Gimelshein 2018; Dao et al. 2022). Scores are in units of
log2, for the hardware's exp2; sums are float32. Query heads that share a KV head are packed into
the rows of one tile: with grouped-query attention a single token fills a tensor-core tile, and each
key is read once for all of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.attention.pages import KvPages
from kernels.gpu.cost import Cost
from kernels.gpu.matmul.dot import dot, to_float

LOG2_E = 1.4426950408889634


@triton.jit
def slots_of(table_ptr, places, mask, BLOCK_SIZE: tl.constexpr):
    """Slots of positions ``places`` of a sequence, int64: a pool has more than 2^31 elements."""
    page = tl.load(table_ptr + places // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
    return page * BLOCK_SIZE + places % BLOCK_SIZE


@triton.jit
def score_block(
    query,
    data_ptr,
    scales_ptr,
    slots,
    mask,
    position_stride,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_QUANTISED: tl.constexpr,
):
    """Scores [M, BLOCK_N] of query [M, BLOCK_D] with the keys at ``slots``, times log2(e).

    ``scale`` includes log2(e) unless there is a softcap. Quantised keys are multiplied as codes,
    which are exact in 16 bits; their scale is applied to the scores.
    """
    d = tl.arange(0, BLOCK_D)
    key = tl.load(
        data_ptr + slots[None, :] * position_stride + d[:, None],
        mask=mask[None, :] & (d < HEAD_DIM)[:, None],
        other=0.0,
    )
    zeros = tl.zeros((query.shape[0], slots.shape[0]), tl.float32)
    scores = dot(query, to_float(key, query.dtype), zeros) * scale
    if IS_QUANTISED:
        scores *= tl.load(scales_ptr + slots, mask=mask, other=0.0)[None, :]
    if HAS_SOFTCAP:
        # tanh(z) = 2 sigmoid(2 z) - 1, clamped before the exponential inside overflows
        doubled = tl.maximum(2.0 * scores / softcap, -80.0)
        scores = softcap * 1.4426950408889634 * (2.0 * tl.sigmoid(doubled) - 1.0)
    return scores


@triton.jit
def accumulate_block(
    scores,
    acc,
    largest,
    total,
    data_ptr,
    scales_ptr,
    slots,
    mask,
    position_stride,
    DTYPE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_QUANTISED: tl.constexpr,
):
    """(acc [M, BLOCK_D], largest [M], total [M]) updated with the values at ``slots``.

    Masked scores are -inf. A row for which all keys so far are masked has largest -inf and total 0,
    and stays finite.
    """
    d = tl.arange(0, BLOCK_D)
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    shares = tl.exp2(scores - base[:, None])
    correction = tl.exp2(largest - base)
    total = total * correction + tl.sum(shares, 1)
    if IS_QUANTISED:
        shares *= tl.load(scales_ptr + slots, mask=mask, other=0.0)[None, :]
    value = tl.load(
        data_ptr + slots[:, None] * position_stride + d[None, :],
        mask=mask[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    )
    acc = acc * correction[:, None]
    acc = dot(shares.to(DTYPE), to_float(value, DTYPE), acc)
    return acc, new_largest, total


def score_factor(scale: float, softcap: float | None) -> float:
    """``score_block``'s ``scale``."""
    return scale * (LOG2_E if softcap is None else 1.0)


def attention_cost(query: torch.Tensor, pages: KvPages, num_keys: int, num_pairs: int) -> Cost:
    """``num_keys``: positions read, summed over sequences, each once for all rows of a sequence;
    ``num_pairs``: unmasked (row, position) pairs. query [T, num_heads, D]. Intermediate results of
    a split are not counted, as they are overhead."""
    head_bytes = pages.head_dim * pages.data.element_size() + (0 if pages.scales is None else 4)
    read = 2 * pages.num_kv_heads * head_bytes * num_keys
    num_heads, head_dim = query.shape[1], query.shape[2]
    moved = read + 2 * query.numel() * query.element_size()
    return Cost(moved, 4 * num_pairs * num_heads * head_dim)
