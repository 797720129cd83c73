"""Proposal probabilities given the target's random number."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs

from llm_core.messages import SamplingParams
from llm_core.sampling.sampler import sample_token
from llm_core.speculative.drafters.tree_expansion import HEAD_COUPLING, proposal_probs
from tests.support.fake_drafter import EXACT_COUPLING

PARAMS = (
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.0, top_p=0.8),
    SamplingParams(temperature=1.3, top_k=7),
    SamplingParams(temperature=0.5, min_p=0.05),
)


def rows(count: int, size: int = 60) -> list[np.ndarray]:
    dice = np.random.default_rng(3)
    return [dice.normal(0.0, 2.0, size).astype(np.float32) for _ in range(count)]


@pytest.mark.parametrize("params", PARAMS)
def test_is_a_distribution_over_candidates(params: SamplingParams) -> None:
    for row, uniform in zip(rows(20), np.linspace(0.0, 0.999, 20), strict=True):
        ids, probs = proposal_probs(row, params, float(uniform), HEAD_COUPLING)
        assert probs.min() >= 0.0 and probs.sum() == pytest.approx(1.0)
        drawn = sample_token(row, params, float(uniform))
        assert drawn in (range(len(row)) if ids is None else ids.tolist())


@pytest.mark.parametrize("params", PARAMS)
def test_is_the_mean_over_nearby_random_numbers(params: SamplingParams) -> None:
    """Mixed with a tenth of the token's plain probability."""
    row, numbers = rows(1)[0], (np.arange(20_000) + 0.5) / 20_000
    softer = structs.replace(
        params, temperature=HEAD_COUPLING.temperature_scale * params.temperature
    )
    drawn = np.array([sample_token(row, softer, float(number)) for number in numbers])
    for uniform in (0.0, 0.3, 0.77):
        weights = np.exp(-np.abs(numbers - uniform) / HEAD_COUPLING.bandwidth)
        weights = 0.9 * weights / weights.sum() + 0.1 / len(numbers)
        expected = np.bincount(drawn, weights, minlength=len(row))
        ids, probs = proposal_probs(row, params, uniform, HEAD_COUPLING)
        found = np.zeros(len(row))
        found[np.arange(len(row)) if ids is None else ids] = probs
        assert found == pytest.approx(expected, abs=1e-3)


def test_exact_distribution_gives_the_drawn_token() -> None:
    for row, uniform in zip(rows(50), np.random.default_rng(4).random(50), strict=True):
        params = PARAMS[0]
        ids, probs = proposal_probs(row, params, float(uniform), EXACT_COUPLING)
        best = int(probs.argmax())
        assert (best if ids is None else int(ids[best])) == sample_token(
            row, params, float(uniform)
        )


def test_finds_the_drawn_token_more_often_than_likelihood_does() -> None:
    """Top 2 of many draws, from a slightly different distribution."""
    dice = np.random.default_rng(5)
    params = SamplingParams(temperature=0.7)
    by_probs = by_likelihood = 0
    for row in rows(1500, 40):
        guessed = (row + dice.normal(0.0, 0.4, len(row))).astype(np.float32)
        uniform = float(dice.random())
        drawn = sample_token(row, params, uniform)
        ids, probs = proposal_probs(guessed, params, uniform, HEAD_COUPLING)
        best = np.argsort(-probs)[:2]
        by_probs += drawn in (best if ids is None else ids[best])
        by_likelihood += drawn in np.argsort(-guessed)[:2]
    assert by_probs > 1.1 * by_likelihood
