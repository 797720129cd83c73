"""Where to cut a recording for the recogniser: away from silence at its ends, inside at pauses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from audio.frame import SPEECH_RATE, Samples
from audio.vad import WINDOW_SAMPLES

_CLEAR_VOICE = 0.5
_MARGIN_S = 1.0
_MIN_VOICE = 0.35
_SMOOTH_WINDOWS = 5
_DB_PER_CLEAR_VOICE = 25.0


@dataclass(frozen=True, slots=True)
class AudioSegment:
    """Audio float32 [n] at 16 kHz with its voice probabilities float32 [ceil(n / 512)].

    ``start_sample``: where it lies in the recording that it was cut from.
    """

    samples: Samples
    probabilities: Samples
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
    def silence_behind_s(self) -> float:
        """Length of the silence at the end in seconds; all of it without voice."""
        voiced = np.flatnonzero(self.probabilities >= _CLEAR_VOICE)
        last = int(voiced[-1]) + 1 if voiced.size else 0
        return max(0, self.samples.size - last * WINDOW_SAMPLES) / SPEECH_RATE

    def cut(self, start_window: int, end_window: int) -> AudioSegment:
        """The part [start, end) in windows."""
        return AudioSegment(
            self.samples[start_window * WINDOW_SAMPLES : end_window * WINDOW_SAMPLES],
            self.probabilities[start_window:end_window],
            self.start_sample + start_window * WINDOW_SAMPLES,
        )

    def trimmed(self) -> AudioSegment:
        """Without the silence at its ends, but for a margin of a second; empty without voice."""
        voiced = np.flatnonzero(self.probabilities >= _MIN_VOICE)
        if voiced.size == 0:
            return self.cut(0, 0)
        margin = int(_MARGIN_S * SPEECH_RATE / WINDOW_SAMPLES)
        return self.cut(max(0, int(voiced[0]) - margin), int(voiced[-1]) + 1 + margin)

    def halves(self) -> tuple[AudioSegment, AudioSegment]:
        """Two pieces, cut at the quietest place between the first and the last quarter."""
        num_windows = self.probabilities.size
        at = self._quietest(num_windows // 4, num_windows - num_windows // 4)
        return self.cut(0, at), self.cut(at, num_windows)

    def parts(self, max_s: float) -> list[AudioSegment]:
        """Consecutive pieces of at most ``max_s`` seconds, cut at pauses.

        A cut falls into the last third of what is allowed, so that pieces are not too short.
        """
        max_windows = max(1, int(max_s * SPEECH_RATE) // WINDOW_SAMPLES)
        pieces: list[AudioSegment] = []
        rest = self
        while rest.probabilities.size > max_windows:
            at = rest._quietest(max(1, max_windows * 2 // 3), max_windows)
            pieces.append(rest.cut(0, at))
            rest = rest.cut(at, rest.probabilities.size)
        return [*pieces, rest]

    def _quietest(self, first: int, last: int) -> int:
        """Window in [first, last] at whose middle a pause of about 0.15 s is deepest.

        A clear voice (probability 1 against 0) counts as much as 25 dB of loudness.
        """
        padded = np.zeros(self.probabilities.size * WINDOW_SAMPLES, dtype=np.float32)
        padded[: self.samples.size] = self.samples
        power = np.square(padded.reshape(-1, WINDOW_SAMPLES)).mean(axis=1)
        loudness_db = 10 * np.log10(power + 1e-10)
        cost = self.probabilities + loudness_db / _DB_PER_CLEAR_VOICE
        smooth = np.convolve(cost, np.full(_SMOOTH_WINDOWS, 1 / _SMOOTH_WINDOWS), mode="same")
        return first + int(np.argmin(smooth[first : last + 1]))
