"""Noise reduction: noise goes down, a voice stays where it was, and cuts do not matter."""

from __future__ import annotations

import numpy as np
import pytest

from audio.frame import SPEECH_RATE, Samples
from audio.noise_suppressor import Microphone, NoiseReducer


def noise(seconds: float, level: float = 0.02) -> Samples:
    dice = np.random.default_rng(0)
    return dice.normal(0, level, int(seconds * SPEECH_RATE)).astype(np.float32)


def reduced(samples: Samples, microphone: Microphone, chunk: int = 320) -> Samples:
    reducer = NoiseReducer(microphone)
    return np.concatenate(
        [reducer.process(samples[i : i + chunk]) for i in range(0, samples.size, chunk)]
    )


def level_db(samples: Samples) -> float:
    return float(10 * np.log10(np.mean(np.square(samples))))


@pytest.mark.parametrize(("microphone", "least_db"), [("near_field", 9.0), ("far_field", 13.0)])
def test_noise_goes_down(microphone: Microphone, least_db: float) -> None:
    before = noise(4.0)
    after = reduced(before, microphone)
    assert level_db(before[32_000:]) - level_db(after[32_000:]) > least_db


def test_a_sound_stays_where_it_is_and_as_loud_as_it_is() -> None:
    """A sweep in bursts, as syllables are: the output lies on the input, to the sample."""
    time_s = np.arange(4 * SPEECH_RATE) / SPEECH_RATE
    sweep = 0.3 * np.sin(2 * np.pi * (200 * time_s + 250 * time_s**2))
    voice = (sweep * (np.sin(2 * np.pi * 2.5 * time_s) > 0)).astype(np.float32)
    after = reduced(voice + noise(4.0, 0.001), "near_field")
    part = voice[16_000 : 16_000 + 32_000]
    lags = range(-40, 41)
    products = [float(part @ after[16_000 + lag : 48_000 + lag]) for lag in lags]
    assert lags[int(np.argmax(products))] == 0
    assert abs(level_db(after[16_000:48_000]) - level_db(part)) < 1.5


@pytest.mark.parametrize("chunk", [1, 7, 160, 333, 4_000])
def test_how_the_stream_is_cut_does_not_matter(chunk: int) -> None:
    samples = noise(0.5)
    whole = reduced(samples, "far_field")
    got = reduced(samples, "far_field", chunk)
    np.testing.assert_allclose(got, whole[: got.size], atol=1e-6)
    assert 0 <= samples.size - got.size < 256, "less than 16 ms are inside"
