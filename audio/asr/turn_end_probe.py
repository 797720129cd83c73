"""Encoder end-of-turn classifier: a linear probe over pooled Whisper encoder outputs.

The encoder has heard the whole utterance, words and intonation, and runs anyway. Its outputs at the
last sounds, and at the padding after them, tell a finished utterance from a pause.

A probe is valid for the model weights that it was fitted to, so probes are looked up by the SHA-256
of the weights. Without one, `audio.endpointing.semantic` does without this feature. Fitted by
bench/endpointing/curve.py to recordings and to the installed TTS voice.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from audio.frame import Samples

PROBES_DIR = Path(__file__).parent / "turn_end_probes"
"""One file a model, named by the SHA-256 of its weights."""
MAX_SILENCE_S = 0.35
"""Probes are fitted to 60 to 200 ms of trailing silence and underestimate the end after more."""
_WEIGHTS_NAME = "model.bin"

_FRAMES_PER_OUTPUT = 2
# Pool boundaries in outputs (20 ms each), relative to the end of the audio.
_POOL_EDGES = (-50, -16, -4, 0)
# The pool over the padding after the audio.
_NUM_PADDING_OUTPUTS = 10


@dataclass(frozen=True, slots=True)
class TurnEndProbe:
    """``weights`` float32 [n] for as many values of `pool_encoder_outputs`."""

    bias: float
    weights: Samples

    @classmethod
    def load(cls, model_dir: Path, probes_dir: Path = PROBES_DIR) -> TurnEndProbe | None:
        """The probe for a faster-whisper model; None when there is none."""
        weights = model_dir / _WEIGHTS_NAME
        size = weights.stat().st_size
        probes = {path.stem: json.loads(path.read_text()) for path in probes_dir.glob("*.json")}
        # Hashing a large model takes seconds: skip it where the size already rules a probe out.
        if all(probe["model_bytes"] != size for probe in probes.values()):
            return None
        with weights.open("rb") as file:
            probe = probes.get(hashlib.file_digest(file, "sha256").hexdigest())
        if probe is None:
            return None
        return cls(float(probe["bias"]), np.array(probe["weights"], np.float32))

    def logit(self, pooled: Samples) -> float:
        """Natural log-odds that the turn is over."""
        return self.bias + float(self.weights @ pooled)


def pool_encoder_outputs(outputs: Samples, num_frames: int) -> Samples:
    """Mean encoder outputs around the end of the audio: float32 [4 * width], earliest pool first.

    ``outputs`` float32 [n, width], of which the first ``num_frames`` / 2 belong to audio.
    """
    end = num_frames // _FRAMES_PER_OUTPUT
    pools = [(end + a, end + b) for a, b in pairwise(_POOL_EDGES)]
    pools.append((end, end + _NUM_PADDING_OUTPUTS))
    return np.concatenate([_mean(outputs, first, last) for first, last in pools])


def _mean(outputs: Samples, first: int, last: int) -> Samples:
    """Mean over [first, last) clipped to the outputs; the nearest output for an empty range."""
    first = min(max(first, 0), len(outputs) - 1)
    mean: Samples = outputs[first : max(last, first + 1)].mean(axis=0, dtype=np.float32)
    return mean
