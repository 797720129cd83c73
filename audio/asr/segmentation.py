"""Segmentation of audio for the recogniser: silence trimmed at the ends, cuts at pauses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from audio.frame import SPEECH_RATE, Samples
from audio.vad import WINDOW_SAMPLES, VadWindows

_VOICED_FROM = 0.5
_MARGIN_S = 1.0
# Lower than _VOICED_FROM: trimming must not lose quiet speech.
_TRIM_BELOW = 0.35
_SMOOTH_WINDOWS = 5
_DB_PER_PROBABILITY = 25.0


@dataclass(frozen=True, slots=True)
class AudioSegment:
    """Audio float32 [n] at 16 kHz with its VAD windows.

    ``start_sample``: position in the recording that it was cut from.
    """

    samples: Samples
    windows: VadWindows
    start_sample: int = 0

    @property
    def num_samples(self) -> int:
        """Length of the audio."""
        return self.samples.size

    @property
    def duration_s(self) -> float:
        """Length of the audio in seconds."""
        return self.samples.size / SPEECH_RATE

    @property
    def trailing_silence_s(self) -> float:
        """Silence at the end in seconds; the whole duration without speech."""
        voiced = np.flatnonzero(self.windows.probabilities >= _VOICED_FROM)
        voice_end = self.windows.start_of(int(voiced[-1]) + 1) if voiced.size else 0
        return max(0, self.samples.size - voice_end) / SPEECH_RATE

    def cut(self, start_window: int, end_window: int) -> AudioSegment:
        """The windows [start, end) and their audio."""
        start, end = self.windows.start_of(start_window), self.windows.start_of(end_window)
        return AudioSegment(
            self.samples[start:end],
            self.windows.cut(start_window, end_window),
            self.start_sample + start,
        )

    def trimmed(self) -> AudioSegment:
        """Without silence at the ends, except for a margin of 1 s; empty without speech."""
        voiced = np.flatnonzero(self.windows.probabilities >= _TRIM_BELOW)
        if voiced.size == 0:
            return self.cut(0, 0)
        margin = int(_MARGIN_S * SPEECH_RATE / WINDOW_SAMPLES)
        return self.cut(max(0, int(voiced[0]) - margin), int(voiced[-1]) + 1 + margin)

    def split_in_half(self) -> tuple[AudioSegment, AudioSegment]:
        """Two segments, cut at the deepest pause of the middle half."""
        num_windows = self.windows.num_windows
        at = self._deepest_pause(num_windows // 4, num_windows - num_windows // 4)
        return self.cut(0, at), self.cut(at, num_windows)

    def split_at_pauses(self, max_s: float) -> list[AudioSegment]:
        """Consecutive segments of at most ``max_s`` seconds, cut at pauses.

        Each cut lies in the last third of the allowed length, so that segments do not get short.
        """
        max_windows = max(1, int(max_s * SPEECH_RATE) // WINDOW_SAMPLES)
        segments: list[AudioSegment] = []
        rest = self
        while rest.windows.num_windows > max_windows:
            at = rest._deepest_pause(max(1, max_windows * 2 // 3), max_windows)
            segments.append(rest.cut(0, at))
            rest = rest.cut(at, rest.windows.num_windows)
        return [*segments, rest]

    def _deepest_pause(self, first: int, last: int) -> int:
        """Window in [first, last] in the middle of the deepest pause of about 0.15 s.

        A VAD probability of 1 weighs as much as 25 dB of level.
        """
        lead, num_windows = self.windows.lead, self.windows.num_windows
        padded = np.zeros(num_windows * WINDOW_SAMPLES, dtype=np.float32)
        padded[lead : lead + self.samples.size] = self.samples
        power = np.square(padded.reshape(-1, WINDOW_SAMPLES)).mean(axis=1)
        level_db = 10 * np.log10(power + 1e-10)
        cost = self.windows.probabilities + level_db / _DB_PER_PROBABILITY
        smooth = np.convolve(cost, np.full(_SMOOTH_WINDOWS, 1 / _SMOOTH_WINDOWS), mode="same")
        return first + int(np.argmin(smooth[first : last + 1]))
