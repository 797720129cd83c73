"""The tables of the trace database, and how an older one becomes today's.

A turn is one row: the record as JSON, and beside it the few columns that are searched. ``seq``
grows with every turn and is never used twice, so it serves as a cursor while old rows are deleted.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

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

COLUMNS = ("turn_id", "session_id", "ended_at_ms", "outcome", "voice_to_voice_ms", "record")
INSERT = (
    f"INSERT OR REPLACE INTO turns ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"
)


def _create(db: sqlite3.Connection) -> None:
    _run(db, _CREATE_V1)


MIGRATIONS: tuple[Callable[[sqlite3.Connection], None], ...] = (_create,)
VERSION = len(MIGRATIONS)


class NewerSchemaError(Exception):
    """The database was written by a newer Parley."""


def row_of(turn: Mapping[str, Any]) -> tuple[Any, ...]:
    """The columns of a turn record (``TurnTrace.to_dict``), in the order of ``COLUMNS``."""
    values = [turn.get(name) for name in COLUMNS[:-1]]
    return (*values, msgspec.json.encode(turn))


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
