"""AWQ: weights of inputs with large activations get more precision, by scaling before rounding.

Lin, Tang, Tang, Yang, Dang, Han 2023 (arXiv:2306.00978). W x = (W diag(s)) (x / s): columns with
large inputs are scaled up and lose less to rounding; 1 / s is folded into the producer of x.
s = a^alpha with a the mean magnitude of each input, alpha from a grid of 20, chosen by the error of
the outputs. That error, tr(D H D^T) for a change D of the weight, needs only H = X X^T.
"""

from __future__ import annotations

import torch

from llm_core.offline.quantize.clipping import clipped_grid
from llm_core.offline.quantize.rounding import GridSpec, RoundedMatrix, grid_of, on_grid

_NUM_ALPHAS = 20


def output_error(difference: torch.Tensor, hessian: torch.Tensor) -> float:
    """||D X||^2 of a change D [N, K] of a weight whose inputs have H = X X^T [K, K]."""
    return float(((difference @ hessian) * difference).sum())


def search_scales(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    magnitude: torch.Tensor,
    spec: GridSpec,
    *,
    shared_by: torch.Tensor | None = None,
) -> torch.Tensor:
    """float32 [K]: factors for the columns of weight [N, K], divisors of its inputs.

    ``magnitude`` [K] is the mean of |x|. ``shared_by`` int64 [K]: inputs with the same number
    get a common scale (value heads that several query heads share).
    """
    base = magnitude.clamp_min(1e-4)
    if shared_by is not None:
        base = _mean_by(base, shared_by)[shared_by]
    best_error, best = float("inf"), torch.ones_like(base)
    for step in range(_NUM_ALPHAS):
        scales = base ** (step / _NUM_ALPHAS)
        scales = scales / (scales.max() * scales.min()).sqrt()
        scaled = weight * scales
        rounded = on_grid(scaled, spec, grid_of(scaled, spec)).values() / scales
        error = output_error(rounded - weight, hessian)
        if error < best_error:
            best_error, best = error, scales
    return best


def awq_round(
    weight: torch.Tensor, hessian: torch.Tensor, spec: GridSpec, *, clip: bool
) -> RoundedMatrix:
    """Rounds an already scaled weight [N, K]; ``hessian`` [K, K] is of its scaled inputs."""
    grid = clipped_grid(weight, hessian, spec) if clip else grid_of(weight, spec)
    return on_grid(weight, spec, grid)


def _mean_by(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Mean of the values with each index, [max index + 1]."""
    count = int(index.max()) + 1
    sums = torch.zeros(count).index_add_(0, index, values)
    return sums / torch.bincount(index, minlength=count)
