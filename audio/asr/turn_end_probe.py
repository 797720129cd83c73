"""Does it sound finished to the recogniser? A linear rule over its encoder's outputs.

A rule holds for the weights it was fitted to and for no others: it is found by their hash. With any
other model this sign is missing, and `audio.endpointing.semantic` goes by the rest. Fitted to
recordings and to the installed voice by bench/endpointing/curve.py.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from audio.frame import Samples

RULES_DIR = Path(__file__).parent / "turn_end_probes"
"""One file a model, named by the SHA-256 of its weights."""
MAX_SILENCE_S = 0.35
"""Rules are fitted to 60 to 200 ms of silence behind a voice; behind more they doubt any end."""
_WEIGHTS_NAME = "model.bin"


@dataclass(frozen=True, slots=True)
class TurnEndProbe:
    """``weights`` float32 [n] for an ``audio.asr.encoder_tail`` of as many values."""

    bias: float
    weights: Samples

    @classmethod
    def of(cls, model_dir: Path, rules_dir: Path = RULES_DIR) -> TurnEndProbe | None:
        """The rule for a faster-whisper model; None: there is none for it."""
        weights = model_dir / _WEIGHTS_NAME
        size = weights.stat().st_size
        rules = {path.stem: json.loads(path.read_text()) for path in rules_dir.glob("*.json")}
        # Reading all of a large model takes seconds: only for one that could have a rule.
        if all(rule["model_bytes"] != size for rule in rules.values()):
            return None
        with weights.open("rb") as file:
            rule = rules.get(hashlib.file_digest(file, "sha256").hexdigest())
        if rule is None:
            return None
        return cls(float(rule["bias"]), np.array(rule["weights"], np.float32))

    def odds(self, tail: Samples) -> float:
        """Natural log-odds that the voice has ended for good."""
        return self.bias + float(self.weights @ tail)
