"""Streaming post-processing of a synthesized sentence.

Trims leading silence, sets the pause after the sentence, fades both ends and applies the voice's
gain. One gain per voice: on en_US-joe-medium the loudness of clauses lies within 2.5 dB of the
mean, and a gain per clause would need the whole clause.

    raw   silence | lead, faded in | speech, passed on as it comes | silence | pause, faded out
"""

from __future__ import annotations

import numpy as np

from audio.frame import Samples

LEAD_MS = 8
_FADE_MS = 3
_WINDOW_MS = 2
_SILENCE_RMS = 0.004  # at the level of the voice: some 35 dB below its loudest sounds
_TARGET_RMS = 0.085  # -21 dBFS while there is voice
_VOICED_RATIO = 0.1  # of the loudest window: windows above it count for the level
_MIN_GAIN, _MAX_GAIN = 0.5, 3.0
# Peaks above the knee are compressed instead of clipped.
_KNEE, _PEAK = 0.8, 0.95


def gain_for(raw: Samples, rate_hz: int) -> float:
    """Gain that brings a voice like ``raw`` float32 [n] to the target level."""
    rms = _levels(raw, max(1, rate_hz * _WINDOW_MS // 1000))
    loudest = float(rms.max()) if len(rms) else 0.0
    if not loudest:
        return 1.0
    level = float(np.sqrt(np.square(rms[rms > loudest * _VOICED_RATIO]).mean()))
    return min(max(_TARGET_RMS / level, _MIN_GAIN), _MAX_GAIN)


class SpeechPostprocessor:
    """One sentence: ``process`` its chunks, then ``flush``; joined, they are the finished audio."""

    def __init__(self, rate_hz: int, gain: float, trailing_ms: float) -> None:
        self._gain = gain
        self._window = max(1, rate_hz * _WINDOW_MS // 1000)
        self._num_lead = rate_hz * LEAD_MS // 1000
        self._num_fade = rate_hz * _FADE_MS // 1000
        self._num_trailing = round(rate_hz * trailing_ms / 1000)
        self._waiting: Samples = np.zeros(0, np.float32)  # not passed on yet
        self._num_voiced = 0  # of them, up to the end of the last sound
        self._num_judged = 0  # of them
        self._has_begun = False

    def process(self, raw: Samples) -> Samples:
        """Process network output float32 [n]; returns the samples that can be played now."""
        self._waiting = np.concatenate((self._waiting, self._levelled(raw)))
        fresh = self._waiting[self._num_judged :]
        voiced = np.flatnonzero(_levels(fresh, self._window) > _SILENCE_RMS)
        judged = len(fresh) // self._window * self._window
        if len(voiced):
            if not self._has_begun:
                self._begin(self._num_judged + int(voiced[0]) * self._window)
                return self.process(raw[:0])
            self._num_voiced = self._num_judged + (int(voiced[-1]) + 1) * self._window
        self._num_judged += judged
        if not self._has_begun:
            return self._waiting[:0]
        # The end of the last sound is held back: it is faded out if it is the end of the sentence.
        return self._pass_on(max(0, self._num_voiced - self._num_fade))

    def flush(self) -> Samples:
        """The end of the sentence and the pause after it; empty when there was no sound."""
        if not self._has_begun:
            return self._waiting[:0]
        tail = self._waiting[: self._num_voiced + self._num_trailing]
        num_missing = self._num_voiced + self._num_trailing - len(tail)
        self._fade(tail, slice(None, None, -1))
        self._waiting = self._waiting[:0]
        return np.concatenate((tail, np.zeros(num_missing, np.float32)))

    def _begin(self, first_voiced: int) -> None:
        start = max(0, first_voiced - self._num_lead)
        self._waiting = self._waiting[start:]
        self._num_judged = 0
        self._has_begun = True
        self._fade(self._waiting, slice(None))

    def _pass_on(self, num_samples: int) -> Samples:
        ready, self._waiting = self._waiting[:num_samples], self._waiting[num_samples:]
        self._num_voiced -= num_samples
        self._num_judged -= num_samples
        return ready

    def _levelled(self, raw: Samples) -> Samples:
        samples = np.nan_to_num(raw, nan=0.0, posinf=0.0, neginf=0.0) * np.float32(self._gain)
        size = np.abs(samples)
        if len(size) and float(size.max()) > _KNEE:
            room = _PEAK - _KNEE
            bent = np.sign(samples) * (_KNEE + room * np.tanh((size - _KNEE) / room))
            samples = np.where(size > _KNEE, bent, samples)
        return samples.astype(np.float32)

    def _fade(self, samples: Samples, order: slice) -> None:
        """Fade in, or out with a reversed ``order``, in place."""
        num_fade = min(self._num_fade, len(samples) // 2)
        view = samples[order][:num_fade]
        view *= np.linspace(0.0, 1.0, num_fade, dtype=np.float32)


def _levels(samples: Samples, window: int) -> Samples:
    whole = samples[: len(samples) // window * window].reshape(-1, window)
    levels: Samples = np.sqrt(np.square(whole).mean(axis=1)) if len(whole) else whole.reshape(-1)
    return levels
