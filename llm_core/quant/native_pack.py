"""Stored weights into the compiled kernels' packed form.

That form has groups of 32, float16 scales and zero points with a common power of two, and codes of
4 or 8 bits without a sign. Groups of 64, 128 or a whole row repeat their scale; weights in other
groupings and weights stored as floats are rounded to 8 bits in groups of 32.
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

# The largest scale or zero point is brought just below this: float16 then has 27 binary orders of
# magnitude below it before a scale loses precision.
_LARGEST_LOG2 = 14
# Weights that are held unpacked at once, at up to 8 bytes each.
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
        """The same values by a zero point."""
        if self.zero is not None:
            return self
        return _Unsigned(self.codes, self.scale, -self.offset * self.scale, self.bits, 0)


def pack_stacked(memory: WeightMemory, weights: Sequence[Weight]) -> PackedMatrix:
    """[N1, K], [N2, K], ... as one matrix [N1 + N2 + ..., K]. Raises ValueError for weights that
    are not finite."""
    num_rows = sum(weight.shape[0] for weight in weights)
    form = _common_form(weights)
    matrix = form.room(memory, num_rows, weights[0].shape[1])
    first_row = 0
    for weight in weights:
        for start, part in _slices(weight):
            form.pack(matrix, part, first_row + start, 1)
        first_row += weight.shape[0]
    return matrix


def pack_gated(memory: WeightMemory, gate: Weight, up: Weight) -> PackedMatrix:
    """Two matrices [N, K], tile by tile in turn; the result's num_out is N (see GATED)."""
    padded = -(-gate.shape[0] // TILE) * TILE
    form = _common_form((gate, up))
    matrix = form.room(memory, 2 * padded, gate.shape[1])
    for index, weight in enumerate((gate, up)):
        for start, part in _slices(weight):
            form.pack(matrix, part, 2 * start + index * TILE, 2)
    matrix.struct.num_out = gate.shape[0]
    return matrix


@dataclass(frozen=True, slots=True)
class _Form:
    """What all rows of a packed matrix have in common."""

    bits: int
    has_zero: bool
    offset: int
    largest: float

    def room(self, memory: WeightMemory, num_out: int, num_in: int) -> PackedMatrix:
        return memory.matrix(
            num_out,
            num_in,
            bits=self.bits,
            has_zero=self.has_zero,
            offset=self.offset,
            log2_scale=_LARGEST_LOG2 - math.frexp(self.largest)[1] if self.largest > 0 else 0,
        )

    def pack(self, matrix: PackedMatrix, part: _Unsigned, first_row: int, tile_step: int) -> None:
        """Rows of the same values, in this form."""
        part = part.with_zero() if self.has_zero else part
        factor = 1 / matrix.struct.post_scale
        zero = None if part.zero is None else part.zero * factor
        matrix.pack(part.codes, part.scale * factor, zero, first_row=first_row, tile_step=tile_step)


def _common_form(weights: Sequence[Weight]) -> _Form:
    """Looks at all rows once, so that they need not be held at once, unpacked, to be packed."""
    forms = set()
    with_offset = with_zero = 0.0
    for weight in weights:
        for _, part in _slices(weight):
            forms.add((part.bits, part.zero is None, part.offset))
            scale = float(part.scale.abs().max())
            zero = part.with_zero().zero
            assert zero is not None, "with_zero gives one"
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
    """(first row, rows) of all rows, a whole number of tiles at a time."""
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
