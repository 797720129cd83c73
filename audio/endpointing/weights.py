"""Weights of the end-of-turn regression (logistic, both classes of equal weight).

``weights.json`` holds the values; bench/endpointing/curve.py fits them to the pauses that
bench/endpointing/events.py collects.
"""

from __future__ import annotations

import json
from pathlib import Path

KnownFeatures = tuple[bool, bool, bool, bool]
"""Which optional features are known: language model, punctuation, encoder probe, smart-turn."""


def _load() -> dict[KnownFeatures, tuple[float, tuple[float, ...]]]:
    rows = json.loads(Path(__file__).with_suffix(".json").read_text())
    return {_parse(digits): (bias, tuple(weights)) for digits, (bias, *weights) in rows.items()}


def _parse(digits: str) -> KnownFeatures:
    logprob, punctuation, probe, smart_turn = (digit == "1" for digit in digits)
    return logprob, punctuation, probe, smart_turn


WEIGHTS = _load()
"""Bias, and weights in the order of `audio.endpointing.semantic.end_of_turn_probability`."""
