"""Clipped grids: outliers saturate, and all other values get finer steps."""

from __future__ import annotations

import torch

from llm_core.offline.quantize.rounding import Grid, GridSpec, grid_of, round_to

_NUM_SHRINKS = 10  # ranges from 100% down to 55%
_SHRINK_STEP = 0.05


def clipped_grid(weight: torch.Tensor, hessian: torch.Tensor, spec: GridSpec) -> Grid:
    """The grid of each group, clipped where that reduces the error of its part of the output.

    weight [N, K] and hessian [K, K] after scaling.
    """
    num_out, num_in = weight.shape
    padded_len = spec.num_groups(num_in) * spec.group
    padding = padded_len - num_in
    groups = torch.nn.functional.pad(weight, (0, padding)).view(num_out, -1, spec.group)
    padded = torch.nn.functional.pad(hessian, (0, padding, 0, padding))
    blocks = padded.view(-1, spec.group, padded_len // spec.group, spec.group)
    local = blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # [G, group, group]
    best = grid_of(weight, spec)
    least: torch.Tensor | None = None
    for step in range(_NUM_SHRINKS):
        grid = grid_of(weight, spec, 1 - _SHRINK_STEP * step)
        scale, zero = grid.scale.unsqueeze(-1), grid.zero.unsqueeze(-1)
        values = (round_to(groups, scale, zero, spec.largest_code) - zero) * scale
        difference = (values - groups).transpose(0, 1)  # [G, N, group]
        error = ((difference @ local) * difference).sum(-1).T  # [N, G]
        if least is None:
            least = error
            continue
        better = error < least
        least = torch.where(better, error, least)
        best = Grid(
            torch.where(better, grid.scale, best.scale), torch.where(better, grid.zero, best.zero)
        )
    return best
