"""What Whisper's encoder makes of the end of a piece of audio: the sound of a turn that is over.

The encoder has heard all of the audio, its melody and its words, and it is run in any case. Its
outputs at the last sounds, and at the silence that is made up behind them, tell a voice that has
ended from one that has stopped for a moment; `audio.endpointing.semantic` reads them by a linear
rule.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from audio.frame import Samples

_FRAMES_PER_OUTPUT = 2
# Outputs (20 ms each) counted from the end of the audio; what lies behind it is made-up silence.
_EDGES = (-50, -16, -4, 0)
_BEHIND = 10


def tail_of(outputs: Samples, num_frames: int) -> Samples:
    """Means of the encoder's ``outputs`` float32 [n, width] around the end of the audio, of which
    ``num_frames`` of 10 ms are real: float32 [4 * width], the oldest part first."""
    end = num_frames // _FRAMES_PER_OUTPUT
    spans = [(end + a, end + b) for a, b in pairwise(_EDGES)] + [(end, end + _BEHIND)]
    return np.concatenate([_mean(outputs, first, last) for first, last in spans])


def _mean(outputs: Samples, first: int, last: int) -> Samples:
    """Of what there is of [first, last); the nearest output where there is nothing."""
    first = min(max(first, 0), len(outputs) - 1)
    mean: Samples = outputs[first : max(last, first + 1)].mean(axis=0, dtype=np.float32)
    return mean
