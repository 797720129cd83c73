"""The end of the voice inside the VAD's late verdict."""

from __future__ import annotations

import numpy as np
import pytest

from audio.voice_end import find_voice_end

RATE = 16_000


def tone(seconds: float, level: float) -> np.ndarray:
    t = np.arange(int(seconds * RATE)) / RATE
    return (level * np.sin(2 * np.pi * 200 * t)).astype(np.float32)


def noise(seconds: float, level: float) -> np.ndarray:
    rng = np.random.default_rng(1)
    return (level * rng.standard_normal(int(seconds * RATE))).astype(np.float32)


@pytest.mark.parametrize("noise_level", [0.0, 0.0005, 0.01])
@pytest.mark.parametrize("late_ms", [0, 30, 100, 200])
def test_the_end_is_found_inside_the_late_window(noise_level: float, late_ms: int) -> None:
    samples = np.concatenate([noise(0.3, noise_level), tone(1.0, 0.3), noise(0.6, noise_level)])
    samples[int(0.3 * RATE) : int(1.3 * RATE)] += noise(1.0, noise_level)
    true_end = int(1.3 * RATE)
    found = find_voice_end(samples, true_end + late_ms * 16)
    assert abs(found - true_end) <= 160


def test_a_quiet_last_sound_is_part_of_the_voice() -> None:
    samples = np.concatenate([tone(1.0, 0.3), tone(0.1, 0.015), np.zeros(RATE // 2, np.float32)])
    assert find_voice_end(samples, int(1.2 * RATE)) == pytest.approx(1.1 * RATE, abs=160)


@pytest.mark.parametrize("length", [0, 100, 5_000])
def test_without_levels_to_compare_the_vad_is_believed(length: int) -> None:
    assert find_voice_end(np.zeros(length, np.float32), length) in range(length - 160, length + 1)
    assert find_voice_end(np.zeros(0, np.float32), 0) == 0
