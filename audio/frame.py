"""What audio looks like inside: float32 mono samples in [-1, 1]; speech input is at 16 kHz."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float32]

SPEECH_RATE = 16_000
"""Samples per second that the voice activity detector and the recogniser take."""


def silence(num_samples: int) -> Samples:
    """Digital silence [num_samples]."""
    return np.zeros(num_samples, dtype=np.float32)
