"""Packing of stored weights for the compiled kernels.

The packed form has groups of 32, float16 scales and zero points with a common power of two, and
unsigned codes of 4 or 8 bits. The scale of groups of 64, 128 or a whole row is repeated; weights
with other groups and float weights are quantised to 8 bits in groups of 32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kernels.native import PackedMatrix, WeightMemory
from kernels.native.library import GROUP, TILE
from llm_core.quant.formats import Weight, row_range
from llm_core.quant.grouped import GroupedCodes, quantize_grouped, to_grouped

# The largest scale or zero point is scaled to just below 2 to this power: float16 then has 27
# binary orders of magnitude below it before a scale loses precision.
_LARGEST_LOG2 = 14
# Weights that are unpacked at a time, at up to 8 bytes each.
_SLICE_WEIGHTS = 1 << 20


@dataclass(frozen=True, slots=True)
class _Unsigned:
    """value = (code - offset) * scale + zero: codes uint8 [N, K], the rest [N, ceil(K / 32)]."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    bits: int
    offset: int

    def with_zero(self) -> _Unsigned:
        """The same values, with a zero point in place of the offset."""
        if self.zero is not None:
            return self
        return _Unsigned(self.codes, self.scale, -self.offset * self.scale, self.bits, 0)


def pack_stacked(memory: WeightMemory, weights: Sequence[Weight]) -> PackedMatrix:
    """Packs [N1, K], [N2, K], ... as one matrix [N1 + N2 + ..., K]. Raises ValueError for weights
    that are not finite."""
    num_rows = sum(weight.shape[0] for weight in weights)
    form = _common_form(weights)
    matrix = form.allocate(memory, num_rows, weights[0].shape[1])
    first_row = 0
    for weight in weights:
        for start, part in _slices(weight):
            form.pack(matrix, part, first_row + start, 1)
        first_row += weight.shape[0]
    return matrix


def pack_gated(memory: WeightMemory, gate: Weight, up: Weight) -> PackedMatrix:
    """Packs two matrices [N, K] with alternating tiles; num_out of the result is N (see GATED)."""
    padded = -(-gate.shape[0] // TILE) * TILE
    form = _common_form((gate, up))
    matrix = form.allocate(memory, 2 * padded, gate.shape[1])
    for index, weight in enumerate((gate, up)):
        for start, part in _slices(weight):
            form.pack(matrix, part, 2 * start + index * TILE, 2)
    matrix.struct.num_out = gate.shape[0]
    return matrix


@dataclass(frozen=True, slots=True)
class _Form:
    """Parameters shared by all rows of a packed matrix."""

    bits: int
    has_zero: bool
    offset: int
    largest: float

    def allocate(self, memory: WeightMemory, num_out: int, num_in: int) -> PackedMatrix:
        return memory.matrix(
            num_out,
            num_in,
            bits=self.bits,
            has_zero=self.has_zero,
            offset=self.offset,
            log2_scale=_LARGEST_LOG2 - math.frexp(self.largest)[1] if self.largest > 0 else 0,
        )

    def pack(self, matrix: PackedMatrix, part: _Unsigned, first_row: int, tile_step: int) -> None:
        """Packs the rows ``part`` in this form."""
        part = part.with_zero() if self.has_zero else part
        factor = 1 / matrix.struct.post_scale
        zero = None if part.zero is None else part.zero * factor
        matrix.pack(part.codes, part.scale * factor, zero, first_row=first_row, tile_step=tile_step)


def _common_form(weights: Sequence[Weight]) -> _Form:
    """A first pass over all rows, so that not all of them are unpacked at the same time."""
    forms = set()
    with_offset = with_zero = 0.0
    for weight in weights:
        for _, part in _slices(weight):
            forms.add((part.bits, part.zero is None, part.offset))
            scale = float(part.scale.abs().max())
            zero = part.with_zero().zero
            assert zero is not None, "with_zero adds one"
            with_offset = _larger(with_offset, scale)
            with_zero = _larger(with_zero, scale, float(zero.abs().max()))
    bits = max(form[0] for form in forms)
    if len({form[1:] for form in forms}) > 1:
        return _Form(bits, True, 0, with_zero)
    _, has_none, offset = next(iter(forms))
    return _Form(bits, not has_none, offset, with_offset if has_none else with_zero)


def _larger(*numbers: float) -> float:
    if not all(map(math.isfinite, numbers)):
        raise ValueError("weight has a scale or zero point that is not finite")
    return max(numbers)


def _slices(weight: Weight) -> Iterator[tuple[int, _Unsigned]]:
    """All rows as (first row, unpacked rows), in slices of whole tiles."""
    num_rows = max(1, _SLICE_WEIGHTS // weight.shape[1] // TILE) * TILE
    for start in range(0, weight.shape[0], num_rows):
        yield start, _unsigned(row_range(weight, start, start + num_rows))


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
        if torch.equal(zero, -middle * scale):  # symmetric: an offset in place of zero points
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
