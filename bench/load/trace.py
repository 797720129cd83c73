"""Arrivals of real requests: when each one came, how long its prompt and its answer were."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from app.errors import ParleyError

_COLUMNS = ("t_s", "context_tokens", "generated_tokens")
_MAX_TOKENS = 10_000_000


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of the trace: ``at_s`` since its beginning."""

    at_s: float
    context_tokens: int
    generated_tokens: int


def read_arrivals(path: Path, split: str = "") -> list[Arrival]:
    """A CSV file with the columns t_s, context_tokens and generated_tokens, in order of time.

    ``split``: only the lines that have this in their column ``split``. Raises ParleyError naming
    the line that is wrong.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise ParleyError(f"{path} has no column {missing[0]!r}; needed: {_COLUMNS}")
            arrivals = [
                _arrival(row, path, reader.line_num)
                for row in reader
                if not split or row.get("split") in (None, split)
            ]
    except OSError as error:
        raise ParleyError(f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ParleyError(f"{path} is no CSV file in UTF-8: {error}") from error
    if len(arrivals) < 2:
        raise ParleyError(f"{path} has {len(arrivals)} arrivals{f' of {split!r}' * bool(split)}")
    if any(later.at_s < sooner.at_s for sooner, later in zip(arrivals, arrivals[1:], strict=False)):
        raise ParleyError(f"{path} is not in order of time")
    return arrivals


def _arrival(row: dict[str, str], path: Path, line: int) -> Arrival:
    try:
        at, context, generated = (row[name] for name in _COLUMNS)
        found = Arrival(float(at), int(context), int(generated))
    except (TypeError, ValueError) as error:
        raise ParleyError(f"{path}:{line}: {error}") from error
    is_sane = math.isfinite(found.at_s) and all(
        0 <= tokens <= _MAX_TOKENS for tokens in (found.context_tokens, found.generated_tokens)
    )
    if not is_sane:
        raise ParleyError(f"{path}:{line}: a time or a number of tokens is out of range")
    return found


def piece(arrivals: Sequence[Arrival], skip: int, count: int) -> list[Arrival]:
    """``count`` arrivals behind the first ``skip``. Raises ParleyError when there are fewer."""
    found = list(arrivals[skip : skip + count])
    if len(found) < count:
        raise ParleyError(
            f"the trace has {len(arrivals)} arrivals: {count} behind the first {skip} are too many"
        )
    return found


def at_rate(arrivals: Sequence[Arrival], rate_per_s: float) -> list[Arrival]:
    """The same arrivals with time stretched, so that ``rate_per_s`` come on average.

    Bursts stay bursts. The first one comes at 0.
    """
    begin_s = arrivals[0].at_s
    span_s = arrivals[-1].at_s - begin_s
    stretch = (len(arrivals) - 1) / rate_per_s / span_s if span_s > 0 else 0.0
    return [replace(arrival, at_s=(arrival.at_s - begin_s) * stretch) for arrival in arrivals]


def scaled(arrivals: Sequence[Arrival], scale: float, max_tokens: int) -> list[Arrival]:
    """Prompts and answers ``scale`` times as long, the two together ``max_tokens`` at most.

    An answer has two tokens at least, so that there is a time between tokens.
    """
    found = []
    for arrival in arrivals:
        generated = min(max(2, round(arrival.generated_tokens * scale)), max_tokens // 2)
        context = min(max(1, round(arrival.context_tokens * scale)), max_tokens - generated)
        found.append(replace(arrival, context_tokens=context, generated_tokens=generated))
    return found
