"""The tables of the trace database, and how an older one becomes today's.

A turn is one row: the record as JSON, and beside it the few columns that are searched. ``seq``
grows with every turn and is never used twice, so it serves as a cursor while old rows are deleted.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from app.observe.trace import STAGE_NAMES

# Each step takes a database of the version that is its index to the next one. They are frozen: a
# step that has been released is never changed, for databases in the field have been through it.
_CREATE_V1 = """
CREATE TABLE turns (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    turn_id TEXT NOT NULL UNIQUE,
    session_id TEXT NOT NULL,
    ended_at_ms INTEGER NOT NULL,
    outcome TEXT NOT NULL,
    voice_to_voice_ms REAL,
    record BLOB NOT NULL
);
CREATE INDEX turns_by_session ON turns (session_id, seq);
CREATE INDEX turns_by_end ON turns (ended_at_ms);
"""

# What each stage took, for percentiles over thousands of turns; and whether any budget was missed.
_STAGE_COLUMNS = tuple(f"{stage}_ms" for stage in STAGE_NAMES)
_FIELDS = ("turn_id", "session_id", "ended_at_ms", "outcome", "voice_to_voice_ms")
COLUMNS = (*_FIELDS, *_STAGE_COLUMNS, "over_budget", "engine", "record")
INSERT = (
    f"INSERT OR REPLACE INTO turns ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"
)


def _create(db: sqlite3.Connection) -> None:
    _run(db, _CREATE_V1)


def _add_stages(db: sqlite3.Connection) -> None:
    stages = ("endpoint", "asr", "queue", "prefill", "decode", "tts", "send")
    for stage in stages:
        db.execute(f"ALTER TABLE turns ADD COLUMN {stage}_ms REAL")
    db.execute("ALTER TABLE turns ADD COLUMN over_budget INTEGER NOT NULL DEFAULT 0")
    assignments = ", ".join(f"{stage}_ms = ?" for stage in stages)
    for seq, record in db.execute("SELECT seq, record FROM turns").fetchall():
        spent = msgspec.json.decode(record).get("stages_ms", {})
        values = [spent.get(stage) for stage in stages]
        db.execute(f"UPDATE turns SET {assignments} WHERE seq = ?", (*values, seq))
    db.execute("CREATE INDEX turns_by_wait ON turns (voice_to_voice_ms)")


def _add_engine(db: sqlite3.Connection) -> None:
    """Older turns are from before there was a choice."""
    db.execute("ALTER TABLE turns ADD COLUMN engine TEXT")


MIGRATIONS: tuple[Callable[[sqlite3.Connection], None], ...] = (_create, _add_stages, _add_engine)
VERSION = len(MIGRATIONS)


class NewerSchemaError(Exception):
    """The database was written by a newer Parley."""


def row_of(turn: Mapping[str, Any]) -> tuple[Any, ...]:
    """The columns of a turn record (``TurnTrace.to_dict``), in the order of ``COLUMNS``."""
    fields = [turn[name] for name in _FIELDS]
    stages = [turn["stages_ms"].get(stage) for stage in STAGE_NAMES]
    over_budget = int(bool((turn.get("budget") or {}).get("misses_ms")))
    engine = turn["facts"].get("engine")
    return (*fields, *stages, over_budget, engine, msgspec.json.encode(turn))


def migrate(db: sqlite3.Connection) -> int:
    """Bring ``db`` to ``VERSION``, step by step, each in one transaction; returns the old version.

    Raises NewerSchemaError for a database from the future.
    """
    old = int(db.execute("PRAGMA user_version").fetchone()[0])
    if old > VERSION:
        raise NewerSchemaError(f"its schema has version {old}, this Parley knows up to {VERSION}")
    for version in range(old, VERSION):
        db.execute("BEGIN IMMEDIATE")
        try:
            # Another process may have done it while we waited for the lock.
            if db.execute("PRAGMA user_version").fetchone()[0] == version:
                MIGRATIONS[version](db)
                db.execute(f"PRAGMA user_version = {version + 1}")
            db.execute("COMMIT")
        except BaseException:
            db.execute("ROLLBACK")
            raise
    return old


def _run(db: sqlite3.Connection, script: str) -> None:
    """Like ``executescript``, which would commit the transaction first."""
    for statement in script.split(";"):
        if statement.strip():
            db.execute(statement)
