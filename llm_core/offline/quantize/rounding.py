"""Uniform quantisation grids, with a scale and a zero point for each group of inputs.

value = (code - zero) * scale; codes and zero points are integers from 0 to 2^bits - 1, as GPTQ and
AWQ files store them. Scales are rounded to float16 before codes are chosen, as files
store them. The last group may be shorter (576 inputs in groups of 128).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llm_core.quant import Bits

_SMALLEST_SCALE = 2.0**-24  # float16's smallest number


@dataclass(frozen=True, slots=True)
class GridSpec:
    """``group`` inputs share a scale. ``is_symmetric``: the zero point is the middle code."""

    bits: Bits
    group: int
    is_symmetric: bool = False

    @property
    def largest_code(self) -> int:
        """2^bits - 1."""
        return (1 << self.bits) - 1

    def num_groups(self, num_in: int) -> int:
        """Number of groups of ``num_in`` inputs."""
        return -(-num_in // self.group)

    def group_index(self, num_in: int) -> torch.Tensor:
        """int64 [num_in]: each input's group."""
        return torch.arange(num_in) // self.group


@dataclass(frozen=True, slots=True)
class Grid:
    """``scale`` and ``zero`` float32 [N, G]; scale is a float16, zero an integer."""

    scale: torch.Tensor
    zero: torch.Tensor


@dataclass(frozen=True, slots=True)
class RoundedMatrix:
    """A matrix [N, K] on a grid; ``codes`` uint8 [N, K]."""

    spec: GridSpec
    grid: Grid
    codes: torch.Tensor

    def values(self) -> torch.Tensor:
        """The dequantised matrix, float32 [N, K]."""
        index = self.spec.group_index(self.codes.shape[1])
        zero, scale = (t.index_select(1, index) for t in (self.grid.zero, self.grid.scale))
        return (self.codes.float() - zero) * scale

    def rows(self, start: int, end: int) -> RoundedMatrix:
        """Rows [start, end)."""
        grid = Grid(self.grid.scale[start:end], self.grid.zero[start:end])
        return RoundedMatrix(self.spec, grid, self.codes[start:end])

    def select_rows(self, indices: torch.Tensor) -> RoundedMatrix:
        """The rows ``indices`` (int64 [R])."""
        grid = Grid(self.grid.scale[indices], self.grid.zero[indices])
        return RoundedMatrix(self.spec, grid, self.codes[indices])

    def with_rows_divided(self, divisors: torch.Tensor) -> RoundedMatrix:
        """Divides each row by a positive number [N]: only scales change, rounded to float16."""
        scale = _as_float16(self.grid.scale / divisors.unsqueeze(1))
        return RoundedMatrix(self.spec, Grid(scale, self.grid.zero), self.codes)


def grid_of(weight: torch.Tensor, spec: GridSpec, shrink: torch.Tensor | float = 1.0) -> Grid:
    """The grid from the smallest to the largest value of each group of float32 [N, K].

    ``shrink`` (a number, or [N, G]) is a factor of that range; zero always lies on the grid. Zero
    points are at least 1: the first version of the GPTQ format cannot represent 0.
    """
    num_out, num_in = weight.shape
    padding = spec.num_groups(num_in) * spec.group - num_in
    groups = torch.nn.functional.pad(weight, (0, padding)).view(num_out, -1, spec.group)
    if spec.is_symmetric:
        middle = (spec.largest_code + 1) // 2
        scale = _as_float16(groups.abs().amax(-1) * shrink / (middle - 1))
        return Grid(scale, torch.full_like(scale, middle))
    low = groups.amin(-1).clamp_max(0) * shrink
    high = groups.amax(-1).clamp_min(0) * shrink
    scale = _as_float16((high - low) / spec.largest_code)
    return Grid(scale, (-low / scale).round_().clamp_(1, spec.largest_code))


def round_to(
    weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, largest_code: int
) -> torch.Tensor:
    """The nearest code, still as float32; ``scale`` and ``zero`` are of ``weight``'s shape, or
    broadcast to it."""
    return (weight / scale + zero).round_().clamp_(0, largest_code)


def round_to_nearest(weight: torch.Tensor, spec: GridSpec) -> RoundedMatrix:
    """The baseline (RTN): rounds each weight of float32 [N, K] independently."""
    return on_grid(weight, spec, grid_of(weight, spec))


def on_grid(weight: torch.Tensor, spec: GridSpec, grid: Grid) -> RoundedMatrix:
    """Rounds each weight of float32 [N, K] to the nearest code of a given grid."""
    index = spec.group_index(weight.shape[1])
    scale, zero = grid.scale.index_select(1, index), grid.zero.index_select(1, index)
    codes = round_to(weight, scale, zero, spec.largest_code)
    return RoundedMatrix(spec, grid, codes.to(torch.uint8))


def _as_float16(scale: torch.Tensor) -> torch.Tensor:
    """Rounded to float16, never to 0 or infinity."""
    return scale.clamp(_SMALLEST_SCALE, 65504.0).half().float()
