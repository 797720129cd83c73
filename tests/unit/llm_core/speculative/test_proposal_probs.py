"""What is likely to be drawn by a number, of a distribution that is only near the target's."""

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
def test_are_a_distribution_over_what_can_be_drawn(params: SamplingParams) -> None:
    for row, fraction in zip(rows(20), np.linspace(0.0, 0.999, 20), strict=True):
        ids, odds = proposal_probs(row, params, float(fraction), HEAD_COUPLING)
        assert odds.min() >= 0.0 and odds.sum() == pytest.approx(1.0)
        drawn = sample_token(row, params, float(fraction))
        assert drawn in (range(len(row)) if ids is None else ids.tolist())


@pytest.mark.parametrize("params", PARAMS)
def test_are_the_mean_over_numbers_near_the_given_one(params: SamplingParams) -> None:
    """And a tenth of the token's own likelihood, which is its share of all numbers."""
    row, numbers = rows(1)[0], (np.arange(20_000) + 0.5) / 20_000
    softer = structs.replace(
        params, temperature=HEAD_COUPLING.temperature_scale * params.temperature
    )
    drawn = np.array([sample_token(row, softer, float(number)) for number in numbers])
    for fraction in (0.0, 0.3, 0.77):
        weights = np.exp(-np.abs(numbers - fraction) / HEAD_COUPLING.bandwidth)
        weights = 0.9 * weights / weights.sum() + 0.1 / len(numbers)
        expected = np.bincount(drawn, weights, minlength=len(row))
        ids, odds = proposal_probs(row, params, fraction, HEAD_COUPLING)
        found = np.zeros(len(row))
        found[np.arange(len(row)) if ids is None else ids] = odds
        assert found == pytest.approx(expected, abs=1e-3)


def test_who_knows_the_distribution_knows_the_token() -> None:
    for row, fraction in zip(rows(50), np.random.default_rng(4).random(50), strict=True):
        params = PARAMS[0]
        ids, odds = proposal_probs(row, params, float(fraction), EXACT_COUPLING)
        best = int(odds.argmax())
        assert (best if ids is None else int(ids[best])) == sample_token(
            row, params, float(fraction)
        )


def test_find_more_of_what_is_drawn_than_the_likeliest_do() -> None:
    """Two guesses at each of many draws, from a distribution that is a little off."""
    dice = np.random.default_rng(5)
    params = SamplingParams(temperature=0.7)
    by_odds = by_likelihood = 0
    for row in rows(1500, 40):
        guessed = (row + dice.normal(0.0, 0.4, len(row))).astype(np.float32)
        fraction = float(dice.random())
        drawn = sample_token(row, params, fraction)
        ids, odds = proposal_probs(guessed, params, fraction, HEAD_COUPLING)
        best = np.argsort(-odds)[:2]
        by_odds += drawn in (best if ids is None else ids[best])
        by_likelihood += drawn in np.argsort(-guessed)[:2]
    assert by_odds > 1.1 * by_likelihood
