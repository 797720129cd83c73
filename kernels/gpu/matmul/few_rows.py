"""Matrix products of few rows, bound by the bandwidth of reading the weight once.

The weight is the left operand of the tile product and the rows are the right one, so that up to 16
rows cost one pass, and unpacked weights go from registers straight into the product. Codes are
multiplied as they are, exact in 16 bits, and a group's scale is applied to the group's sum. Offsets
(the group's zero point, and the offset of ``codes_of``) are multiplied by the sum of the group's
inputs, computed as a product with ones, since the tensor cores are idle anyway.

One wave of programs fills the device, with as many bytes in flight as its memory needs. If there
are too few output tiles, the inputs are split as well (split-K); parts are added in a fixed order,
so results are reproducible, either by a second kernel or by the operation that follows
(``parts_of_few_rows``). A gated product has gate and up in adjacent rows of its tile. While a
program waits for the preceding kernel, it prefetches the beginning of its weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import (
    cdiv,
    dependent,
    parts_of_a_wave,
    power_of_2,
    prefetch,
    wait_for_inputs,
)
from kernels.gpu.matmul.dot import code_offset, codes_of, dot, to_float
from kernels.gpu.matmul.gated import activated
from kernels.gpu.matmul.weights import GpuWeight, Int4Weight, Int8Weight, weight_shape
from kernels.gpu.ops import GateName
from kernels.gpu.tuning import TUNER, Config

MAX_ROWS = 64
MAX_PARTS = 4  # one program of the following operation reads all parts of a row
_REDUCE_BLOCK = 512
_PREFETCH_BYTES = 32768  # per program; some microseconds of memory bandwidth in all
_SHARED_BYTES = 200_000  # of a multiprocessor; only determines how many programs it runs
_IN_FLIGHT_BYTES = 65536  # per multiprocessor: bandwidth times latency (2 us) of a large GPU
CONFIGS: tuple[Config, ...] = (
    {"BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4},
    {"BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 5},
    {"BLOCK_N": 128, "BLOCK_K": 128, "num_warps": 8, "num_stages": 3},
    {"BLOCK_N": 32, "BLOCK_K": 128, "num_warps": 2, "num_stages": 5},
    {"BLOCK_N": 32, "BLOCK_K": 256, "num_warps": 4, "num_stages": 4},
)
INT4_CONFIGS: tuple[Config, ...] = (
    {"BLOCK_N": 64, "num_warps": 4, "num_stages": 7},
    {"BLOCK_N": 64, "num_warps": 2, "num_stages": 7},
    {"BLOCK_N": 32, "num_warps": 2, "num_stages": 8},
    {"BLOCK_N": 32, "num_warps": 1, "num_stages": 6},
    {"BLOCK_N": 128, "num_warps": 4, "num_stages": 5},
)
# For more than 16 rows, whose sums take more registers.
INT4_WIDE_CONFIGS: tuple[Config, ...] = (
    {"BLOCK_N": 64, "num_warps": 4, "num_stages": 4},
    {"BLOCK_N": 128, "num_warps": 8, "num_stages": 4},
    {"BLOCK_N": 32, "num_warps": 4, "num_stages": 4},
)
# For wide types on GPUs with little shared memory.
SMALLER: tuple[Config, ...] = ({"BLOCK_N": 32, "BLOCK_K": 64, "num_warps": 4, "num_stages": 2},)
INT4_SMALLER: tuple[Config, ...] = ({"BLOCK_N": 32, "num_warps": 4, "num_stages": 2},)


@triton.jit
def outputs_of_tile(num_out, BLOCK_N: tl.constexpr, GATE: tl.constexpr):
    """(rows of the weight, mask of existing rows); for a gated product gate 0, up 0, gate 1 ..."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = row
    if GATE != "none":
        n = row // 2 + row % 2 * (num_out // 2)
    return n, row < num_out


@triton.jit
def store_tile(acc, out_ptr, bias_ptr, n, is_out, num_rows, num_out, HAS_BIAS: tl.constexpr,
               GATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Stores acc [BLOCK_N, BLOCK_M] to rows m and columns n of this part's result."""
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    if GATE != "none":
        pairs = tl.permute(tl.reshape(acc, (BLOCK_N // 2, 2, BLOCK_M)), (0, 2, 1))
        gate, up = tl.split(pairs)
        size = num_out // 2
        column = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        at = m[None, :].to(tl.int64) * size + column[:, None]
        mask = (column < size)[:, None] & (m < num_rows)[None, :]
        result = activated(gate, GATE == "gelu_tanh") * up
        tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        if HAS_BIAS:
            acc += tl.load(bias_ptr + n, mask=is_out, other=0.0).to(tl.float32)[:, None]
        part_at = tl.program_id(1).to(tl.int64) * num_rows * num_out
        at = part_at + m[None, :].to(tl.int64) * num_out + n[:, None]
        mask = is_out[:, None] & (m < num_rows)[None, :]
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "blocks_per_part"])
def few_rows_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
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
    GATE: tl.constexpr,
    EARLY: tl.constexpr,
    NUM_LINES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    n, is_out = outputs_of_tile(num_out, BLOCK_N, GATE)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = m < num_rows
    weight_at = weight_ptr + n[:, None].to(tl.int64) * num_in
    first = tl.program_id(1) * blocks_per_part
    last = tl.minimum(first + blocks_per_part, tl.cdiv(num_in, BLOCK_K))
    if EARLY:
        per_line: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth
        line = first * BLOCK_K + tl.arange(0, NUM_LINES) * per_line
        row_at = weight_ptr + tl.where(is_out, n, 0)[:, None].to(tl.int64) * num_in
        prefetch(row_at + tl.minimum(line, num_in - 1)[None, :])
    row_scale = tl.full((BLOCK_N,), 1.0, tl.float32)
    if HAS_SCALE and not IS_GROUPED:
        row_scale = tl.load(scale_ptr + n, mask=is_out, other=0.0).to(tl.float32)
    wait_for_inputs(EARLY)
    x_at = x_ptr + m[None, :].to(tl.int64) * x_stride
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for block in range(first, last):
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        is_in = k < num_in
        codes = tl.load(
            weight_at + k[None, :], mask=is_out[:, None] & is_in[None, :], other=0.0
        )  # [BLOCK_N, BLOCK_K]
        x = tl.load(x_at + k[:, None], mask=is_in[:, None] & is_row[None, :], other=0.0)
        if IS_GROUPED:
            # A block is within one group.
            place = block * BLOCK_K // group * num_out + n
            scale = tl.load(scale_ptr + place, mask=is_out, other=0.0).to(tl.float32)
            nothing = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            product = dot(to_float(codes, x.dtype), x, nothing)
            acc += product * scale[:, None]
            if HAS_ZERO:
                zero = tl.load(zero_ptr + place, mask=is_out, other=0.0).to(tl.float32)
                ones = tl.full((BLOCK_N, BLOCK_K), 1.0, tl.float32).to(x.dtype)
                acc += zero[:, None] * dot(ones, x, nothing)
        else:
            acc = dot(to_float(codes, x.dtype), x, acc)
    if HAS_SCALE and not IS_GROUPED:
        acc *= row_scale[:, None]
    store_tile(acc, out_ptr, bias_ptr, n, is_out, num_rows, num_out, HAS_BIAS, GATE, BLOCK_M,
               BLOCK_N)  # fmt: skip


@triton.jit
def two_dots(a, x, b, y, to, IS_FIRST: tl.constexpr, BLOCK_M: tl.constexpr):
    """to (0 if IS_FIRST) + a @ x + b @ y. With few rows the two products are independent: chained
    accumulation would wait for the first, with too few programs to hide the latency."""
    if BLOCK_M <= 8:
        nothing = tl.zeros((a.shape[0], x.shape[1]), tl.float32)
        both = dot(a, x, nothing) + dot(b, y, nothing)
        return both if IS_FIRST else to + both
    return dot(b, y, dot(a, x, to))


@triton.jit(do_not_specialize=["num_rows", "spans_per_part"])
def few_rows_int4_kernel(
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
    spans_per_part,
    GROUP: tl.constexpr,
    QUARTER: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr,
    EARLY: tl.constexpr,
    NUM_EARLY_SPANS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    GROUPS: tl.constexpr = 4 * QUARTER // GROUP  # of a span: 1 or 2
    n, is_out = outputs_of_tile(num_out, BLOCK_N, GATE)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.arange(0, QUARTER)
    first = tl.program_id(1) * spans_per_part
    last = tl.minimum(first + spans_per_part, num_spans)
    if EARLY:
        span = tl.minimum(first + tl.arange(0, NUM_EARLY_SPANS), num_spans - 1)
        place = (span * num_out)[None, :] + tl.where(is_out, n, 0)[:, None]
        prefetch(packed_ptr + place.to(tl.int64) * QUARTER)
    # Scales are loaded one span ahead: they are too narrow for asynchronous copies.
    scale_at = scale_ptr + first * GROUPS * num_out + n
    zero_at = zero_ptr + first * GROUPS * num_out + n
    is_there = is_out & (first < last)
    next_scale = tl.load(scale_at, mask=is_there, other=0.0)
    next_high_scale = next_scale
    next_zero = next_scale
    next_high_zero = next_scale
    if GROUPS == 2:
        next_high_scale = tl.load(scale_at + num_out, mask=is_there, other=0.0)
    if HAS_ZERO:
        next_zero = tl.load(zero_at, mask=is_there, other=0.0)
        if GROUPS == 2:
            next_high_zero = tl.load(zero_at + num_out, mask=is_there, other=0.0)
    wait_for_inputs(EARLY)

    is_row = (m < num_rows)[None, :] & (j >= 0)[:, None]
    x_at = x_ptr + m[None, :].to(tl.int64) * x_stride + (first * (4 * QUARTER) + j)[:, None]
    words_at = packed_ptr + (first * num_out + n).to(tl.int64)[:, None] * QUARTER + j[None, :]
    span_words = num_out.to(tl.int64) * QUARTER
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    nothing = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    ones = tl.full((BLOCK_N, QUARTER), 1.0, tl.float32).to(x_ptr.dtype.element_ty)
    for span in range(first, last):
        words = tl.load(words_at, mask=is_out[:, None], other=0)
        mask0 = is_row
        mask1 = is_row
        mask2 = is_row
        mask3 = is_row
        if not IS_WHOLE:
            left = (num_in - span * (4 * QUARTER) - j)[:, None]
            mask0 = is_row & (left > 0)
            mask1 = is_row & (left > QUARTER)
            mask2 = is_row & (left > 2 * QUARTER)
            mask3 = is_row & (left > 3 * QUARTER)
        x0 = tl.load(x_at, mask=mask0, other=0.0)
        x1 = tl.load(x_at + QUARTER, mask=mask1, other=0.0)
        x2 = tl.load(x_at + 2 * QUARTER, mask=mask2, other=0.0)
        x3 = tl.load(x_at + 3 * QUARTER, mask=mask3, other=0.0)
        scale, high_scale = next_scale.to(tl.float32), next_high_scale.to(tl.float32)
        # Offset of the codes of a group, times the group's scale.
        zero, high_zero = -OFFSET * scale, -OFFSET * high_scale
        if HAS_ZERO:
            zero += next_zero.to(tl.float32)
            high_zero += next_high_zero.to(tl.float32)
        is_there = is_out & (span + 1 < last)
        scale_at += GROUPS * num_out
        zero_at += GROUPS * num_out
        next_scale = tl.load(scale_at, mask=is_there, other=0.0)
        if GROUPS == 2:
            next_high_scale = tl.load(scale_at + num_out, mask=is_there, other=0.0)
        else:
            next_high_scale = next_scale
        if HAS_ZERO:
            next_zero = tl.load(zero_at, mask=is_there, other=0.0)
            if GROUPS == 2:
                next_high_zero = tl.load(zero_at + num_out, mask=is_there, other=0.0)
            else:
                next_high_zero = next_zero
        codes0, codes1, codes2, codes3 = codes_of(words, x0.dtype, OFFSET)
        low = two_dots(codes0, x0, codes1, x1, nothing, True, BLOCK_M)
        if GROUPS == 1:
            acc += two_dots(codes2, x2, codes3, x3, low, False, BLOCK_M) * scale[:, None]
        else:
            acc += low * scale[:, None]
            acc += two_dots(codes2, x2, codes3, x3, nothing, True, BLOCK_M) * high_scale[:, None]
        if HAS_ZERO or OFFSET != 0.0:
            low_sum = two_dots(ones, x0, ones, x1, nothing, True, BLOCK_M)
            if GROUPS == 1:
                acc += two_dots(ones, x2, ones, x3, low_sum, False, BLOCK_M) * zero[:, None]
            else:
                acc += low_sum * zero[:, None]
                high_sum = two_dots(ones, x2, ones, x3, nothing, True, BLOCK_M)
                acc += high_sum * high_zero[:, None]
        words_at += span_words
        x_at += 4 * QUARTER
    store_tile(acc, out_ptr, bias_ptr, n, is_out, num_rows, num_out, HAS_BIAS, GATE, BLOCK_M,
               BLOCK_N)  # fmt: skip


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
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
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
    _Product(x, weight, bias, out.dtype, "none").run(out)


def parts_of_few_rows(x: torch.Tensor, weight: GpuWeight) -> torch.Tensor:
    """float32 [P, T, N], P from 1 to MAX_PARTS: partial products, whose sum is the result."""
    return _Product(x, weight, None, torch.float32, "none").run(None)


def gated_few_rows(x: torch.Tensor, weight: GpuWeight, gate: GateName) -> torch.Tensor:
    """act(x times the first half of the outputs) * (x times the second) -> [T, N / 2]."""
    return _Product(x, weight, None, x.dtype, gate).run(None)


@dataclass(frozen=True, slots=True)
class _Product:
    """A product, gated unless ``gate`` is "none"; a gated one has no bias."""

    x: torch.Tensor
    weight: GpuWeight
    bias: torch.Tensor | None
    out_dtype: torch.dtype
    gate: GateName | Literal["none"]

    def run(self, out: torch.Tensor | None) -> torch.Tensor:
        """Writes and returns ``out`` [T, N]; without it returns a new tensor: [T, N / 2] for a
        gated product, else parts [P, T, N]."""
        x, weight = self.x, self.weight
        block_m = max(8, power_of_2(x.shape[0]))
        made = [x]

        def launch(config: Config) -> None:
            made[0] = self._launch(config, block_m, out)

        kind = str(weight.dtype) if isinstance(weight, torch.Tensor) else type(weight).__name__
        aim = self.gate if self.gate != "none" else "parts" if out is None else "whole"
        key = (str(x.dtype), kind, getattr(weight, "group", 0) or 0, *weight_shape(weight), block_m)
        candidates, smaller = CONFIGS, SMALLER
        if isinstance(weight, Int4Weight):
            candidates = INT4_CONFIGS if block_m <= 16 else INT4_WIDE_CONFIGS
            smaller = INT4_SMALLER
        TUNER.launch("matmul_few_rows", (*key, aim), candidates, launch, smaller)
        return made[0]

    def _launch(self, config: Config, block_m: int, out: torch.Tensor | None) -> torch.Tensor:
        x, weight = self.x, self.weight
        num_rows, (num_out, num_in) = x.shape[0], weight_shape(weight)
        if isinstance(weight, Int4Weight):
            num_blocks, least = weight.packed.shape[0], 4
            row_bytes, stage_inputs = weight.span // 2, weight.span
        else:
            config = {**config, "BLOCK_K": _block_k(config, weight)}
            num_blocks, least = cdiv(num_in, config["BLOCK_K"]), 2
            codes = weight if isinstance(weight, torch.Tensor) else weight.codes
            stage_inputs = config["BLOCK_K"]
            row_bytes = stage_inputs * codes.element_size()
        block_n = config["BLOCK_N"]
        num_tiles = cdiv(num_out, block_n)
        stage_bytes = block_n * row_bytes + block_m * stage_inputs * x.element_size()
        num_buffers = max(1, config["num_stages"] - 1)  # the last stage is held in registers
        wanted = cdiv(_IN_FLIGHT_BYTES, num_buffers * block_n * row_bytes)
        room = max(1, _SHARED_BYTES // (num_buffers * stage_bytes))
        parts = 1
        if self.gate == "none":
            pieces = cdiv(num_blocks, least)
            parts = parts_of_a_wave(num_tiles, wanted, room, pieces, x.device, MAX_PARTS)
        blocks_per_part = cdiv(num_blocks, parts)
        parts = cdiv(num_blocks, blocks_per_part)  # no part is empty

        if self.gate != "none":
            target = torch.empty(num_rows, num_out // 2, dtype=self.out_dtype, device=x.device)
        elif out is not None and parts == 1:
            target = out
        else:
            shape = parts, num_rows, num_out
            target = torch.empty(shape, dtype=torch.float32, device=x.device)
        self._launch_tiles((num_tiles, parts, 1), target, blocks_per_part, block_m, config)
        if out is None or parts == 1:
            return target
        add_parts_kernel[(cdiv(num_out, _REDUCE_BLOCK), num_rows)](
            target,
            out if self.bias is None else self.bias,
            out,
            num_rows,
            num_out,
            parts,
            HAS_BIAS=self.bias is not None,
            BLOCK=_REDUCE_BLOCK,
            **dependent(x.device),
        )
        return out

    def _launch_tiles(
        self,
        grid: tuple[int, int, int],
        out: torch.Tensor,
        blocks_per_part: int,
        block_m: int,
        config: Config,
    ) -> None:
        x, weight = self.x, self.weight
        num_rows, (num_out, num_in) = x.shape[0], weight_shape(weight)
        bias = self.bias if grid[1] == 1 else None
        unused = out
        shared = {
            "HAS_BIAS": bias is not None,
            "GATE": self.gate,
            "BLOCK_M": block_m,
            **config,
            **dependent(x.device),
        }
        if isinstance(weight, Int4Weight):
            span_bytes = config["BLOCK_N"] * weight.span // 2
            few_rows_int4_kernel[grid](
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
                blocks_per_part,
                GROUP=weight.group,
                QUARTER=weight.span // 4,
                IS_WHOLE=num_in % weight.span == 0,
                OFFSET=code_offset(x.dtype),
                HAS_ZERO=weight.zero is not None,
                NUM_EARLY_SPANS=max(1, _PREFETCH_BYTES // span_bytes),
                **shared,
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
            num_rows,
            num_out,
            num_in,
            x.stride(0),
            group or num_in,
            blocks_per_part,
            HAS_SCALE=not isinstance(weight, torch.Tensor),
            # A single zero point for all inputs is applied block by block too.
            IS_GROUPED=group is not None or zero is not None,
            HAS_ZERO=zero is not None,
            NUM_LINES=max(1, _PREFETCH_BYTES // (config["BLOCK_N"] * 128)),
            **shared,
        )


def _block_k(config: Config, weight: GpuWeight) -> int:
    """BLOCK_K limited to one group, and to less than twice the number of inputs."""
    longest = max(16, power_of_2(weight_shape(weight)[1]))
    if isinstance(weight, Int8Weight) and weight.group is not None:
        longest = weight.group
    return min(config["BLOCK_K"], longest)
