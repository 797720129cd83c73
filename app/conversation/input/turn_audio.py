"""The audio of a user turn, together with what the front end has found in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from audio.frame import Samples
from audio.vad import WINDOW_SAMPLES, VadWindows


@dataclass(frozen=True, slots=True)
class TurnAudio:
    """Audio float32 [n] at 16 kHz with its VAD windows, each computed once per turn.

    ``windows``: None where the VAD heard other audio than the recogniser does (noise suppression);
    the recogniser then computes its own.
    ``speech_offset``: sample of the audio at which speech ended; None while the caller speaks.
    """

    samples: Samples
    windows: VadWindows | None
    speech_offset: int | None = None

    @property
    def num_samples(self) -> int:
        """Length of the audio."""
        return self.samples.size

    def followed_by(self, rest: TurnAudio) -> TurnAudio:
        """This audio and ``rest``, which comes directly after it in the same stream."""
        samples = np.concatenate((self.samples, rest.samples))
        if self.windows is None or rest.windows is None:
            return TurnAudio(samples, None)
        # The window in which the one ends and the other begins belongs to both: the later knows it.
        num_whole = (self.windows.lead + self.num_samples) // WINDOW_SAMPLES
        probabilities = (self.windows.probabilities[:num_whole], rest.windows.probabilities)
        windows = VadWindows(np.concatenate(probabilities), self.windows.lead)
        return TurnAudio(samples, windows.fit(samples.size))
