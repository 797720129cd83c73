"""The sound of a sentence, finished while it is made: no silence, no clicks, one level."""

from __future__ import annotations

import numpy as np
import pytest

from audio.frame import Samples, silence
from audio.tts.postprocess import SpeechPostprocessor, gain_for

RATE = 22_050


def tone(seconds: float, level: float = 0.2) -> Samples:
    at = np.arange(int(seconds * RATE)) / RATE
    return (level * np.sin(2 * np.pi * 220 * at)).astype(np.float32)


def finished(
    raw: Samples, *, step: int | None = None, gain: float = 1.0, pause: float = 90.0
) -> Samples:
    finisher = SpeechPostprocessor(RATE, gain, pause)
    step = step or max(1, len(raw))
    parts = [finisher.process(raw[i : i + step]) for i in range(0, len(raw), step)]
    return np.concatenate([*parts, finisher.flush()])


SPEECH = np.concatenate((silence(2_000), tone(0.3), silence(3_000), tone(0.2, 0.5), silence(4_000)))


@pytest.mark.parametrize("step", [1, 13, 256, 1_000, 5_120, 20_000])
def test_pieces_make_no_difference(step: int) -> None:
    np.testing.assert_allclose(finished(SPEECH, step=step), finished(SPEECH), atol=1e-6)


def test_silence_goes_and_the_pause_is_the_one_asked_for() -> None:
    sound = finished(SPEECH, pause=90)
    voiced = np.flatnonzero(np.abs(sound) > 0.01)
    assert voiced[0] / RATE <= 0.010
    assert (len(sound) - 1 - voiced[-1]) / RATE == pytest.approx(0.09, abs=0.004)
    inside = np.flatnonzero(np.diff(voiced) > 1_000)
    assert len(inside) == 1, "a pause within the sentence stays"
    assert np.diff(voiced)[inside[0]] == pytest.approx(3_000, abs=60)


def test_a_voice_that_breaks_off_is_faded_out() -> None:
    sound = finished(tone(0.31), pause=30)
    assert sound[0] == 0.0
    assert float(np.abs(np.diff(sound)).max()) < 0.05, "no step that clicks"
    assert not sound[-int(0.03 * RATE) + 50 :].any()


def test_loud_peaks_are_bent_and_not_cut() -> None:
    loud = finished(tone(0.3, 1.5))
    assert 0.9 < float(np.abs(loud).max()) <= 0.95
    quiet = finished(tone(0.3, 0.5))
    assert float(np.abs(quiet).max()) == pytest.approx(0.5, abs=0.01), "below the knee nothing is"


def test_the_gain_brings_a_voice_to_the_usual_level() -> None:
    for level in (0.1, 0.3):
        gain = gain_for(SPEECH * level, RATE)
        rms = float(np.sqrt(np.square(tone(0.2, 0.5) * level * gain).mean()))
        assert 0.05 < rms < 0.2
    assert gain_for(silence(RATE), RATE) == 1.0
    assert gain_for(silence(3), RATE) == 1.0


@pytest.mark.parametrize(
    "raw", [silence(RATE), silence(3), silence(0), np.full(RATE, np.nan, np.float32)]
)
def test_no_sound_is_nothing(raw: Samples) -> None:
    assert len(finished(raw)) == 0
