"""Less noise around a voice: the suppressor of WebRTC, streaming (package ``pywebrtc-audio``).

A Wiener filter over a noise estimate that follows what is not speech; what browsers use. Its frames
are 10 ms and overlap, so that its output lies 6 ms behind: those are cut off at the beginning, and
output and input have the same positions.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pywebrtc_audio import NoiseSuppressor

from audio.frame import SPEECH_RATE, Samples, silence

Microphone = Literal["near_field", "far_field"]
"""A headset, close to the mouth; or one that hears the room."""

DELAY_SAMPLES = 96
"""Of the filter, at 16 kHz."""
_FRAME = SPEECH_RATE // 100
# Of the library: by at most 6, 12, 18, 21 dB.
_LEVELS: dict[Microphone, int] = {"near_field": 1, "far_field": 2}


class NoiseReducer:
    """One caller's. The last samples, less than 16 ms, stay inside."""

    def __init__(self, microphone: Microphone) -> None:
        self.microphone = microphone
        self._suppressor = NoiseSuppressor(sample_rate=SPEECH_RATE, level=_LEVELS[microphone])
        self._rest = silence(0)
        self._num_to_cut = DELAY_SAMPLES

    def process(self, samples: Samples) -> Samples:
        """Float32 [n] at 16 kHz -> [m]: what is whole by now. Takes about 4 us per 10 ms."""
        pending: Samples = np.concatenate((self._rest, samples))
        end = pending.size // _FRAME * _FRAME
        self._rest = pending[end:].copy()
        if not end:
            return silence(0)
        frames = np.ascontiguousarray(pending[:end])
        reduced: Samples = np.asarray(self._suppressor.process(frames), dtype=np.float32)
        num_cut = min(self._num_to_cut, reduced.size)
        self._num_to_cut -= num_cut
        return reduced[num_cut:]
