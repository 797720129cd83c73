"""Questions to the trace database: which turns, which conversations, and how long things took."""

from __future__ import annotations

import math
import re
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, tzinfo
from typing import Any, NamedTuple, cast

import msgspec

from app.errors import ClientError
from app.observe.store import TraceStore, Turn
from app.observe.trace import STAGE_NAMES

PERCENTILES = (50, 95, 99)
# Statistics are made of the newest turns up to here; the answer says when there were more.
MAX_COUNTED = 200_000
NUM_SLOWEST = 20
_AGE = re.compile(r"([0-9]{1,6})([mhd])")
_UNITS_S = {"m": 60, "h": 3600, "d": 86_400}
_MAX_UNIX_S = 1e11
_MAX_BUCKETS = 60
# That somebody may ask for.
MAX_CHOSEN_BUCKETS = 1000
_NUM_KNOWN = 16
_BUCKETS_S = (60, 300, 900, 3600, 4 * 3600, 86_400, 7 * 86_400)


@dataclass(frozen=True, slots=True)
class TraceFilter:
    """Which turns; None and empty: all. Times are Unix milliseconds, [since, until)."""

    session_id: str | None = None
    outcomes: tuple[str, ...] = ()
    min_voice_to_voice_ms: float | None = None
    since_ms: int | None = None
    until_ms: int | None = None
    over_budget: bool = False
    engine: str | None = None

    def where(self, before_seq: int | None = None) -> tuple[str, list[Any]]:
        """A WHERE clause and its values."""
        terms: list[str] = []
        values: list[Any] = []
        for term, value in (
            ("session_id = ?", self.session_id),
            ("voice_to_voice_ms >= ?", self.min_voice_to_voice_ms),
            ("ended_at_ms >= ?", self.since_ms),
            ("ended_at_ms < ?", self.until_ms),
            ("engine = ?", self.engine),
            ("seq < ?", before_seq),
        ):
            if value is not None:
                terms.append(term)
                values.append(value)
        if self.outcomes:
            terms.append(f"outcome IN ({', '.join('?' * len(self.outcomes))})")
            values += self.outcomes
        if self.over_budget:
            terms.append("over_budget = 1")
        return (f"WHERE {' AND '.join(terms)}" if terms else ""), values


def period_ms(
    since: str | None,
    until: str | None,
    params: tuple[str, str] = ("since", "until"),
    zone: tzinfo | None = UTC,
) -> tuple[int | None, int | None]:
    """Both ends of a period as ``instant_ms`` reads them. Raises ClientError when it is empty."""
    since_ms, until_ms = instant_ms(since, params[0], zone), instant_ms(until, params[1], zone)
    if since_ms is not None and until_ms is not None and until_ms <= since_ms:
        raise ClientError(
            f"Invalid value for '{params[1]}': it must be later than '{params[0]}'.",
            code="invalid_value",
            param=params[1],
        )
    return since_ms, until_ms


def instant_ms(text: str | None, param: str, zone: tzinfo | None = UTC) -> int | None:
    """Unix milliseconds from Unix seconds, ISO 8601, or an age.

    A time that does not say its zone is one of ``zone``; None: that of this machine. An age is a
    number with m, h or d: "24h" is a day ago. Raises ClientError naming ``param``.
    """
    if text is None:
        return None
    if age := _AGE.fullmatch(text):
        return int((time.time() - float(age[1]) * _UNITS_S[age[2]]) * 1000)
    try:
        seconds = float(text)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text)
            seconds = (moment if moment.tzinfo else moment.replace(tzinfo=zone)).timestamp()
        except (ValueError, OverflowError) as error:  # the latter: a year that local time lacks
            raise _bad_time(text, param) from error
    if not math.isfinite(seconds) or abs(seconds) > _MAX_UNIX_S:
        raise _bad_time(text, param)
    return int(seconds * 1000)


def _bad_time(text: str, param: str) -> ClientError:
    return ClientError(
        f"Invalid value for '{param}': expected Unix seconds, an ISO 8601 time like "
        f"2026-01-31T12:00:00Z, or an age like 30m, 24h or 7d, got {text!r}.",
        code="invalid_value",
        param=param,
    )


@dataclass(frozen=True, slots=True)
class Page:
    """Turns, newest first; ``next_cursor`` None: there are no more."""

    turns: list[Turn]
    next_cursor: int | None


class TraceQuery:
    """Reads a ``TraceStore``. Blocking: not for the event loop."""

    def __init__(self, store: TraceStore) -> None:
        self._store = store
        # Answers to the last questions, good as long as there are the same turns.
        self._known: OrderedDict[Hashable, dict[str, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def page(self, chosen: TraceFilter, limit: int, cursor: int | None = None) -> Page:
        """A page of the turns, behind the one that ``cursor`` names."""
        where, values = chosen.where(cursor)
        sql = f"SELECT seq, record FROM turns {where} ORDER BY seq DESC LIMIT ?"
        with self._store.reading() as db:
            rows = db.execute(sql, (*values, limit + 1)).fetchall()
        turns = [msgspec.json.decode(record) for _, record in rows[:limit]]
        return Page(turns, rows[limit - 1][0] if len(rows) > limit else None)

    def get(self, turn_id: str) -> Turn | None:
        """One turn."""
        with self._store.reading() as db:
            found = db.execute("SELECT record FROM turns WHERE turn_id = ?", (turn_id,)).fetchone()
        return None if found is None else msgspec.json.decode(found[0])

    def conversations(self, chosen: TraceFilter, limit: int) -> list[dict[str, Any]]:
        """Conversations with their turns counted, the latest first."""
        where, values = chosen.where()
        with self._store.reading() as db:
            # Only the latest are counted: what came before is not read at all.
            latest: dict[str, None] = {}
            newest = db.execute(f"SELECT session_id FROM turns {where} ORDER BY seq DESC", values)
            for (session_id,) in newest:
                latest[session_id] = None
                if len(latest) == limit:
                    break
            return _counted(db, chosen, list(latest))

    def stats(
        self,
        chosen: TraceFilter,
        *,
        bucket_s: int | None = None,
        compare_with: TraceFilter | None = None,
    ) -> dict[str, Any]:
        """Percentiles over the whole period and over time, and the slowest turns with their cause.

        ``bucket_s`` None: chosen so that there are at most 60. The cause of a slow turn is the
        stage that took most above its own median: the longest stage is nearly always the wait for
        the end of the turn, and nearly never what went wrong. The answer is not to be changed: it
        is given again while there are no new turns. Raises ClientError when ``bucket_s`` makes more
        than ``MAX_CHOSEN_BUCKETS``.
        """
        with self._store.reading() as db:
            key = (_version(db), chosen, bucket_s, compare_with)
            with self._lock:
                if key in self._known:
                    self._known.move_to_end(key)
                    return self._known[key]
            rows = _rows(db, chosen)
            others = None if compare_with is None else _rows(db, compare_with)
        summary = summarize(rows)
        found = {
            "object": "trace.stats",
            "summary": summary,
            "is_truncated": len(rows) == MAX_COUNTED,
            **_over_time(rows, bucket_s),
            "slowest": _slowest(rows, summary),
            "compared_with": None if others is None else summarize(others),
        }
        with self._lock:
            self._known[key] = found
            while len(self._known) > _NUM_KNOWN:
                self._known.popitem(last=False)
        return found


def _version(db: sqlite3.Connection) -> tuple[int, ...]:
    """Another one whenever turns have come or gone: a number is never used twice."""
    sql = "SELECT COUNT(*), IFNULL(MIN(seq), 0), IFNULL(MAX(seq), 0) FROM turns"
    return tuple(db.execute(sql).fetchone())


def _counted(
    db: sqlite3.Connection, chosen: TraceFilter, session_ids: list[str]
) -> list[dict[str, Any]]:
    """These conversations, the latest first."""
    where, values = chosen.where()
    where += " AND " if where else "WHERE "
    where += f"session_id IN ({', '.join('?' * len(session_ids))})"
    sql = f"""
        SELECT session_id, COUNT(*) AS turns, MIN(ended_at_ms) AS first_ended_at_ms,
               MAX(ended_at_ms) AS last_ended_at_ms,
               AVG(voice_to_voice_ms) AS mean_voice_to_voice_ms,
               MAX(voice_to_voice_ms) AS max_voice_to_voice_ms,
               SUM(outcome IN ('failed', 'timed_out')) AS failed,
               SUM(over_budget) AS over_budget
        FROM turns {where} GROUP BY session_id ORDER BY MAX(seq) DESC"""
    cursor = db.execute(sql, (*values, *session_ids))
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]


class _Row(NamedTuple):
    """The figures of a turn; a tuple, for there are thousands of them in one answer."""

    turn_id: str
    session_id: str
    ended_at_ms: int
    outcome: str
    voice_to_voice_ms: float | None
    over_budget: int
    endpoint_ms: float | None
    asr_ms: float | None
    queue_ms: float | None
    prefill_ms: float | None
    decode_ms: float | None
    tts_ms: float | None
    send_ms: float | None

    @property
    def stages_ms(self) -> tuple[float | None, ...]:
        """In the order of ``STAGE_NAMES``."""
        return cast(tuple[float | None, ...], self[_NUM_FIELDS:])


_NUM_FIELDS = 6
assert _Row._fields[_NUM_FIELDS:] == tuple(f"{stage}_ms" for stage in STAGE_NAMES)


def _rows(db: sqlite3.Connection, chosen: TraceFilter) -> list[_Row]:
    where, values = chosen.where()
    columns = ", ".join(_Row._fields)
    sql = f"SELECT {columns} FROM turns {where} ORDER BY seq DESC LIMIT ?"
    return [*map(_Row._make, db.execute(sql, (*values, MAX_COUNTED)))]


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of values in ascending order, between neighbours linearly (as NumPy does by default)."""
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _spread(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    values.sort()
    return {f"p{p}": percentile(values, p) for p in PERCENTILES} | {
        "mean": math.fsum(values) / len(values),
        "max": values[-1],
    }


def summarize(rows: Sequence[_Row]) -> dict[str, Any]:
    """Counts and percentiles; None where there is nothing to take them of."""
    outcomes: dict[str, int] = {}
    for row in rows:
        outcomes[row.outcome] = outcomes.get(row.outcome, 0) + 1
    spoken = [row for row in rows if row.voice_to_voice_ms is not None]
    spent = [row.stages_ms for row in spoken]
    return {
        "turns": len(rows),
        "conversations": len({row.session_id for row in rows}),
        "first_ended_at_ms": min((row.ended_at_ms for row in rows), default=None),
        "last_ended_at_ms": max((row.ended_at_ms for row in rows), default=None),
        "outcomes": outcomes,
        "over_budget": sum(row.over_budget for row in rows),
        "voice_to_voice_ms": _spread([row.voice_to_voice_ms or 0.0 for row in spoken]),
        "stages_ms": {
            stage: _spread([stages[index] or 0.0 for stages in spent])
            for index, stage in enumerate(STAGE_NAMES)
        },
    }


def _over_time(rows: Sequence[_Row], bucket_s: int | None) -> dict[str, Any]:
    if not rows:
        return {"bucket_s": bucket_s or _BUCKETS_S[0], "buckets": []}
    span_s = (max(r.ended_at_ms for r in rows) - min(r.ended_at_ms for r in rows)) / 1000
    if bucket_s is None:
        fits = (size for size in _BUCKETS_S if span_s / size < _MAX_BUCKETS)
        bucket_s = next(fits, _BUCKETS_S[-1])
    buckets: dict[int, list[_Row]] = {}
    for row in rows:
        buckets.setdefault(row.ended_at_ms // (bucket_s * 1000), []).append(row)
    if len(buckets) > MAX_CHOSEN_BUCKETS:
        raise ClientError(
            f"Invalid value for 'bucket_s': {bucket_s} s make {len(buckets)} buckets of these "
            f"turns, at most {MAX_CHOSEN_BUCKETS} are allowed.",
            code="invalid_value",
            param="bucket_s",
        )
    return {
        "bucket_s": bucket_s,
        "buckets": [
            {
                "start_ms": number * bucket_s * 1000,
                "turns": len(inside),
                "failed": sum(row.outcome in ("failed", "timed_out") for row in inside),
                "over_budget": sum(row.over_budget for row in inside),
                "voice_to_voice_ms": _spread(
                    [r.voice_to_voice_ms for r in inside if r.voice_to_voice_ms is not None]
                ),
            }
            for number, inside in sorted(buckets.items())
        ],
    }


def _slowest(rows: Sequence[_Row], summary: dict[str, Any]) -> list[dict[str, Any]]:
    spoken = [row for row in rows if row.voice_to_voice_ms is not None]
    spoken.sort(key=lambda row: row.voice_to_voice_ms or 0.0, reverse=True)
    found = []
    for row in spoken[:NUM_SLOWEST]:
        stages = {name: ms or 0.0 for name, ms in zip(STAGE_NAMES, row.stages_ms, strict=True)}
        above = {name: ms - summary["stages_ms"][name]["p50"] for name, ms in stages.items()}
        cause = max(above, key=lambda name: above[name])
        found.append(
            {
                "turn_id": row.turn_id,
                "session_id": row.session_id,
                "ended_at_ms": row.ended_at_ms,
                "outcome": row.outcome,
                "voice_to_voice_ms": row.voice_to_voice_ms,
                "stages_ms": stages,
                "cause": cause,
                "cause_above_median_ms": above[cause],
            }
        )
    return found


def period_before(chosen: TraceFilter, now_ms: int) -> TraceFilter:
    """The period just as long that ended where ``chosen`` begins.

    Raises ValueError when ``chosen`` has no beginning.
    """
    if chosen.since_ms is None:
        raise ValueError("a period without a beginning has none before it")
    until_ms = now_ms if chosen.until_ms is None else chosen.until_ms
    length_ms = max(0, until_ms - chosen.since_ms)
    return replace(chosen, since_ms=chosen.since_ms - length_ms, until_ms=chosen.since_ms)
