"""Prosody before a pause: level, pitch contour, and length of the last pitched sound.

Speakers who have finished let pitch and level fall and lengthen the last syllable; those who stop
in mid-sentence do not. Weak features, but cheap: a few milliseconds for two seconds of audio.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from audio.frame import SPEECH_RATE, Samples

_HOP = SPEECH_RATE // 100
_FRAME = 4 * _HOP
_LOOK_BACK = 2 * SPEECH_RATE
_MIN_LAG, _MAX_LAG = SPEECH_RATE // 400, SPEECH_RATE // 64  # 64 to 400 Hz
_PERIODIC = 0.45
_MIN_POWER = 1e-6
_LAST_FRAMES = 30  # 0.3 s
_MIN_PITCHED_FRAMES = 10


@dataclass(frozen=True, slots=True)
class Prosody:
    """Prosodic features of the end of speech; 0 where a feature was not found.

    ``levels_db``: mean levels of the last three spans of 100 ms, latest first, relative to the loud
    parts. ``pitch_drop``: natural log of the final pitch over the median pitch. ``pitch_slope``:
    the same over the pitch 0.3 s earlier. ``last_run_s``: length of the last unbroken pitched
    sound. ``pitched_share``: pitched share of the last 0.3 s.
    """

    levels_db: tuple[float, float, float] = (0.0, 0.0, 0.0)
    pitch_drop: float = 0.0
    pitch_slope: float = 0.0
    last_run_s: float = 0.0
    pitched_share: float = 0.0


def measure_prosody(samples: Samples, speech_offset: int) -> Prosody:
    """Prosody of ``samples`` float32 [n] at 16 kHz just before ``speech_offset`` (a sample)."""
    voice = samples[max(0, speech_offset - _LOOK_BACK) : speech_offset]
    voice = voice[voice.size % _HOP :]
    if voice.size < _FRAME + 3 * _HOP:
        return Prosody()
    power = np.square(voice.reshape(-1, _HOP)).mean(axis=1)
    level_db = 10.0 * np.log10(power + 1e-9)
    loud_db = float(np.percentile(level_db, 95))
    tens = [level_db[-10:], level_db[-20:-10], level_db[-30:-20]]
    first, second, third = (float(t.mean()) - loud_db if t.size else 0.0 for t in tens)
    levels_db = (first, second, third)
    pitch = _pitch_hz(voice)
    pitched = pitch[pitch > 0]
    if pitched.size < _MIN_PITCHED_FRAMES:
        return Prosody(levels_db)
    last = pitch[-_LAST_FRAMES:]
    last_pitched = last[last > 0]
    broken = np.flatnonzero(pitch == 0)
    found = np.flatnonzero(pitch > 0)
    # Unpitched sound may follow the run.
    before = broken[broken < found[-1]]
    run = int(found[-1]) - (int(before[-1]) if before.size else -1)
    drop = slope = 0.0
    if last_pitched.size >= 3:
        drop = float(np.log(np.median(last_pitched[-8:]) / np.median(pitched)))
        slope = float(np.log(last_pitched[-3:].mean() / last_pitched[:3].mean()))
    return Prosody(levels_db, drop, slope, run / 100.0, last_pitched.size / _LAST_FRAMES)


def _pitch_hz(voice: Samples) -> NDArray[np.float64]:
    """Pitch of frames of 40 ms, every 10 ms, by autocorrelation; 0 where unpitched."""
    frames = np.lib.stride_tricks.sliding_window_view(voice, _FRAME)[::_HOP]
    centred = frames - frames.mean(axis=1, keepdims=True)
    spectrum = np.fft.rfft(centred, 2 * _FRAME, axis=1)
    correlation = np.fft.irfft(np.abs(spectrum) ** 2, axis=1)[:, : _MAX_LAG + 1]
    energy = correlation[:, 0]
    lags = correlation[:, _MIN_LAG:]
    best = lags.argmax(axis=1)
    strength = lags[np.arange(best.size), best] / np.maximum(energy, 1e-12)
    is_pitched = (strength > _PERIODIC) & (energy > _MIN_POWER * _FRAME)
    pitch: NDArray[np.float64] = np.where(is_pitched, SPEECH_RATE / (best + _MIN_LAG), 0.0)
    return pitch
