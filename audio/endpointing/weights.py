"""What each sign counts for the end of a turn: logistic regression, both classes of equal weight.

The figures lie in the file beside this one; bench/endpointing/curve.py makes them from the pauses
of bench/endpointing/events.py.
"""

from __future__ import annotations

import json
from pathlib import Path

Known = tuple[bool, bool, bool, bool]
"""What is known beside words and melody: the language model's answer, the recogniser's marks, the
odds by its encoder, the turn model's answer."""


def _read() -> dict[Known, tuple[float, tuple[float, ...]]]:
    rows = json.loads(Path(__file__).with_suffix(".json").read_text())
    return {_known(digits): (bias, tuple(weights)) for digits, (bias, *weights) in rows.items()}


def _known(digits: str) -> Known:
    model, marks, odds, heard = (digit == "1" for digit in digits)
    return model, marks, odds, heard


WEIGHTS = _read()
"""The bias, and the weights in the order of `audio.endpointing.semantic.score`."""
