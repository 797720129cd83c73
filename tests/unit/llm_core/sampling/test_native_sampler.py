"""The compiled sampler samples the same tokens as the reference, for all options."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_core.errors import LlmError
from llm_core.sampling.native_sampler import NativeSampler
from llm_core.sampling.sampler import FloatRow, SamplerState, candidates, sample_row, uniform
from tests.support.native_library import FORMS, native_library
from tests.unit.llm_core.sampling.test_sampler import block_maxima_of, logits, state

_ROUNDING = 2e-5  # of a running sum in single precision


@cache
def native_sampler(form: str, size: int) -> NativeSampler:
    return NativeSampler(native_library(form), size)


def assert_sampled(token: int, row: FloatRow, sampler: SamplerState, u: float) -> None:
    """``token`` is where the running sum passes ``u``, within rounding."""
    processed = sampler.apply_penalties(row)
    ids, weights = candidates(processed, float(processed.max()), sampler.params)
    ids = np.arange(len(row)) if ids is None else ids
    order = np.argsort(ids)
    sums = np.cumsum(weights[order], dtype=np.float64) / weights.sum(dtype=np.float64)
    (at,) = np.flatnonzero(ids[order] == token)
    before = sums[at - 1] if at else 0.0
    assert before - _ROUNDING <= u <= sums[at] + _ROUNDING


@pytest.mark.parametrize("form", FORMS)
@settings(deadline=None, max_examples=150, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([1, 7, 63, 64, 65, 1000, 49152]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 4.0, 30.0]),
    is_coarse=st.booleans(),
    temperature=st.sampled_from([0.0, 1e-4, 0.05, 0.2, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 40, 700, 60_000]),
    top_p=st.sampled_from([1e-9, 0.1, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    repetition=st.sampled_from([1.0, 1.05, 2.0]),
    others=st.sampled_from(
        [{}, {"presence_penalty": 0.5}, {"frequency_penalty": -2.0}, {"logit_bias": {0: 5.0}}]
    ),
    said=st.lists(st.integers(0, 2**32), max_size=90),
)
def test_equals_the_reference_for_all_options(
    form: str,
    seed: int,
    size: int,
    spread: float,
    is_coarse: bool,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition: float,
    others: dict[str, Any],
    said: Sequence[int],
) -> None:
    row = logits(seed, spread, size)
    if is_coarse:
        row = np.round(row)
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    sampler = state(size, (0,), repetition_penalty=repetition, **options, **others)
    for token in said:
        sampler.observe(token % size)
    before, maxima = row.copy(), block_maxima_of(row)
    native = native_sampler(form, size)
    for position in range(4):
        u = uniform(sampler.seed, position)
        wanted = sample_row(row, sampler, position)
        token = native.sample(row, maxima, sampler, u)
        assert np.array_equal(row, before), "others tell the row's probabilities"
        if token != wanted:
            assert not sampler.is_greedy
            assert_sampled(token, row, sampler, u)
        sampler.observe(token)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.02}])
def test_frequencies_are_the_probabilities(form: str, params: dict[str, Any]) -> None:
    """4,000 draws of 300 tokens, by the statistic of the chi-square test."""
    row = logits(5, 2.0, 300)
    sampler = state(300, temperature=0.8, **params)
    ids, weights = candidates(row, float(row.max()), sampler.params)
    expected = np.zeros(300)
    expected[slice(None) if ids is None else ids] = weights / weights.sum() * 4000
    counts = np.zeros(300)
    for position in range(4000):
        counts[
            sample_row(
                row,
                sampler,
                position,
                block_maxima=block_maxima_of(row),
                backend=native_sampler(form, 300),
            )
        ] += 1
    assert not counts[expected == 0].any()
    common = expected > 5
    statistic = float(np.sum((counts - expected)[common] ** 2 / expected[common]))
    freedom = int(common.sum())
    assert abs(statistic - freedom) < 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_unusable_logits_are_an_error(form: str, bad: float) -> None:
    row = logits(3, size=300)
    row[170 : 170 + (300 if bad < 0 else 1)] = bad
    if bad < 0:
        row[:] = bad
    for options in ({"temperature": 0.7}, {"temperature": 0.0, "repetition_penalty": 1.2}):
        sampler = state(300, (4, 170), **options)
        with pytest.raises(LlmError, match="unusable"):
            sample_row(
                row,
                sampler,
                0,
                block_maxima=block_maxima_of(row),
                backend=native_sampler(form, 300),
            )


def test_penalty_on_the_maximum_of_a_block() -> None:
    """The block maximum is updated for the call, and restored with the row."""
    row = np.zeros(200, dtype=np.float32)
    row[[70, 71, 130]] = 9.0, 8.0, 7.0
    native, maxima = native_sampler(FORMS[0], 200), block_maxima_of(row)
    greedy = {"temperature": 0.0}
    assert native.sample(row, maxima, state(200, **greedy, logit_bias={70: -5.0}), 0.0) == 71
    assert native.sample(row, maxima, state(200, (70, 71), repetition_penalty=2.0), 0.5) == 130
    assert native.sample(row, maxima, state(200, **greedy, logit_bias={3: 20.0}), 0.0) == 3
    assert native.sample(row, maxima, state(200, **greedy, logit_bias={9: 0.5}), 0.0) == 70


@pytest.mark.parametrize("form", FORMS)
def test_all_tokens_penalised_and_biased(form: str) -> None:
    """More logits are changed, and put back, than the row has."""
    size = 300
    options: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "frequency_penalty": 0.5}
    sampler = state(size, logit_bias=dict.fromkeys(range(size), 1.5), **options)
    for token in range(200):
        sampler.observe(token)
    row = logits(11, 3.0, size)
    before = row.copy()
    token = native_sampler(form, size).sample(row, block_maxima_of(row), sampler, 0.5)
    assert np.array_equal(row, before)
    assert_sampled(token, row, sampler, 0.5)


@pytest.mark.parametrize("top_k", [2**31, 2**32 + 1, 2**62])
def test_a_top_k_of_more_than_32_bits_cuts_nothing(top_k: int) -> None:
    row = logits(12, 1.0, 300)
    sampler = state(300, temperature=1.0, top_k=top_k)
    tokens = {
        native_sampler(FORMS[0], 300).sample(row, block_maxima_of(row), sampler, f / 50)
        for f in range(50)
    }
    assert len(tokens) > 20
