"""Products of few rows with a weight: bound by reading the weight, once.

The weight is the left operand of the tile product and the rows are its right one, so that up to 16
rows cost one pass (and a weight that is unpacked in registers goes straight into the product).
Codes are multiplied as they are, exact in 16 bits, and the scale of a group is applied to the
group's sum: 16 multiplications a group of 32 instead of 32. Where there are fewer output tiles than
multiprocessors, the inputs are split too, and a second kernel adds the parts in a fixed order: the
result is the same in every run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.dot import dot, to_float
from kernels.gpu.launch import cdiv, num_splits, power_of_2
from kernels.gpu.tuning import TUNER, Config
from kernels.gpu.weights import GpuWeight, Int4Weight, Int8Weight, weight_shape

MAX_ROWS = 64
_MAX_SPLITS = 16
_REDUCE_BLOCK = 512
CONFIGS: tuple[Config, ...] = (
    {"BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4},
    {"BLOCK_N": 32, "BLOCK_K": 256, "num_warps": 4, "num_stages": 4},
    {"BLOCK_N": 16, "BLOCK_K": 512, "num_warps": 4, "num_stages": 3},
    {"BLOCK_N": 64, "BLOCK_K": 256, "num_warps": 8, "num_stages": 3},
    {"BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 5},
)
INT4_CONFIGS: tuple[Config, ...] = (
    {"BLOCK_N": 64, "num_warps": 4, "num_stages": 5},
    {"BLOCK_N": 32, "num_warps": 2, "num_stages": 6},
    {"BLOCK_N": 128, "num_warps": 4, "num_stages": 4},
    {"BLOCK_N": 128, "num_warps": 8, "num_stages": 4},
    {"BLOCK_N": 256, "num_warps": 8, "num_stages": 3},
)
# For wide types on cards with little shared memory.
SMALLER: tuple[Config, ...] = ({"BLOCK_N": 32, "BLOCK_K": 64, "num_warps": 4, "num_stages": 2},)
INT4_SMALLER: tuple[Config, ...] = ({"BLOCK_N": 32, "num_warps": 4, "num_stages": 2},)


@triton.jit
def store_tile(acc, out_ptr, partial_ptr, bias_ptr, n, m, mask, part, num_rows, num_out,
               HAS_BIAS: tl.constexpr, IS_SPLIT: tl.constexpr):  # fmt: skip
    """acc [BLOCK_N, BLOCK_M] to row m, column n, of the result or of this part's."""
    at = m[None, :].to(tl.int64) * num_out + n[:, None]
    if IS_SPLIT:
        tl.store(partial_ptr + part.to(tl.int64) * num_rows * num_out + at, acc, mask=mask)
    else:
        if HAS_BIAS:
            acc += tl.load(bias_ptr + n, mask=n < num_out, other=0.0).to(tl.float32)[:, None]
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "blocks_per_part"])
def few_rows_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    num_rows,
    num_out,
    num_in,
    x_stride,
    group,
    blocks_per_part,
    HAS_SCALE: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_out, is_row = n < num_out, m < num_rows
    weight_at = weight_ptr + n[:, None].to(tl.int64) * num_in
    x_at = x_ptr + m[None, :].to(tl.int64) * x_stride
    first = part * blocks_per_part
    last = tl.minimum(first + blocks_per_part, tl.cdiv(num_in, BLOCK_K))
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for block in range(first, last):
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        is_in = k < num_in
        codes = tl.load(
            weight_at + k[None, :], mask=is_out[:, None] & is_in[None, :], other=0.0
        )  # [BLOCK_N, BLOCK_K]
        x = tl.load(x_at + k[:, None], mask=is_in[:, None] & is_row[None, :], other=0.0)
        if IS_GROUPED:
            # A block lies within one group.
            place = block * BLOCK_K // group * num_out + n
            scale = tl.load(scale_ptr + place, mask=is_out, other=0.0).to(tl.float32)
            product = dot(to_float(codes, x.dtype), x, tl.zeros((BLOCK_N, BLOCK_M), tl.float32))
            acc += product * scale[:, None]
            if HAS_ZERO:
                zero = tl.load(zero_ptr + place, mask=is_out, other=0.0).to(tl.float32)
                acc += zero[:, None] * tl.sum(x.to(tl.float32), 0)[None, :]
        else:
            acc = dot(to_float(codes, x.dtype), x, acc)
    if HAS_SCALE and not IS_GROUPED:
        acc *= tl.load(scale_ptr + n, mask=is_out, other=0.0).to(tl.float32)[:, None]
    store_tile(acc, out_ptr, partial_ptr, bias_ptr, n, m, is_out[:, None] & is_row[None, :], part,
               num_rows, num_out, HAS_BIAS, IS_SPLIT)  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "spans_per_part"])
def few_rows_int4_kernel(
    x_ptr,
    packed_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    num_rows,
    num_out,
    num_in,
    x_stride,
    num_spans,
    spans_per_part,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_out, is_row = n < num_out, m < num_rows
    j = tl.arange(0, HALF)
    x_at = x_ptr + m[None, :].to(tl.int64) * x_stride
    first = part * spans_per_part
    last = tl.minimum(first + spans_per_part, num_spans)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for span in range(first, last):
        # inputs of the span | low halves: HALF | high halves: HALF |
        packed_at = (span * num_out + n).to(tl.int64)[:, None] * HALF + j[None, :]
        packed = tl.load(packed_ptr + packed_at, mask=is_out[:, None], other=0)
        k = span * (2 * HALF) + j
        low_mask = (k < num_in)[:, None] & is_row[None, :]
        high_mask = (k + HALF < num_in)[:, None] & is_row[None, :]
        low_x = tl.load(x_at + k[:, None], mask=low_mask, other=0.0)
        high_x = tl.load(x_at + k[:, None] + HALF, mask=high_mask, other=0.0)
        nothing = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        low = dot(to_float(packed & 0xF, low_x.dtype), low_x, nothing)
        place = span * (2 * HALF) // GROUP * num_out + n
        scale = tl.load(scale_ptr + place, mask=is_out, other=0.0).to(tl.float32)[:, None]
        if GROUP == 2 * HALF:
            product = dot(to_float(packed >> 4, high_x.dtype), high_x, low)
            acc += product * scale
        else:
            high = dot(to_float(packed >> 4, high_x.dtype), high_x, nothing)
            high_scale = tl.load(scale_ptr + place + num_out, mask=is_out, other=0.0)
            acc += low * scale + high * high_scale.to(tl.float32)[:, None]
        if HAS_ZERO:
            zero = tl.load(zero_ptr + place, mask=is_out, other=0.0).to(tl.float32)[:, None]
            low_sum = tl.sum(low_x.to(tl.float32), 0)[None, :]
            high_sum = tl.sum(high_x.to(tl.float32), 0)[None, :]
            if GROUP == 2 * HALF:
                acc += zero * (low_sum + high_sum)
            else:
                high_zero = tl.load(zero_ptr + place + num_out, mask=is_out, other=0.0)
                acc += zero * low_sum + high_zero.to(tl.float32)[:, None] * high_sum
    store_tile(acc, out_ptr, partial_ptr, bias_ptr, n, m, is_out[:, None] & is_row[None, :], part,
               num_rows, num_out, HAS_BIAS, IS_SPLIT)  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def add_parts_kernel(
    partial_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_out,
    num_parts,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    mask = n < num_out
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(num_parts):
        at = (tl.cast(part, tl.int64) * num_rows + row) * num_out + n
        total += tl.load(partial_ptr + at, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * num_out + n, total.to(out_ptr.dtype.element_ty), mask=mask)


def matmul_few_rows(
    x: torch.Tensor, weight: GpuWeight, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """x [T, K], T from 1 to MAX_ROWS, times the transposed weight, written to out [T, N]."""
    num_rows, (num_out, num_in) = x.shape[0], weight_shape(weight)
    block_m = max(16, power_of_2(num_rows))

    def launch(config: Config) -> None:
        num_tiles = cdiv(num_out, config["BLOCK_N"]) * cdiv(num_rows, block_m)
        if isinstance(weight, Int4Weight):
            num_blocks, least = weight.packed.shape[0], 8
        else:
            config = {**config, "BLOCK_K": _block_k(config, weight)}
            num_blocks, least = cdiv(num_in, config["BLOCK_K"]), 2
        parts = num_splits(num_tiles, cdiv(num_blocks, least), x.device, _MAX_SPLITS)
        partial = out
        if parts > 1:
            partial = torch.empty(parts, num_rows, num_out, dtype=torch.float32, device=x.device)
        grid = (cdiv(num_out, config["BLOCK_N"]), parts, cdiv(num_rows, block_m))
        _launch(grid, x, weight, bias, out, partial, cdiv(num_blocks, parts), block_m, config)
        if parts > 1:
            add_parts_kernel[(cdiv(num_out, _REDUCE_BLOCK), num_rows)](
                partial,
                out if bias is None else bias,
                out,
                num_rows,
                num_out,
                parts,
                HAS_BIAS=bias is not None,
                BLOCK=_REDUCE_BLOCK,
            )

    kind = str(weight.dtype) if isinstance(weight, torch.Tensor) else type(weight).__name__
    key = (str(x.dtype), kind, getattr(weight, "group", 0) or 0, num_out, num_in, block_m)
    candidates = INT4_CONFIGS if isinstance(weight, Int4Weight) else CONFIGS
    smaller = INT4_SMALLER if isinstance(weight, Int4Weight) else SMALLER
    TUNER.launch("matmul_few_rows", key, candidates, launch, smaller)


def _block_k(config: Config, weight: GpuWeight) -> int:
    """A block of inputs lies within one group; and no block is twice as long as the inputs."""
    longest = max(16, power_of_2(weight_shape(weight)[1]))
    if isinstance(weight, Int8Weight) and weight.group is not None:
        longest = weight.group
    return min(config["BLOCK_K"], longest)


def _launch(
    grid: tuple[int, int, int],
    x: torch.Tensor,
    weight: GpuWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    partial: torch.Tensor,
    blocks_per_part: int,
    block_m: int,
    config: Config,
) -> None:
    num_rows, (num_out, num_in) = x.shape[0], weight_shape(weight)
    unused = out
    is_split = grid[1] > 1
    if isinstance(weight, Int4Weight):
        few_rows_int4_kernel[grid](
            x,
            weight.packed,
            weight.scale,
            unused if weight.zero is None else weight.zero,
            unused if bias is None else bias,
            out,
            partial,
            num_rows,
            num_out,
            num_in,
            x.stride(0),
            weight.packed.shape[0],
            blocks_per_part,
            GROUP=weight.group,
            HALF=weight.span // 2,
            HAS_ZERO=weight.zero is not None,
            HAS_BIAS=bias is not None,
            IS_SPLIT=is_split,
            BLOCK_M=block_m,
            **config,
        )
        return
    codes = weight if isinstance(weight, torch.Tensor) else weight.codes
    scale = None if isinstance(weight, torch.Tensor) else weight.scale
    zero = weight.zero if isinstance(weight, Int8Weight) else None
    group = weight.group if isinstance(weight, Int8Weight) else None
    few_rows_kernel[grid](
        x,
        codes,
        unused if scale is None else scale,
        unused if zero is None else zero,
        unused if bias is None else bias,
        out,
        partial,
        num_rows,
        num_out,
        num_in,
        x.stride(0),
        group or num_in,
        blocks_per_part,
        HAS_SCALE=not isinstance(weight, torch.Tensor),
        # One zero for all inputs is taken in block by block too.
        IS_GROUPED=group is not None or zero is not None,
        HAS_ZERO=zero is not None,
        HAS_BIAS=bias is not None,
        IS_SPLIT=is_split,
        BLOCK_M=block_m,
        **config,
    )
