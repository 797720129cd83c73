"""Matrix products of many rows with a quantised weight, for prefill: bound by arithmetic.

Each tile of the weight is dequantised to the dtype of the activations, so that one accumulator
serves all groups. Float weights are multiplied by cuBLAS.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import cdiv
from kernels.gpu.matmul.dot import code_offset, codes_of, dot, to_float
from kernels.gpu.matmul.weights import Float8Weight, Int4Weight, Int8Weight, weight_shape
from kernels.gpu.tuning import TUNER, Config

QuantisedWeight = Int4Weight | Int8Weight | Float8Weight

CONFIGS: tuple[Config, ...] = (
    {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3},
    {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4},
    {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4},
    {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3},
    {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3},
)
SMALLER: tuple[Config, ...] = (
    {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2},
)
# Consecutive programs process this many row tiles of one column tile, so that most reads of the
# weight hit the L2 cache.
_ROW_TILES = 8


@triton.jit
def tile_of(num_rows, num_out, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
            ROW_TILES: tl.constexpr):  # fmt: skip
    """The tile's rows and columns: ROW_TILES row tiles of a column tile, then the next column."""
    num_m, num_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_out, BLOCK_N)
    program = tl.program_id(0)
    per_band = ROW_TILES * num_n
    first_m = program // per_band * ROW_TILES
    band = tl.minimum(num_m - first_m, ROW_TILES)
    tile_m = first_m + program % per_band % band
    tile_n = program % per_band // band
    return tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit
def store_rows(acc, out_ptr, bias_ptr, m, n, num_rows, num_out, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < num_out, other=0.0).to(tl.float32)[None, :]
    at = m[:, None].to(tl.int64) * num_out + n[None, :]
    mask = (m < num_rows)[:, None] & (n < num_out)[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def many_rows_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_out,
    num_in,
    x_stride,
    group,
    IS_GROUPED: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROW_TILES: tl.constexpr,
):
    m, n = tile_of(num_rows, num_out, BLOCK_M, BLOCK_N, ROW_TILES)
    is_row, is_out = m < num_rows, n < num_out
    x_at = x_ptr + m[:, None].to(tl.int64) * x_stride
    codes_at = codes_ptr + n[None, :].to(tl.int64) * num_in
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(tl.cdiv(num_in, BLOCK_K)):
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        is_in = k < num_in
        x = tl.load(x_at + k[None, :], mask=is_row[:, None] & is_in[None, :], other=0.0)
        codes = tl.load(codes_at + k[:, None], mask=is_in[:, None] & is_out[None, :], other=0.0)
        if IS_GROUPED:
            place = block * BLOCK_K // group * num_out + n
            values = codes.to(tl.float32)
            values *= tl.load(scale_ptr + place, mask=is_out, other=0.0).to(tl.float32)[None, :]
            if HAS_ZERO:
                values += tl.load(zero_ptr + place, mask=is_out, other=0.0).to(tl.float32)[None, :]
            acc = dot(x, values.to(x.dtype), acc)
        else:
            acc = dot(x, to_float(codes, x.dtype), acc)
    if not IS_GROUPED:
        acc *= tl.load(scale_ptr + n, mask=is_out, other=0.0).to(tl.float32)[None, :]
    store_rows(acc, out_ptr, bias_ptr, m, n, num_rows, num_out, HAS_BIAS)


@triton.jit(do_not_specialize=["num_rows"])
def many_rows_int4_kernel(
    x_ptr,
    packed_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_out,
    num_in,
    x_stride,
    num_spans,
    GROUP: tl.constexpr,
    QUARTER: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROW_TILES: tl.constexpr,
):
    m, n = tile_of(num_rows, num_out, BLOCK_M, BLOCK_N, ROW_TILES)
    is_row, is_out = m < num_rows, n < num_out
    j = tl.arange(0, QUARTER)
    x_at = x_ptr + m[:, None].to(tl.int64) * x_stride
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for span in range(num_spans):
        words_at = (span * num_out + n).to(tl.int64)[None, :] * QUARTER + j[:, None]
        words = tl.load(packed_ptr + words_at, mask=is_out[None, :], other=0)
        place = span * (4 * QUARTER) // GROUP * num_out + n
        scale = tl.load(scale_ptr + place, mask=is_out, other=0.0).to(tl.float32)
        high_scale = scale
        if GROUP != 4 * QUARTER:
            high_scale = tl.load(scale_ptr + place + num_out, mask=is_out, other=0.0)
            high_scale = high_scale.to(tl.float32)
        # Offset of the codes of a group, times the group's scale.
        zero, high_zero = -OFFSET * scale, -OFFSET * high_scale
        if HAS_ZERO:
            group_zero = tl.load(zero_ptr + place, mask=is_out, other=0.0).to(tl.float32)
            zero += group_zero
            if GROUP != 4 * QUARTER:
                group_zero = tl.load(zero_ptr + place + num_out, mask=is_out, other=0.0)
            high_zero += group_zero.to(tl.float32)
        codes = codes_of(words, x_ptr.dtype.element_ty, OFFSET)
        for quarter in tl.static_range(4):
            k = span * (4 * QUARTER) + quarter * QUARTER + j
            x_mask = is_row[:, None] & (k < num_in)[None, :]
            x = tl.load(x_at + k[None, :], mask=x_mask, other=0.0)
            values = codes[quarter].to(tl.float32)
            if quarter < 2:
                values = values * scale[None, :] + zero[None, :]
            else:
                values = values * high_scale[None, :] + high_zero[None, :]
            acc = dot(x, values.to(x.dtype), acc)
    store_rows(acc, out_ptr, bias_ptr, m, n, num_rows, num_out, HAS_BIAS)


def matmul_many_rows(
    x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """x [T, K] times the transposed weight, written to out [T, N]."""
    num_rows, (num_out, num_in) = x.shape[0], weight_shape(weight)
    unused = out

    def launch(config: Config) -> None:
        grid = (cdiv(num_rows, config["BLOCK_M"]) * cdiv(num_out, config["BLOCK_N"]),)
        if isinstance(weight, Int4Weight):
            many_rows_int4_kernel[grid](
                x,
                weight.packed,
                weight.scale,
                unused if weight.zero is None else weight.zero,
                unused if bias is None else bias,
                out,
                num_rows,
                num_out,
                num_in,
                x.stride(0),
                weight.packed.shape[0],
                GROUP=weight.group,
                QUARTER=weight.span // 4,
                OFFSET=code_offset(x.dtype),
                HAS_ZERO=weight.zero is not None,
                HAS_BIAS=bias is not None,
                ROW_TILES=_ROW_TILES,
                **{name: value for name, value in config.items() if name != "BLOCK_K"},
            )
            return
        zero = weight.zero if isinstance(weight, Int8Weight) else None
        group = weight.group if isinstance(weight, Int8Weight) else None
        block_k = min(config["BLOCK_K"], group or config["BLOCK_K"])
        many_rows_kernel[grid](
            x,
            weight.codes,
            weight.scale,
            unused if zero is None else zero,
            unused if bias is None else bias,
            out,
            num_rows,
            num_out,
            num_in,
            x.stride(0),
            group or num_in,
            IS_GROUPED=group is not None or zero is not None,
            HAS_ZERO=zero is not None,
            HAS_BIAS=bias is not None,
            ROW_TILES=_ROW_TILES,
            **{**config, "BLOCK_K": block_k},
        )

    group = weight.group if not isinstance(weight, Float8Weight) else None
    rows = min(4096, cdiv(num_rows, 128) * 128)
    key = (str(x.dtype), type(weight).__name__, group or 0, num_out, num_in, rows)
    TUNER.launch("matmul_many_rows", key, CONFIGS, launch, SMALLER)
