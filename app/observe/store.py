"""The turns of this server in one SQLite database, kept within an age and a size.

Written by one thread (``app.observe.writer``), read by any. In WAL mode neither waits for the
other, and what was committed survives the death of the process (not of the machine: the last
moments before a power cut may be lost, never the database).
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from app.errors import ConfigError
from app.observe.retention import Retention
from app.observe.schema import INSERT, NewerSchemaError, migrate, row_of

FILE_NAME = "traces.db"
_BUSY_TIMEOUT_S = 5.0
_MAX_WAL_BYTES = 8 * 1024 * 1024
# Beyond the size limit this share of the turns goes at once, so that it is not done every time.
_PRUNED_SHARE = 0.1

Turn = dict[str, Any]


class TraceStore:
    """The database. All methods may be called from any thread."""

    def __init__(self, path: Path | None, retention: Retention) -> None:
        """Open ``path``, made or migrated if need be; None: a database in memory.

        Raises ConfigError when it cannot be used.
        """
        self.path = path
        self.retention = retention
        self._lock = threading.Lock()
        try:
            if path is not None:
                _make_private(path)
            self._db = self._connect()
            if path is not None:
                self._db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # before the first table
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = NORMAL")
                self._db.execute(f"PRAGMA journal_size_limit = {_MAX_WAL_BYTES}")
            migrate(self._db)
        except (sqlite3.Error, OSError, NewerSchemaError) as error:
            raise ConfigError(
                f"the trace database {path} cannot be used: {error}. Move it away, or set "
                "PARLEY_TRACE_DB=false to keep traces in memory"
            ) from error

    @classmethod
    def in_memory(cls, max_turns: int) -> TraceStore:
        """A database that ends with the process and holds the last ``max_turns``."""
        return cls(None, Retention(max_turns=max_turns))

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(
            self.path or ":memory:",
            timeout=_BUSY_TIMEOUT_S,
            isolation_level=None,  # transactions begin where we say so
            check_same_thread=False,
        )

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection for queries: one of its own, so that no reader waits for the writer."""
        if self.path is None:
            with self._lock:
                yield self._db
            return
        db = self._connect()
        try:
            db.execute("PRAGMA query_only = true")
            db.execute("BEGIN")  # all queries of one answer see the same turns
            yield db
        finally:
            db.close()

    def write(self, turns: Sequence[Turn]) -> None:
        """Commit finished turns, all or none. Raises sqlite3.Error."""
        rows = [row_of(turn) for turn in turns]
        with self._writing() as db:
            db.executemany(INSERT, rows)

    def add_client_report(self, turn_id: str, report: dict[str, float]) -> bool:
        """Note in a stored turn what its client says of the playout; False: no such turn.

        ``first_audio_delay_ms`` is from the client's receipt of the first audible sample to its
        sound; with it the instant ``first_audio_played`` is known.
        """
        with self._writing() as db:
            found = db.execute("SELECT seq, record FROM turns WHERE turn_id = ?", (turn_id,))
            row = found.fetchone()
            if row is None:
                return False
            turn: Turn = msgspec.json.decode(row[1])
            turn["client"] = report
            instants, delay_ms = turn["instants_ms"], report.get("first_audio_delay_ms")
            if delay_ms is not None and "first_audio_sent" in instants:
                instants["first_audio_played"] = instants["first_audio_sent"] + delay_ms
            encoded = msgspec.json.encode(turn)
            db.execute("UPDATE turns SET record = ? WHERE seq = ?", (encoded, row[0]))
            return True

    def newest_s(self) -> float | None:
        """Unix time at which the last stored turn ended; None: there is none."""
        with self.reading() as db:
            row = db.execute("SELECT ended_at_ms FROM turns ORDER BY seq DESC LIMIT 1").fetchone()
        return None if row is None else float(row[0] / 1000)

    def prune(self, now_s: float | None = None) -> int:
        """Delete what is too old at Unix time ``now_s`` (None: nothing is, the time is not known),
        and what is too much; returns how many."""
        limits, deleted = self.retention, 0
        with self._writing() as db:
            if limits.max_age_s is not None and now_s is not None:
                oldest_ms = int((now_s - limits.max_age_s) * 1000)
                deleted += db.execute(
                    "DELETE FROM turns WHERE ended_at_ms < ?", (oldest_ms,)
                ).rowcount
            if limits.max_turns is not None:
                deleted += db.execute(
                    "DELETE FROM turns WHERE seq <= (SELECT MAX(seq) FROM turns) - ?",
                    (limits.max_turns,),
                ).rowcount
            while limits.max_bytes is not None and _used_bytes(db) > limits.max_bytes:
                num_turns = db.execute("SELECT COUNT(*) FROM turns").fetchone()[0]
                if num_turns == 0:
                    break
                deleted += db.execute(
                    "DELETE FROM turns WHERE seq IN (SELECT seq FROM turns ORDER BY seq LIMIT ?)",
                    (max(1, int(num_turns * _PRUNED_SHARE)),),
                ).rowcount
        if deleted and self.path is not None:
            with self._lock:
                # Gives the pages back to the file system; `execute` would stop after the first.
                self._db.executescript("PRAGMA incremental_vacuum")
        return deleted

    def close(self) -> None:
        """Give the file back; its log is merged into it."""
        with self._lock:
            self._db.close()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")


def _used_bytes(db: sqlite3.Connection) -> int:
    pages, free, size = (
        int(db.execute(f"PRAGMA {name}").fetchone()[0])
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size


def _make_private(path: Path) -> None:
    """What callers did is for the operator's eyes. The log beside it gets the same mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
