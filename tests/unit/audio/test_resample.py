"""The stream resampler: no seams, right length, right content, constant delay."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audio.resample import StreamResampler, resample

RATES = [(24_000, 16_000), (8_000, 16_000), (48_000, 16_000), (22_050, 24_000), (22_050, 8_000)]


def noise(num_samples: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-0.5, 0.5, num_samples).astype(np.float32)


@pytest.mark.parametrize(("in_rate", "out_rate"), RATES)
def test_chunks_equal_the_whole_and_the_length_is_right(in_rate: int, out_rate: int) -> None:
    x = noise(in_rate * 2)
    expected = resample(x, in_rate, out_rate)
    assert expected.dtype == np.float32
    assert len(expected) == 2 * out_rate
    resampler = StreamResampler(in_rate, out_rate)
    parts = [resampler.process(chunk) for chunk in np.split(x, range(0, len(x), 331))]
    parts.append(resampler.flush())
    np.testing.assert_allclose(np.concatenate(parts), expected, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 700), min_size=1, max_size=20), st.sampled_from(RATES))
def test_any_cutting_is_the_same_signal(cuts: list[int], rates: tuple[int, int]) -> None:
    x = noise(sum(cuts))
    resampler = StreamResampler(*rates)
    parts = [resampler.process(chunk) for chunk in np.split(x, np.cumsum(cuts))]
    parts.append(resampler.flush())
    got = np.concatenate(parts)
    np.testing.assert_allclose(got, resample(x, *rates), atol=1e-6)
    assert abs(len(got) - len(x) * rates[1] / rates[0]) < 1.5


@pytest.mark.parametrize(("in_rate", "out_rate"), RATES)
def test_a_tone_stays_a_pure_tone_in_place(in_rate: int, out_rate: int) -> None:
    """No seams at 20 ms chunks: what is left beside the tone is below -90 dB."""
    freq = 1_000
    x = np.sin(2 * np.pi * freq * np.arange(in_rate) / in_rate).astype(np.float32)
    resampler = StreamResampler(in_rate, out_rate)
    parts = [resampler.process(chunk) for chunk in np.split(x, 50)] + [resampler.flush()]
    y = np.concatenate(parts)[out_rate // 10 : -out_rate // 10]
    angle = 2 * np.pi * freq * (np.arange(len(y)) + out_rate // 10) / out_rate
    basis = np.stack([np.sin(angle), np.cos(angle)], axis=1)
    (sine, cosine), *_ = np.linalg.lstsq(basis, y.astype(np.float64), rcond=None)
    rest = y - basis @ (sine, cosine)
    assert np.hypot(sine, cosine) == pytest.approx(1.0, abs=0.002)
    assert 20 * np.log10(np.sqrt(2) * np.std(rest)) < -90
    shift_ms = np.arctan2(cosine, sine) / (2 * np.pi * freq) * 1e3
    assert abs(shift_ms) < 0.25


def test_what_the_lower_rate_cannot_carry_is_removed() -> None:
    x = np.sin(2 * np.pi * 9_000 * np.arange(48_000) / 48_000).astype(np.float32)
    assert np.abs(resample(x, 48_000, 16_000)[2_000:-2_000]).max() < 1e-4


@pytest.mark.parametrize(
    ("in_rate", "out_rate", "limit_ms"),
    [(24_000, 16_000, 2.1), (48_000, 16_000, 2.1), (8_000, 16_000, 4.1), (22_050, 24_000, 1.6)],
)
def test_the_delay_is_small_and_constant(in_rate: int, out_rate: int, limit_ms: float) -> None:
    resampler = StreamResampler(in_rate, out_rate)
    num_in = num_out = 0
    delays_ms = []
    for _ in range(60):
        num_in += in_rate // 50
        num_out += len(resampler.process(noise(in_rate // 50)))
        delays_ms.append(1e3 * (num_in / in_rate - num_out / out_rate))
    assert max(delays_ms[2:]) <= limit_ms
    assert max(delays_ms[2:]) - min(delays_ms[2:]) < 0.2


@pytest.mark.parametrize("how", ["flush", "reset"])
def test_reset_and_flush_leave_nothing_behind(how: str) -> None:
    resampler = StreamResampler(24_000, 16_000)
    resampler.process(noise(5_000, seed=1))
    getattr(resampler, how)()
    x = noise(4_800, seed=2)
    got = np.concatenate([resampler.process(x), resampler.flush()])
    np.testing.assert_array_equal(got, resample(x, 24_000, 16_000))


def test_equal_rates_pass_everything_through() -> None:
    resampler = StreamResampler(16_000, 16_000)
    x = noise(123)
    np.testing.assert_array_equal(resampler.process(x), x)
    assert resampler.flush().shape == (0,)


def test_empty_input_gives_empty_output() -> None:
    resampler = StreamResampler(24_000, 16_000)
    assert resampler.process(np.zeros(0, np.float32)).shape == (0,)
    assert resampler.flush().shape == (0,)


def test_a_long_stream_does_not_drift() -> None:
    resampler = StreamResampler(22_050, 24_000)
    second = noise(22_050)
    num_out = sum(len(resampler.process(second)) for _ in range(60)) + len(resampler.flush())
    assert abs(num_out - 60 * 24_000) <= 1


@pytest.mark.parametrize("rates", [(0, 16_000), (16_000, -1)])
def test_impossible_rates_are_refused(rates: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        StreamResampler(*rates)
