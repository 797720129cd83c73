"""From a row of projections to rotated queries and stored keys and values, in one kernel.

Bias, norm of queries and keys, rotation, quantisation and the write into the pages all work on one
head of one row: done together, the projections (or the parts that add up to them) are read once and
nothing but the results is written. A program takes some heads of one row; queries, keys and values
differ by masks only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.attention.pages import MAX_CODES, KvPages
from kernels.gpu.cost import Cost
from kernels.gpu.launch import cdiv, dependent, power_of_2, wait_for_inputs

_HEADS = 8


@triton.jit
def rounded_to_int(x):
    """To the nearest whole number, halves to even: float32 has no fractions from 2^23 on, so adding
    and taking away 1.5 * 2^23 rounds as the hardware rounds sums."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def rounded_to_e4m3(x):
    """To the nearest float8_e4m3fn, halves to even, in float32: the cast that follows is exact, so
    it does not matter how the target (or the interpreter) rounds. |x| is at most 448."""
    bits = x.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000).to(tl.float32, bitcast=True)
    # Below 2^-6 the step is 2^-9 throughout, which is that of float32 near 1.5 * 2^14.
    return tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, normal)


@triton.jit(
    do_not_specialize=["num_parts"], do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"]
)
def rope_store_kernel(
    qkv_ptr,
    bias_ptr,
    query_norm_ptr,
    key_norm_ptr,
    rotations_ptr,
    positions_ptr,
    slots_ptr,
    out_ptr,
    data_ptr,
    scales_ptr,
    qkv_stride,
    part_stride,
    num_parts,
    data_head_stride,
    data_position_stride,
    scales_head_stride,
    num_heads,
    num_kv_heads,
    eps,
    max_code,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_QUERY_NORM: tl.constexpr,
    HAS_KEY_NORM: tl.constexpr,
    IS_QUANTISED: tl.constexpr,
    IS_INT8: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, PAIRS)
    side = tl.arange(0, 2)
    num_rotated = num_heads + num_kv_heads
    is_head = head < num_heads + 2 * num_kv_heads
    is_pair = pair < HEAD_DIM // 2
    mask = is_head[:, None, None] & is_pair[None, :, None] & (side >= 0)[None, None, :]
    # [HEADS, PAIRS, 2]: pairs lie together, so they are read as one vector and then split
    at = head[:, None, None] * HEAD_DIM + pair[None, :, None] * 2 + side[None, None, :]
    qkv_at = qkv_ptr + row * qkv_stride + at
    x = tl.load(qkv_at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(qkv_at + part * part_stride, mask=mask & (part < num_parts), other=0.0)
    if HAS_BIAS:
        x += tl.load(bias_ptr + at, mask=mask, other=0.0).to(tl.float32)
    even, odd = tl.split(x)

    if HAS_QUERY_NORM or HAS_KEY_NORM:
        in_head = (pair[:, None] * 2 + side[None, :])[None, :, :]
        weight = tl.full((HEADS, PAIRS, 2), 1.0, tl.float32)
        is_normed = tl.full((HEADS,), 0, tl.int1)
        if HAS_QUERY_NORM:
            is_query = head < num_heads
            query_mask = mask & is_query[:, None, None]
            query_weight = tl.load(query_norm_ptr + in_head, mask=query_mask, other=1.0)
            weight *= query_weight.to(tl.float32)
            is_normed |= is_query
        if HAS_KEY_NORM:
            is_key = (head >= num_heads) & (head < num_rotated)
            key_mask = mask & is_key[:, None, None]
            weight *= tl.load(key_norm_ptr + in_head, mask=key_mask, other=1.0).to(tl.float32)
            is_normed |= is_key
        even_weight, odd_weight = tl.split(weight)
        inverse = tl.rsqrt(tl.sum(even * even + odd * odd, 1) / HEAD_DIM + eps)
        inverse = tl.where(is_normed, inverse, 1.0)[:, None]
        even = even * inverse * even_weight
        odd = odd * inverse * odd_weight

    position = tl.load(positions_ptr + row).to(tl.int64)
    turn_at = rotations_ptr + position * HEAD_DIM + pair * 2
    cosine = tl.load(turn_at, mask=is_pair, other=1.0)[None, :]
    sine = tl.load(turn_at + 1, mask=is_pair, other=0.0)[None, :]
    turns = (head < num_rotated)[:, None]
    turned_even = tl.where(turns, even * cosine - odd * sine, even)
    turned_odd = tl.where(turns, even * sine + odd * cosine, odd)

    out_at = out_ptr + row * (num_heads * HEAD_DIM) + at
    turned = tl.join(turned_even, turned_odd)
    out_mask = mask & (head < num_heads)[:, None, None]
    tl.store(out_at, turned.to(out_ptr.dtype.element_ty), mask=out_mask)

    slot = tl.load(slots_ptr + row).to(tl.int64)
    kept_head = (head - num_heads).to(tl.int64)
    is_kept = (head >= num_heads) & is_head & (slot >= 0)
    if IS_QUANTISED:
        largest = tl.max(tl.maximum(tl.abs(turned_even), tl.abs(turned_odd)), 1)
        scale = largest / max_code
        tl.store(scales_ptr + kept_head * scales_head_stride + slot, scale, mask=is_kept)
        turned = turned / tl.maximum(scale, 1.1754943508222875e-38)[:, None, None]
        turned = rounded_to_int(turned) if IS_INT8 else rounded_to_e4m3(turned)
    data_at = (
        data_ptr
        + kept_head[:, None, None] * data_head_stride
        + slot * data_position_stride
        + (pair[None, :, None] * 2 + side[None, None, :])
    )
    data_mask = mask & is_kept[:, None, None]
    tl.store(data_at, turned.to(data_ptr.dtype.element_ty), mask=data_mask)


def rope_store(
    qkv: torch.Tensor,
    rotations: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    pages: KvPages,
    *,
    num_heads: int,
    bias: torch.Tensor | None = None,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See ``ops.GpuOps``."""
    num_rows, head_dim = qkv.shape[-2], pages.head_dim
    num_parts = qkv.shape[0] if qkv.dim() == 3 else 1
    assert num_parts == 1 or qkv.dtype == torch.float32, "parts are float32"
    shape = num_rows, num_heads, head_dim
    out = torch.empty(shape, dtype=out_dtype or qkv.dtype, device=qkv.device)
    assert qkv.stride(-1) == 1 and rotations.is_contiguous(), "rows and table are dense"
    assert rotations.dtype == torch.float32, "a float32 table"
    if num_rows == 0:
        return out
    scales = pages.scales
    num_all = num_heads + 2 * pages.num_kv_heads
    heads = min(_HEADS, power_of_2(num_all))
    rope_store_kernel[(num_rows, cdiv(num_all, heads))](
        qkv,
        qkv if bias is None else bias,
        qkv if query_norm is None else query_norm,
        qkv if key_norm is None else key_norm,
        rotations,
        positions,
        slots,
        out,
        pages.data,
        rotations if scales is None else scales,
        qkv.stride(-2),
        qkv.stride(0),
        num_parts,
        pages.data.stride(0),
        pages.data.stride(1),
        0 if scales is None else scales.stride(0),
        num_heads,
        pages.num_kv_heads,
        eps,
        MAX_CODES.get(pages.data.dtype, 1.0),
        HEAD_DIM=head_dim,
        PAIRS=power_of_2(head_dim // 2),
        HEADS=heads,
        HAS_BIAS=bias is not None,
        HAS_QUERY_NORM=query_norm is not None,
        HAS_KEY_NORM=key_norm is not None,
        IS_QUANTISED=scales is not None,
        IS_INT8=pages.data.dtype == torch.int8,
        PARTS=power_of_2(num_parts),  # fewer compiled variants
        **dependent(qkv.device),
    )
    return out


def rope_store_cost(qkv: torch.Tensor, pages: KvPages, num_heads: int) -> Cost:
    """Reads projections and one row of the table per row; writes queries, keys and values."""
    num_rows, head_dim = qkv.shape[0], pages.head_dim
    stored = (
        2
        * pages.num_kv_heads
        * (head_dim * pages.data.element_size() + (0 if pages.scales is None else 4))
    )
    read = qkv.shape[1] * qkv.element_size() + head_dim * 4 + 12
    written = num_heads * head_dim * qkv.element_size() + stored
    return Cost(num_rows * (read + written), num_rows * 3 * (num_heads * head_dim * 2))
