"""Audio inside the project: float32 mono samples in [-1, 1]; speech input at 16 kHz."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float32]

SPEECH_RATE = 16_000
"""Sample rate in Hz of the VAD and the recogniser."""


def silence(num_samples: int) -> Samples:
    """Digital silence [num_samples]."""
    return np.zeros(num_samples, dtype=np.float32)
