"""Figures of benchmarks: percentiles, latency by stage, word errors, CPU time of processes."""

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
# Causes of latency, each with its stages of a trace (``app.observe.trace.STAGES``).
PARTS = {
    "end_of_turn": ("endpoint",),
    "words": ("asr",),
    "model": ("queue", "prefill", "decode"),
    "voice": ("tts",),
    "transport": ("send",),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """Voice-to-voice latency of one answer, and the stages of its trace, which add up to it."""

    v2v_ms: float
    stages_ms: Mapping[str, float]


def percentiles(values: Sequence[float], at: Sequence[int] = (50, 95, 99)) -> dict[str, float]:
    """``{"p50": ..., "n": ...}`` by the nearest rank; only ``n`` 0 where there are no values."""
    ordered = sorted(values)
    found: dict[str, float] = {
        f"p{p}": round(ordered[_nearest_rank(len(ordered), p)], 1) for p in at if ordered
    }
    return found | {"n": len(ordered)}


def _nearest_rank(count: int, percent: int) -> int:
    return max(0, math.ceil(count * percent / 100) - 1)


def stage_medians(answers: Sequence[Answer]) -> dict[str, float]:
    """Median of every stage over the answers that have it."""
    stages = dict.fromkeys(stage for answer in answers for stage in answer.stages_ms)
    return {
        stage: median(a.stages_ms[stage] for a in answers if stage in a.stages_ms)
        for stage in stages
    }


def waited_for(answers: Sequence[Answer]) -> dict[str, dict[str, float]]:
    """p50 and p95 of each of ``PARTS``, and ``p95_answer``: its share in the one answer whose
    voice-to-voice latency is the 95th percentile, so that this column adds up to that latency.
    Empty where no answer has stages.
    """
    known = sorted((a for a in answers if a.stages_ms), key=lambda answer: answer.v2v_ms)
    if not known:
        return {}
    slow = known[_nearest_rank(len(known), 95)]
    return {
        part: percentiles([_part_ms(answer, stages) for answer in known], (50, 95))
        | {"p95_answer": round(_part_ms(slow, stages), 1)}
        for part, stages in PARTS.items()
    }


def _part_ms(answer: Answer, stages: Sequence[str]) -> float:
    return sum(answer.stages_ms.get(stage, 0.0) for stage in stages)


def word_errors(reference: str, heard: str) -> tuple[int, int]:
    """(substituted, missing and inserted words of ``heard``, number of words in ``reference``).

    Numbers are compared as words; case and punctuation are ignored.
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
    """CPU time of a process and its running descendants; None where /proc does not have it."""
    try:
        # The name in parentheses may hold any character; the fields after it are numbers.
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
