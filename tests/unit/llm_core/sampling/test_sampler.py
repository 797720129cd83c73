"""The reference sampler: exact distributions, greedy edge cases, reproducible randomness."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.philox import philox4x32
from llm_core.batch import MAXIMA_BLOCK
from llm_core.errors import InvalidRequestError, LlmError
from llm_core.messages import JsonGuide, SamplingParams
from llm_core.sampling.sampler import (
    FloatRow,
    SamplerState,
    candidates,
    sample_row,
    uniform,
)
from llm_core.sampling.validation import validate_params

VOCAB = 5000


def logits(seed: int = 0, spread: float = 3.0, size: int = VOCAB) -> FloatRow:
    return (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)


def state(size: int = VOCAB, prompt: tuple[int, ...] = (), **kwargs: Any) -> SamplerState:
    return SamplerState(SamplingParams(**{"seed": 7, **kwargs}), prompt, vocab_size=size)


def kept(row: FloatRow, **kwargs: Any) -> dict[int, float]:
    """Probability of each token that may be drawn."""
    params = SamplingParams(**{"temperature": 1.0, **kwargs})
    ids, weights = candidates(row, float(row.max()), params)
    ids = np.arange(len(row)) if ids is None else ids
    total = weights.sum(dtype=np.float64)
    return {int(i): float(w) / total for i, w in zip(ids, weights, strict=True) if w > 0}


def oracle(
    row: FloatRow,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> dict[int, float]:
    """The definition in float64, by a full sort."""
    scaled = row.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    if top_k:
        order = order[:top_k]
    weights = np.exp(scaled[order] - scaled[order[0]])
    reached = np.cumsum(weights) / weights.sum()
    num_kept = len(order) if top_p == 1.0 else int(np.searchsorted(reached, top_p)) + 1
    order, weights = order[:num_kept], weights[:num_kept]
    order, weights = order[weights >= min_p], weights[weights >= min_p]
    probabilities = weights / weights.sum()
    return {int(i): float(p) for i, p in zip(order, probabilities, strict=True) if p > 1e-30}


@pytest.mark.parametrize("spread", [0.01, 0.5, 1.0, 3.0, 10.0])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_k": 40},
        {"top_k": VOCAB + 1},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"top_p": 0.1, "temperature": 0.3},
        {"min_p": 0.05},
        {"top_k": 100, "top_p": 0.5, "min_p": 0.01, "temperature": 1.7},
    ],
)
def test_distribution_equals_the_definition(spread: float, params: dict[str, Any]) -> None:
    row = logits(1, spread)
    got, wanted = kept(row, **params), oracle(row, **params)
    # float32 rounding may move the edge of a broad nucleus by a few of its weakest tokens.
    differing = set(got) ^ set(wanted)
    assert sum(got.get(i, 0) + wanted.get(i, 0) for i in differing) < 2e-4
    for token in set(got) & set(wanted):
        assert got[token] == pytest.approx(wanted[token], rel=2e-3)


def test_equal_logits_keep_the_smaller_ids() -> None:
    row = np.zeros(VOCAB, dtype=np.float32)
    assert set(kept(row, top_k=3)) == {0, 1, 2}
    assert set(kept(row, top_p=0.01)) == set(range(50))


def test_tiny_top_p_keeps_only_the_best() -> None:
    row = logits()
    assert set(kept(row, top_p=1e-9)) == {int(row.argmax())}


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-20, 1e-6, 1e-4])
def test_no_or_tiny_temperature_is_argmax(temperature: float) -> None:
    for seed in range(20):
        row = logits(seed)
        assert sample_row(row, state(temperature=temperature, seed=seed), 3) == row.argmax()


def test_greedy_takes_the_first_of_equal_logits() -> None:
    assert sample_row(np.zeros(9, dtype=np.float32), state(9), 0) == 0


def test_minus_infinity_is_never_sampled() -> None:
    row = np.full(VOCAB, -np.inf, dtype=np.float32)
    row[[5, 4000]] = 1.0
    for params in ({}, {"top_p": 0.999}, {"top_k": 50}, {"min_p": 0.1}, {"temperature": 50.0}):
        chooser = state(**{"temperature": 1.0, **params})
        assert {sample_row(row, chooser, p) for p in range(60)} == {5, 4000}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_unusable_logits_are_an_error_and_not_a_token(bad: float) -> None:
    row = logits()
    row[VOCAB // 2] = bad
    for temperature in (0.0, 1.0):
        with pytest.raises(LlmError, match="unusable"):
            sample_row(row, state(temperature=temperature), 0)
    with pytest.raises(LlmError, match="unusable"):
        sample_row(np.full(VOCAB, -np.inf, dtype=np.float32), state(), 0)


def test_frequencies_follow_the_probabilities() -> None:
    row = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    chooser = state(4, temperature=1.0)
    counts = Counter(sample_row(row, chooser, position) for position in range(8000))
    for token, probability in enumerate((0.5, 0.3, 0.15, 0.05)):
        deviation = (probability * (1 - probability) / 8000) ** 0.5
        assert counts[token] / 8000 == pytest.approx(probability, abs=4 * deviation)


def test_frequencies_over_a_whole_vocabulary() -> None:
    row = logits(3, spread=0.5, size=1000)
    chooser = state(1000, temperature=1.0)
    counts = np.bincount([sample_row(row, chooser, p) for p in range(20000)], minlength=1000)
    probabilities = np.exp(row.astype(np.float64))
    wanted = probabilities / probabilities.sum() * 20000
    chi_squared = float(((counts - wanted) ** 2 / wanted).sum())
    assert abs(chi_squared - 999) < 5 * (2 * 999) ** 0.5


def test_token_depends_on_seed_and_position_only() -> None:
    row = logits()
    first = [sample_row(row, state(temperature=1.0, seed=3), p) for p in range(30)]
    chooser = state(temperature=1.0, seed=3)
    assert [sample_row(row, chooser, p) for p in reversed(range(30))] == first[::-1]
    assert [sample_row(row, state(temperature=1.0, seed=4), p) for p in range(30)] != first


def test_without_a_seed_each_request_has_its_own() -> None:
    assert state(seed=None).seed != state(seed=None).seed
    assert state(seed=-1).seed == 2**64 - 1


def test_philox_known_answers() -> None:
    # kat_vectors of Random123 1.14, philox4x32 with 10 rounds.
    ones = 0xFFFFFFFF
    assert philox4x32((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox4x32((ones,) * 4, (ones,) * 2) == (
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    )


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**20))
@settings(deadline=None)
def test_uniform_is_in_range(seed: int, position: int) -> None:
    assert 0.0 <= uniform(seed, position) < 1.0


@given(
    seed=st.integers(0, 1000),
    spread=st.sampled_from([0.0, 0.3, 2.0, 20.0]),
    temperature=st.floats(1e-3, 100.0),
    top_p=st.floats(1e-6, 1.0),
    top_k=st.integers(0, 300),
    min_p=st.floats(0.0, 1.0),
)
@settings(max_examples=150, deadline=None)
def test_any_parameters_give_a_candidate(
    seed: int, spread: float, temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    row = logits(seed, spread, size=700)
    params = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    token = sample_row(row, state(700, seed=seed, **params), seed)
    assert token in kept(row, **params)


def test_repetition_penalty_counts_prompt_and_reply() -> None:
    row = np.array([2.0, -2.0, 1.5, -1.0], dtype=np.float32)
    chooser = state(4, prompt=(0, 1), repetition_penalty=2.0)
    assert chooser.apply_penalties(row).tolist() == [1.0, -4.0, 1.5, -1.0]
    chooser.observe(2)
    assert chooser.apply_penalties(row).tolist() == [1.0, -4.0, 0.75, -1.0]
    assert row.tolist() == [2.0, -2.0, 1.5, -1.0]


def test_frequency_and_presence_count_only_the_reply() -> None:
    row = np.zeros(4, dtype=np.float32)
    chooser = state(4, prompt=(0, 0), frequency_penalty=0.5, presence_penalty=0.25)
    assert chooser.apply_penalties(row).tolist() == [0, 0, 0, 0]
    for token in (1, 1, 3):
        chooser.observe(token)
    assert chooser.apply_penalties(row).tolist() == [0, -1.25, 0, -0.75]


def test_penalties_change_the_greedy_choice() -> None:
    row = np.array([1.0, 0.9, 0.0], dtype=np.float32)
    chooser = state(3, presence_penalty=0.5)
    assert sample_row(row, chooser, 0) == 0
    chooser.observe(0)
    assert sample_row(row, chooser, 1) == 1


@given(st.lists(st.integers(0, 30), max_size=300), st.lists(st.integers(0, 30), max_size=60))
@settings(deadline=None)
def test_penalties_equal_their_definition(reply: list[int], prompt: list[int]) -> None:
    row = logits(2, size=31)
    chooser = state(
        31,
        prompt=tuple(prompt),
        repetition_penalty=1.3,
        frequency_penalty=0.25,
        presence_penalty=-0.5,
        logit_bias={3: 2.0, 30: -7.5},
    )
    expected = row.copy()
    for token in set(prompt) | set(reply):
        expected[token] *= 1.3 if expected[token] < 0 else 1 / 1.3
    for token, count in Counter(reply).items():
        expected[token] -= 0.25 * count - 0.5
    expected[3] += 2.0
    expected[30] -= 7.5
    for token in reply:
        chooser.observe(token)
    np.testing.assert_allclose(chooser.apply_penalties(row), expected, rtol=1e-5, atol=1e-5)


def test_a_bias_can_force_and_ban() -> None:
    row = logits()
    forced = state(temperature=1.0, logit_bias={77: 100.0})
    assert {sample_row(row, forced, p) for p in range(20)} == {77}
    best = int(row.argmax())
    banned = state(temperature=5.0, logit_bias={best: -100.0})
    assert best not in {sample_row(row, banned, p) for p in range(200)}


@pytest.mark.parametrize("temperature", [0.0, 1e-4, 0.7, 1e6])
@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.01}])
def test_masked_tokens_are_never_sampled(temperature: float, params: dict[str, Any]) -> None:
    row = logits(3)
    allowed = np.zeros(VOCAB, dtype=np.bool_)
    allowed[[4, 10, 4999]] = True
    chosen = {
        sample_row(
            row, state(temperature=temperature, **params), p, banned={10, 11}, allowed=allowed
        )
        for p in range(60)
    }
    assert chosen <= {4, 4999}
    if temperature == 1e6 and "top_p" not in params:
        assert chosen == {4, 4999}


def test_empty_mask_and_masked_nan_are_errors() -> None:
    row = logits(4, size=9)
    none = np.zeros(9, dtype=np.bool_)
    with pytest.raises(LlmError, match="unusable"):
        sample_row(row, state(9), 0, allowed=none)
    row[3] = np.nan
    only = none.copy()
    only[5] = True
    with pytest.raises(LlmError, match="unusable"):
        sample_row(row, state(9), 0, allowed=only)


def block_maxima_of(row: FloatRow) -> FloatRow:
    """``ForwardResult.block_maxima`` of a row."""
    starts = np.arange(0, len(row), MAXIMA_BLOCK)
    return np.maximum.reduceat(row, starts)


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([1, 63, 64, 65, 1000, 49152]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 4.0, 30.0]),
    is_coarse=st.booleans(),
    temperature=st.sampled_from([0.0, 1e-6, 0.05, 0.2, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 40, 700, 60_000]),
    top_p=st.sampled_from([0.0, 0.1, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    more=st.sampled_from(
        [{}, {"repetition_penalty": 1.3}, {"presence_penalty": 0.5}, {"logit_bias": {0: 5.0}}]
    ),
    is_banned=st.booleans(),
)
def test_block_maxima_do_not_change_tokens(
    seed: int,
    size: int,
    spread: float,
    is_coarse: bool,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    more: dict[str, Any],
    is_banned: bool,
) -> None:
    """Every option, with ties, flat and steep rows: the token is the one without maxima."""
    row = logits(seed, spread, size)
    if is_coarse:
        row = np.round(row)
    sampler = state(
        size, (0,), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, **more
    )
    banned = (size - 1,) if is_banned and size > 1 else ()
    for position in range(4):
        wanted = sample_row(row, sampler, position, banned=banned)
        assert (
            sample_row(row, sampler, position, banned=banned, block_maxima=block_maxima_of(row))
            == wanted
        )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_block_maxima_do_not_hide_unusable_logits(bad: float) -> None:
    row = logits(3, size=300)
    row[170] = bad
    with pytest.raises(LlmError, match="unusable"):
        sample_row(row, state(300), 0, block_maxima=block_maxima_of(row))
    nothing = np.full(300, -np.inf, dtype=np.float32)
    with pytest.raises(LlmError, match="unusable"):
        sample_row(nothing, state(300), 0, block_maxima=block_maxima_of(nothing))


@pytest.mark.parametrize("spread", [0.001, 1.0, 4.0])
def test_candidate_selection_does_not_change_the_distribution(spread: float) -> None:
    """A vocabulary so large, and a row so flat, that both ways are taken."""
    row = logits(6, spread, size=30_000)
    for params in ({}, {"top_k": 700}, {"min_p": 0.3}, {"top_p": 0.6}):
        got, wanted = kept(row, **params), oracle(row, **params)
        differing = set(got) ^ set(wanted)
        assert sum(got.get(i, 0) + wanted.get(i, 0) for i in differing) < 2e-4
        for token in list(set(got) & set(wanted))[:500]:
            assert got[token] == pytest.approx(wanted[token], rel=2e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"min_p": -0.5}, "min_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens.*max_tokens"),
        ({"min_tokens": 5, "guide": JsonGuide()}, "min_tokens.*guide"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias: token -1"),
        ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias: token {VOCAB}"),
        ({"logit_bias": {0: 101.0}}, "logit_bias"),
        ({"logit_bias": {0: float("nan")}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("x" * 257,)}, "stop"),
        ({"stop": ("x",) * 17}, "stop"),
    ],
)
def test_bad_parameters_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        validate_params(SamplingParams(**change), vocab_size=VOCAB)


def test_good_parameters_pass() -> None:
    validate_params(SamplingParams(), vocab_size=VOCAB)
    validate_params(
        SamplingParams(
            max_tokens=1, temperature=2.0, top_k=5, top_p=1e-3, min_p=1.0, stop=("a",) * 16, seed=-5
        ),
        vocab_size=VOCAB,
    )
