"""Streaming noise suppression with WebRTC's suppressor (package ``pywebrtc-audio``).

A Wiener filter over an estimate of the background noise. Its overlapping frames of 10 ms delay the
output by 6 ms; these are cut off at the beginning, so that output and input positions are equal.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pywebrtc_audio import NoiseSuppressor

from audio.frame import SPEECH_RATE, Samples, silence

Microphone = Literal["near_field", "far_field"]
"""OpenAI's noise reduction types: a headset, or a distant microphone."""

DELAY_SAMPLES = 96
"""Delay of the filter at 16 kHz."""
_FRAME = SPEECH_RATE // 100
# The library's levels 0 to 3 suppress by at most 6, 12, 18, 21 dB.
_LEVELS: dict[Microphone, int] = {"near_field": 1, "far_field": 2}


class NoiseReducer:
    """Noise suppressor of one caller; holds back less than 16 ms."""

    def __init__(self, microphone: Microphone) -> None:
        self.microphone = microphone
        self._suppressor = NoiseSuppressor(sample_rate=SPEECH_RATE, level=_LEVELS[microphone])
        self._rest = silence(0)
        self._num_to_cut = DELAY_SAMPLES

    def process(self, samples: Samples) -> Samples:
        """Float32 [n] at 16 kHz -> [m], the completed frames. Takes about 4 us per 10 ms."""
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
