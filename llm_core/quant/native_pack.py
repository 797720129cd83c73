"""Stored weights into the compiled kernels' packed form.

That form has groups of 32, float16 scales and zero points with a common power of two, and codes of
4 or 8 bits without a sign. Groups of 64, 128 or a whole row repeat their scale; weights in other
groupings and weights stored as floats are rounded to 8 bits in groups of 32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.native import PackedMatrix, WeightMemory
from kernels.native.library import GROUP, TILE
from llm_core.quant.formats import Weight
from llm_core.quant.grouped import GroupedCodes, quantize_grouped, to_grouped

# The largest scale or zero point is brought just below this: float16 then has 27 binary orders of
# magnitude below it before a scale loses precision.
_LARGEST_LOG2 = 14


@dataclass(frozen=True, slots=True)
class _Unsigned:
    """value = (code - offset) * scale + zero: codes uint8 [N, K], the rest [N, ceil(K / 32)]."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    bits: int
    offset: int

    def with_zero(self) -> _Unsigned:
        """The same values by a zero point."""
        if self.zero is not None:
            return self
        return _Unsigned(self.codes, self.scale, -self.offset * self.scale, self.bits, 0)


def pack_stacked(memory: WeightMemory, weights: Sequence[Weight]) -> PackedMatrix:
    """[N1, K], [N2, K], ... as one matrix [N1 + N2 + ..., K]. Raises ValueError for weights that
    are not finite."""
    num_in = weights[0].shape[1]
    parts = _alike([_unsigned(weight) for weight in weights])
    matrix = _room(memory, sum(weight.shape[0] for weight in weights), num_in, parts)
    first_row = 0
    for part in parts:
        _pack(matrix, part, first_row, 1)
        first_row += part.codes.shape[0]
    return matrix


def pack_gated(memory: WeightMemory, gate: Weight, up: Weight) -> PackedMatrix:
    """Two matrices [N, K], tile by tile in turn; the result's num_out is N (see GATED)."""
    parts = _alike([_unsigned(gate), _unsigned(up)])
    padded = -(-gate.shape[0] // TILE) * TILE
    matrix = _room(memory, 2 * padded, gate.shape[1], parts)
    for index, part in enumerate(parts):
        _pack(matrix, part, index * TILE, 2)
    matrix.struct.num_out = gate.shape[0]
    return matrix


def _room(
    memory: WeightMemory, num_out: int, num_in: int, parts: Sequence[_Unsigned]
) -> PackedMatrix:
    largest = max(
        float(values.abs().max())
        for p in parts
        for values in (p.scale, p.zero)
        if values is not None
    )
    if not math.isfinite(largest):
        raise ValueError("weight has a scale or zero point that is not finite")
    return memory.matrix(
        num_out,
        num_in,
        bits=parts[0].bits,
        has_zero=parts[0].zero is not None,
        offset=parts[0].offset,
        log2_scale=_LARGEST_LOG2 - math.frexp(largest)[1] if largest > 0 else 0,
    )


def _pack(matrix: PackedMatrix, part: _Unsigned, first_row: int, tile_step: int) -> None:
    factor = 1 / matrix.struct.post_scale
    zero = None if part.zero is None else part.zero * factor
    matrix.pack(part.codes, part.scale * factor, zero, first_row=first_row, tile_step=tile_step)


def _alike(parts: Sequence[_Unsigned]) -> list[_Unsigned]:
    """The parts with the same bits and the same kind of zero, their values unchanged."""
    bits = max(part.bits for part in parts)
    if len({(part.offset, part.zero is None) for part in parts}) > 1:
        parts = [part.with_zero() for part in parts]
    return [_Unsigned(p.codes, p.scale, p.zero, bits, p.offset) for p in parts]


def _unsigned(weight: Weight) -> _Unsigned:
    num_in = weight.shape[1]
    grouped = to_grouped(weight)
    if grouped is None or not (grouped.group % GROUP == 0 or grouped.group == num_in):
        grouped = quantize_grouped(weight, GROUP)
    codes, scale, zero, offset = grouped.codes[:, :num_in], grouped.scale, grouped.zero, 0
    if codes.dtype == torch.int8:
        codes, offset = (codes.to(torch.int16) + 128).to(torch.uint8), 128
        if zero is not None:
            zero, offset = zero - 128 * scale, 0
    elif zero is not None:
        middle = 8 if grouped.bits == 4 else 128
        if torch.equal(zero, -middle * scale):  # symmetric: the zero points need not be read
            zero, offset = None, middle
    num_groups = -(-num_in // GROUP)
    return _Unsigned(
        codes,
        _repeat(scale, grouped, num_groups),
        None if zero is None else _repeat(zero, grouped, num_groups),
        grouped.bits,
        offset,
    )


def _repeat(values: torch.Tensor, grouped: GroupedCodes, num_groups: int) -> torch.Tensor:
    repeats = max(1, -(-grouped.group // GROUP))
    return values.repeat_interleave(repeats, 1)[:, :num_groups]
