"""The end of the voice inside the VAD's late verdict."""

from __future__ import annotations

import numpy as np
import pytest

from audio.endpointing.speech_offset import find_speech_offset, trailing_silence_len

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
    found = find_speech_offset(samples, true_end + late_ms * 16)
    assert abs(found - true_end) <= 160


def test_a_quiet_last_sound_is_part_of_the_voice() -> None:
    samples = np.concatenate([tone(1.0, 0.3), tone(0.1, 0.015), np.zeros(RATE // 2, np.float32)])
    assert find_speech_offset(samples, int(1.2 * RATE)) == pytest.approx(1.1 * RATE, abs=160)


def test_a_rumble_behind_the_voice_is_not_the_voice() -> None:
    t = np.arange(RATE // 2) / RATE
    rumble = (0.1 * np.sin(2 * np.pi * 25 * t)).astype(np.float32)
    samples = np.concatenate([tone(1.0, 0.3), rumble])
    assert find_speech_offset(samples, int(1.2 * RATE)) == pytest.approx(1.0 * RATE, abs=160)


def test_a_click_behind_the_voice_is_not_the_voice() -> None:
    samples = np.concatenate([tone(1.0, 0.3), np.zeros(RATE // 2, np.float32)])
    samples[int(1.105 * RATE)] = 0.9
    assert find_speech_offset(samples, int(1.2 * RATE)) == pytest.approx(1.0 * RATE, abs=160)


@pytest.mark.parametrize("heard_by_vad", [True, False])
def test_the_release_of_a_last_consonant_is_part_of_the_voice(heard_by_vad: bool) -> None:
    """Wherever frames fall: 8 ms of it fill one or two, and the breath behind is too quiet to count
    by itself. The VAD's windows fall anywhere too, so it may have missed it."""
    breath = noise(0.04, 0.0018) * np.linspace(1, 0.3, 640, dtype=np.float32)
    closed = np.zeros(RATE * 60 // 1000, np.float32)
    voice = np.concatenate([tone(1.0, 0.3), closed, noise(0.008, 0.012), breath])
    burst_end = int(1.068 * RATE)
    for phase in range(0, 160, 8):
        room = noise(2.0, 0.0003)
        room[phase : phase + len(voice)] += voice
        found = find_speech_offset(room, phase + int((1.1 if heard_by_vad else 1.0) * RATE))
        assert abs(found - phase - burst_end) <= 200, phase


def test_silence_before_the_voice_makes_it_no_quieter() -> None:
    voice = np.concatenate([tone(0.3, 0.3), tone(0.1, 0.012), np.zeros(RATE // 2, np.float32)])
    ends = [
        find_speech_offset(np.concatenate([np.zeros(lead, np.float32), voice]), lead + RATE // 2)
        - lead
        for lead in (0, 2 * RATE)
    ]
    assert ends[0] == ends[1]


def test_a_silence_of_the_network_does_not_hide_the_noise_that_follows_the_voice() -> None:
    samples = np.concatenate([tone(1.0, 0.3), noise(0.4, 0.004), np.zeros(RATE, np.float32)])
    assert find_speech_offset(samples, int(1.1 * RATE)) == pytest.approx(1.0 * RATE, abs=160)


@pytest.mark.parametrize("length", [0, 100, 5_000])
def test_without_levels_to_compare_the_vad_is_believed(length: int) -> None:
    assert find_speech_offset(np.zeros(length, np.float32), length) in range(
        length - 160, length + 1
    )
    assert find_speech_offset(np.zeros(0, np.float32), 0) == 0


@pytest.mark.parametrize("noise_level", [0.0, 0.0005, 0.01])
@pytest.mark.parametrize("silent_ms", [0, 60, 100])
def test_a_dip_is_the_silence_at_the_end(noise_level: float, silent_ms: int) -> None:
    samples = np.concatenate([noise(0.3, noise_level), tone(1.0, 0.3), tone(silent_ms / 1000, 0)])
    samples += noise(len(samples) / RATE, noise_level)[: len(samples)]
    assert abs(trailing_silence_len(samples) - silent_ms * 16) <= 160


def test_a_voice_without_a_silence_to_compare_with_does_not_dip() -> None:
    assert trailing_silence_len(tone(1.0, 0.3)) == 0
    assert trailing_silence_len(np.zeros(0, np.float32)) == 0
