"""Figures of a benchmark: percentiles, word errors, CPU time of a process and its children."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

from audio.normalize import normalize

_CLOCK_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def percentiles(values: Sequence[float], at: Sequence[int] = (50, 95, 99)) -> dict[str, float]:
    """``{"p50": ..., "n": ...}`` by the nearest rank; of nothing only ``n`` 0."""
    ordered = sorted(values)
    found: dict[str, float] = {
        f"p{p}": round(ordered[max(0, math.ceil(len(ordered) * p / 100) - 1)], 1)
        for p in at
        if ordered
    }
    return found | {"n": len(ordered)}


def word_errors(reference: str, heard: str) -> tuple[int, int]:
    """Wrong, missing and surplus words of ``heard``, and the number of words said.

    Numbers are compared as they are spoken, case and punctuation not at all.
    """
    said, got = _words(reference), _words(heard)
    costs = list(range(len(got) + 1))
    for i, word in enumerate(said, 1):
        diagonal, costs[0] = costs[0], i
        for j, other in enumerate(got, 1):
            best = min(costs[j] + 1, costs[j - 1] + 1, diagonal + (word != other))
            diagonal, costs[j] = costs[j], best
    return costs[-1], len(said)


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+(?:'[^\W_]+)*", normalize(text).lower().replace("-", " "))


def cpu_seconds(pid: int) -> float | None:
    """CPU time of a process and its living descendants; None where /proc does not tell."""
    try:
        # The name in parentheses may hold anything; the fields behind it are numbers.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:
        return None
    own = (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS
    return own + sum(cpu_seconds(child) or 0.0 for child in children)
