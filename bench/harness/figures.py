"""Figures of a benchmark: percentiles, word errors, CPU time of a process and its children."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from audio.text.normalize.english import normalize

_CLOCK_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
# What an answer waited for, of the stages of a trace (``app.observe.trace.STAGES``).
PARTS = {
    "end_of_turn": ("endpoint",),
    "words": ("asr",),
    "model": ("queue", "prefill", "decode"),
    "voice": ("tts",),
    "transport": ("send",),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer in its trace: its voice-to-voice time, and the parts that add up to it."""

    v2v_ms: float
    stages_ms: Mapping[str, float]


def percentiles(values: Sequence[float], at: Sequence[int] = (50, 95, 99)) -> dict[str, float]:
    """``{"p50": ..., "n": ...}`` by the nearest rank; of nothing only ``n`` 0."""
    ordered = sorted(values)
    found: dict[str, float] = {
        f"p{p}": round(ordered[_nearest_rank(len(ordered), p)], 1) for p in at if ordered
    }
    return found | {"n": len(ordered)}


def _nearest_rank(count: int, percent: int) -> int:
    return max(0, math.ceil(count * percent / 100) - 1)


def stage_medians(answers: Sequence[Answer]) -> dict[str, float]:
    """The median of every stage that an answer tells of."""
    stages = dict.fromkeys(stage for answer in answers for stage in answer.stages_ms)
    return {
        stage: median(a.stages_ms[stage] for a in answers if stage in a.stages_ms)
        for stage in stages
    }


def waited_for(answers: Sequence[Answer]) -> dict[str, dict[str, float]]:
    """Of each of ``PARTS`` p50, p95, and ``p95_answer``: how long the answer waited for it whose
    voice-to-voice time is the 95th percentile. That column adds up to it; those of percentiles do
    not add up to anything. Empty where no answer has stages.
    """
    told = sorted((a for a in answers if a.stages_ms), key=lambda answer: answer.v2v_ms)
    if not told:
        return {}
    slow = told[_nearest_rank(len(told), 95)]
    return {
        part: percentiles([_part_ms(answer, stages) for answer in told], (50, 95))
        | {"p95_answer": round(_part_ms(slow, stages), 1)}
        for part, stages in PARTS.items()
    }


def _part_ms(answer: Answer, stages: Sequence[str]) -> float:
    return sum(answer.stages_ms.get(stage, 0.0) for stage in stages)


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
