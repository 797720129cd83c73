"""The A curve against the standard's table, and the frames around a sound."""

from __future__ import annotations

import numpy as np
import pytest

from audio.loudness import levels_db

# IEC 61672-1, table 3.
WEIGHTS_DB = {31.5: -39.4, 63: -26.2, 125: -16.1, 250: -8.6, 500: -3.2, 1000: 0.0, 4000: 1.0}


def tone(hz: float, rate: int, seconds: float = 2.0) -> np.ndarray:
    t = np.arange(int(seconds * rate)) / rate
    return np.sin(2 * np.pi * hz * t).astype(np.float32)


@pytest.mark.parametrize("rate", [16_000, 24_000])
@pytest.mark.parametrize("hz", WEIGHTS_DB)
def test_levels_are_those_of_the_standard(hz: float, rate: int) -> None:
    levels = levels_db(tone(hz, rate), rate)[50:150]
    mean = 10 * np.log10(np.mean(10 ** (levels / 10)))
    assert mean + 3.01 == pytest.approx(WEIGHTS_DB[hz], abs=0.4)  # a sine's power is a half


def test_nothing_is_heard_before_it_sounds_and_blocks_leave_no_seam() -> None:
    sound = np.concatenate((np.zeros(16_000, np.float32), tone(1000, 16_000, 9.0)))
    levels = levels_db(sound, 16_000)
    assert levels.size == 1_000
    assert levels[:99].max() < -60
    assert levels[101:].min() > -3.1
    assert levels[101:].max() < -2.9


def test_a_rumble_hides_no_voice() -> None:
    rumble = tone(20, 16_000)
    voice = 0.05 * tone(1000, 16_000)
    assert levels_db(rumble, 16_000)[50:150].max() < levels_db(voice, 16_000)[50:150].min() - 10


@pytest.mark.parametrize("length", [0, 1, 159, 160, 161])
def test_only_whole_frames_have_a_level(length: int) -> None:
    levels = levels_db(np.zeros(length, np.float32), 16_000)
    assert levels.size == length // 160
    assert np.all(levels < -100)
