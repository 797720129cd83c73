"""GPTQ, AWQ and rounding of small matrices with correlated inputs."""

from __future__ import annotations

import pytest
import torch

from llm_core.offline.quantize.awq import awq_round, output_error, search_scales
from llm_core.offline.quantize.clipping import clipped_grid
from llm_core.offline.quantize.gptq import gptq
from llm_core.offline.quantize.rounding import GridSpec, grid_of, on_grid, round_to_nearest

NUM_OUT, NUM_IN = 48, 160


def inputs(seed: int = 0) -> torch.Tensor:
    """[2000, NUM_IN]: correlated, and a few of them ten times larger, as in real models."""
    generator = torch.Generator().manual_seed(99)
    mix = torch.randn(NUM_IN, NUM_IN, generator=generator) * torch.logspace(0, -1.5, NUM_IN)
    generator.manual_seed(seed)
    x = torch.randn(2000, NUM_IN, generator=generator) @ mix.T
    x += 0.1 * torch.randn(2000, NUM_IN, generator=generator)
    x[:, ::17] *= 10
    return x


def matrix(seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(NUM_OUT, NUM_IN, generator=generator) / NUM_IN**0.5


def plain_gptq(weight: torch.Tensor, hessian: torch.Tensor, spec: GridSpec) -> torch.Tensor:
    """The paper's rule without its factorisation, in float64, one column at a time: after a column
    is fixed, the remaining ones go to the optimum of the quadratic."""
    w, num_in = weight.double().clone(), weight.shape[1]
    h = hessian.double() + 0.01 * hessian.diagonal().double().mean() * torch.eye(num_in)
    result = torch.empty_like(w)
    for k in range(num_in):
        if k % spec.group == 0:
            grid = grid_of(w[:, k : k + spec.group].float(), spec)
            scale, zero = grid.scale[:, 0].double(), grid.zero[:, 0].double()
        code = (w[:, k] / scale + zero).round().clamp(0, spec.largest_code)
        result[:, k] = (code - zero) * scale
        if k + 1 < num_in:
            error = w[:, k] - result[:, k]
            left = torch.linalg.solve(h[k + 1 :, k + 1 :], h[k + 1 :, k])
            w[:, k + 1 :] += torch.outer(error, left)
    return result.float()


@pytest.mark.parametrize("group", [32, 64, 160])
@pytest.mark.parametrize("symmetric", [False, True])
def test_gptq_matches_the_papers_rule(group: int, symmetric: bool) -> None:
    x, weight = inputs(), matrix()
    hessian, spec = x.T @ x, GridSpec(4, group, symmetric)
    ours, plain = (
        gptq(weight, hessian, spec, damping=0.01).values(),
        plain_gptq(weight, hessian, spec),
    )
    # A value that lies between two codes may go either way; the paths then differ a little.
    assert output_error(ours - weight, hessian) == pytest.approx(
        output_error(plain - weight, hessian), rel=0.05
    )
    first = slice(0, 4)  # before differences can add up, number by number
    torch.testing.assert_close(ours[:, first], plain[:, first])


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (8, 160)])
def test_gptq_has_a_much_smaller_error_than_rounding(
    bits: int, group: int, act_order: bool
) -> None:
    x, weight = inputs(), matrix()
    hessian, spec = x.T @ x, GridSpec(4 if bits == 4 else 8, group)
    nearest = output_error(round_to_nearest(weight, spec).values() - weight, hessian)
    result = gptq(weight, hessian, spec, act_order=act_order)
    assert output_error(result.values() - weight, hessian) < 0.4 * nearest
    unseen = inputs(seed=5)
    assert ((unseen @ (result.values() - weight).T) ** 2).sum() < (
        (unseen @ (round_to_nearest(weight, spec).values() - weight).T) ** 2
    ).sum()


def test_gptq_with_uncorrelated_inputs_equals_rounding() -> None:
    weight, spec = matrix(), GridSpec(4, 32)
    result = gptq(weight, torch.eye(NUM_IN), spec)
    torch.testing.assert_close(result.values(), round_to_nearest(weight, spec).values())


def test_gptq_zeroes_unused_inputs_and_refuses_non_finite_hessians() -> None:
    x, weight, spec = inputs(), matrix(), GridSpec(4, 32)
    x[:, 7] = 0
    result = gptq(weight, x.T @ x, spec, act_order=True)
    assert bool(result.values()[:, 7].eq(0).all())
    with pytest.raises(ValueError, match="not finite"):
        gptq(weight, torch.full((NUM_IN, NUM_IN), float("nan")), spec)


def test_awq_scales_and_clipping_reduce_the_error() -> None:
    x, weight, spec = inputs(), matrix(), GridSpec(4, 32)
    hessian = x.T @ x
    nearest = output_error(round_to_nearest(weight, spec).values() - weight, hessian)
    scales = search_scales(weight, hessian, x.abs().mean(0), spec)
    scaled_hessian = hessian / torch.outer(scales, scales)
    errors = [
        output_error(
            awq_round(weight * scales, scaled_hessian, spec, clip=clip).values() / scales - weight,
            hessian,
        )
        for clip in (False, True)
    ]
    assert errors[0] < 0.7 * nearest
    assert errors[1] < errors[0]
    assert bool((scales > 0).all())
    assert scales[::17].mean() > 2 * scales.mean()  # the large inputs got the fine weights


def test_awq_shared_inputs_get_one_scale() -> None:
    x, weight = inputs(), matrix()
    shared = torch.arange(NUM_IN) // 2
    scales = search_scales(
        weight, x.T @ x, x.abs().mean(0), GridSpec(4, 32), shared_by=shared
    ).view(-1, 2)
    assert torch.equal(scales[:, 0], scales[:, 1])
    assert scales[:, 0].unique().numel() > 10


def test_clipping_is_chosen_per_group() -> None:
    weight, spec = matrix(), GridSpec(4, 32)
    weight[0, 5] = 1.0  # an outlier among inputs that hardly ever are anything
    hessian = torch.eye(NUM_IN)
    hessian[5, 5] = 1e-6
    grid, plain = clipped_grid(weight, hessian, spec), grid_of(weight, spec)
    assert grid.scale[0, 0] < 0.9 * plain.scale[0, 0]
    clipped = (on_grid(weight, spec, grid).values() - weight)[:1, :32]
    nearest = (round_to_nearest(weight, spec).values() - weight)[:1, :32]
    hessian = hessian[:32, :32]
    assert output_error(clipped, hessian) < 0.9 * output_error(nearest, hessian)


def test_last_group_may_be_shorter() -> None:
    weight, spec = matrix(), GridSpec(4, 128)
    result = round_to_nearest(weight, spec)
    assert result.grid.scale.shape == (NUM_OUT, 2)
    alone = round_to_nearest(weight[:, 128:].contiguous(), GridSpec(4, 32))
    torch.testing.assert_close(result.values()[:, 128:], alone.values())


@pytest.mark.parametrize("symmetric", [False, True])
def test_grid_contains_zero_and_the_extremes(symmetric: bool) -> None:
    weight = torch.cat([matrix(), torch.zeros(1, NUM_IN), matrix(2).abs(), -matrix(3).abs()])
    spec = GridSpec(4, 32, symmetric)
    result = round_to_nearest(weight, spec)
    index = spec.group_index(NUM_IN)
    step = result.grid.scale[:, index]
    assert bool(((result.values() - weight).abs() <= 1.01 * step).all())
    assert bool((result.grid.zero >= 1).all())  # what the GPTQ format can say
    assert torch.equal(result.grid.scale, result.grid.scale.half().float())
    assert bool(result.values()[NUM_OUT].eq(0).all())


def test_dividing_rows_changes_only_scales() -> None:
    result = round_to_nearest(matrix(), GridSpec(4, 32))
    divisors = torch.linspace(0.5, 4, NUM_OUT)
    divided = result.with_rows_divided(divisors)
    assert torch.equal(divided.codes, result.codes)
    torch.testing.assert_close(
        divided.values(), result.values() / divisors.unsqueeze(1), rtol=1e-3, atol=1e-6
    )
