"""The trace database: what is kept, what is not, and what survives."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from app.errors import ConfigError
from app.observe import schema
from app.observe.retention import Retention
from app.observe.store import TraceStore
from app.observe.turn_audio import AudioFiles, TurnAudio
from app.observe.writer import TraceWriter, without_words
from tests.support.fake_turns import a_turn
from tests.support.fakes import recent
from tests.support.paths import ROOT

FOREVER = Retention()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / "traces.db"


@pytest.fixture
def store(path: Path) -> Iterator[TraceStore]:
    store = TraceStore(path, FOREVER)
    yield store
    store.close()


def ids(store: TraceStore) -> list[str]:
    return [turn["turn_id"] for turn in recent(store, 100_000)]


def test_turns_come_back_as_they_were_newest_first(store: TraceStore, path: Path) -> None:
    store.write([a_turn(1), a_turn(2)])
    store.write([a_turn(3)])
    assert recent(store, 2) == [a_turn(3), a_turn(2)]
    store.close()
    reopened = TraceStore(path, FOREVER)
    assert ids(reopened) == ["turn_3", "turn_2", "turn_1"]
    reopened.close()


def test_only_the_operator_may_read_it(store: TraceStore, path: Path) -> None:
    store.write([a_turn()])
    files = list(path.parent.iterdir())
    assert {file.name for file in files} >= {"traces.db", "traces.db-wal"}
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


def test_readers_do_not_wait_for_the_writer(store: TraceStore) -> None:
    store.write([a_turn(1)])
    with store._writing():
        assert ids(store) == ["turn_1"]


def test_a_store_in_memory_keeps_the_last_turns() -> None:
    store = TraceStore.in_memory(3)
    for number in range(5):
        store.write([a_turn(number)])
    assert store.prune() == 2
    assert ids(store) == ["turn_4", "turn_3", "turn_2"]
    store.close()


def test_what_is_too_old_goes(path: Path) -> None:
    store = TraceStore(path, Retention(max_age_s=10))
    store.write([a_turn(1, ended_at_ms=1_000), a_turn(2, ended_at_ms=5_000)])
    assert store.prune(12.0) == 1
    assert ids(store) == ["turn_2"]
    store.close()


def test_what_is_too_much_goes_oldest_first_and_the_file_shrinks(path: Path) -> None:
    store = TraceStore(path, Retention(max_bytes=200_000))
    store.write([a_turn(number) for number in range(1000)])
    before = path.stat().st_size + path.with_name("traces.db-wal").stat().st_size
    assert before > 1_000_000
    assert store.prune() > 500
    kept = ids(store)
    assert kept == [f"turn_{number}" for number in range(999, 999 - len(kept), -1)] and kept
    store.close()
    assert path.stat().st_size < 210_000
    # Numbers are never given twice, so that a cursor stays good.
    reopened = TraceStore(path, Retention(max_turns=0))
    reopened.prune()
    reopened.write([a_turn(5000)])
    with reopened.reading() as db:
        assert db.execute("SELECT seq FROM turns").fetchall() == [(1001,)]
    reopened.close()


def test_a_client_report_joins_its_turn(store: TraceStore) -> None:
    store.write([a_turn(1), a_turn(2)])
    assert store.add_client_report("turn_1", {"first_audio_delay_ms": 80.0, "gap_ms": 5.0})
    turn = recent(store, 2)[1]
    assert turn["client"] == {"first_audio_delay_ms": 80.0, "gap_ms": 5.0}
    assert turn["instants_ms"]["first_audio_played"] == 680.0
    assert not store.add_client_report("turn_9", {"gap_ms": 5.0})


def test_a_database_of_the_future_or_of_garbage_is_told_at_the_start(path: Path) -> None:
    TraceStore(path, FOREVER).close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {schema.VERSION + 1}")
    db.close()
    with pytest.raises(ConfigError, match="schema has version"):
        TraceStore(path, FOREVER)
    path.write_bytes(b"this is not a database, whatever its name says" * 100)
    with pytest.raises(ConfigError, match="PARLEY_TRACE_DB=false"):
        TraceStore(path, FOREVER)


def test_a_database_of_version_1_is_brought_to_today(path: Path) -> None:
    """Made with the statements of the first release, not with today's."""
    path.parent.mkdir()
    db = sqlite3.connect(path)
    db.executescript(schema._CREATE_V1 + "PRAGMA user_version = 1;")
    for number in (1, 2):
        turn = a_turn(number)
        if number == 2:  # nobody heard an answer
            turn |= {"voice_to_voice_ms": None, "stages_ms": {}}
        names = ("turn_id", "session_id", "ended_at_ms", "outcome", "voice_to_voice_ms")
        db.execute(
            f"INSERT INTO turns ({', '.join(names)}, record) VALUES (?, ?, ?, ?, ?, ?)",
            (*[turn[name] for name in names], json.dumps(turn)),
        )
    db.commit()
    db.close()

    store = TraceStore(path, FOREVER)
    assert ids(store) == ["turn_2", "turn_1"]
    with store.reading() as db:
        assert db.execute("PRAGMA user_version").fetchone() == (schema.VERSION,)
        rows = db.execute("SELECT asr_ms, send_ms, over_budget FROM turns ORDER BY seq").fetchall()
    assert rows == [(95.0, 5.0, 0), (None, None, 0)]
    store.write([a_turn(3, budget={"misses_ms": {"asr": 1.0}, "actions": []})])
    with store.reading() as db:
        assert db.execute("SELECT over_budget FROM turns WHERE seq = 3").fetchone() == (1,)
    store.close()


def test_a_migration_that_fails_changes_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TraceStore(path, FOREVER)
    store.write([a_turn(1)])
    store.close()

    def half(db: sqlite3.Connection) -> None:
        db.execute("DELETE FROM turns")
        raise sqlite3.OperationalError("the disk is full")

    steps = (*schema.MIGRATIONS, half)
    monkeypatch.setattr(schema, "MIGRATIONS", steps)
    monkeypatch.setattr(schema, "VERSION", len(steps))
    with pytest.raises(ConfigError, match="the disk is full"):
        TraceStore(path, FOREVER)
    monkeypatch.undo()
    reopened = TraceStore(path, FOREVER)
    assert ids(reopened) == ["turn_1"]
    reopened.close()


# --- the writer ---


def test_the_writer_commits_everything_in_order_and_stops(store: TraceStore) -> None:
    threads = threading.active_count()
    seen: list[str] = []
    writer = TraceWriter(store, sinks=[lambda turn: seen.append(turn["turn_id"])])
    writer.start()
    for number in range(700):  # more than a batch
        writer.add(a_turn(number))
    writer.flush()
    assert ids(store) == [f"turn_{n}" for n in range(699, -1, -1)]
    assert seen == [f"turn_{n}" for n in range(700)]
    writer.add(a_turn(700))
    writer.close()
    assert ids(store)[0] == "turn_700", "what waits at the end is written"
    assert writer.num_dropped == 0
    assert threading.active_count() == threads


def test_words_are_kept_only_when_asked_for(store: TraceStore) -> None:
    said = [{"word": "How", "start_ms": 100, "end_ms": 240}]
    for keeps in (False, True):
        writer = TraceWriter(store, store_transcripts=keeps)
        writer.write([a_turn(int(keeps), words=said)])
    kept, bare = recent(store, 2)
    assert (kept["transcript"], kept["reply"]) == ("How are you?", "Fine.")
    assert kept["words"] == said
    assert "words" not in bare
    assert (bare["transcript"], bare["reply"]) == ("", "")
    assert (bare["facts"]["transcript_chars"], bare["facts"]["reply_chars"]) == (12, 5)
    assert bare == without_words(a_turn(0))


def test_a_full_queue_drops_the_newest_and_says_so(
    store: TraceStore, caplog: pytest.LogCaptureFixture
) -> None:
    writer = TraceWriter(store, max_queued=2)  # not started: nobody takes anything out
    for number in range(5):
        writer.add(a_turn(number))
    assert writer.num_dropped == 3
    assert [r.getMessage() for r in caplog.records] == ["traces are lost (the queue is full)"]
    writer.start()
    writer.close()
    assert ids(store) == ["turn_1", "turn_0"]


def test_a_disk_that_fails_is_survived_and_told(
    store: TraceStore, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []

    def fail(turn: object) -> None:
        raise ZeroDivisionError

    writer = TraceWriter(store, sinks=[fail, lambda turn: seen.append(turn["turn_id"])])
    with store._writing() as db:
        db.execute("CREATE TRIGGER full BEFORE INSERT ON turns BEGIN SELECT RAISE(ABORT, 'x'); END")
    writer.start()
    with caplog.at_level(logging.ERROR):
        writer.add(a_turn(1))
        writer.flush()
    with store._writing() as db:
        db.execute("DROP TRIGGER full")
    writer.add(a_turn(2))
    writer.close()
    assert ids(store) == ["turn_2"] and writer.num_dropped == 1
    assert seen == ["turn_1", "turn_2"], "the other observers see all the same"
    messages = [r.getMessage() for r in caplog.records]
    assert messages.count("traces are lost (x)") == 1
    assert messages.count("a turn could not be observed") == 2


def test_a_turn_that_cannot_be_recorded_does_not_end_the_recording_of_others(
    store: TraceStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = AudioFiles(tmp_path, max_age_s=100, max_bytes=1000)
    writer = TraceWriter(store, recordings=files)
    writer.start()
    broken = TurnAudio(0)
    broken.add_reply(np.zeros((2, 2), np.float32), 8_000, 0)  # no mono sound
    writer.add(a_turn(1), broken)
    writer.flush()
    writer.add(a_turn(2))
    writer.flush()
    writer.close()
    assert ids(store) == ["turn_2", "turn_1"]
    assert "the end of a turn could not be recorded" in caplog.messages


WRITE_AND_SAY = """
import sys
from pathlib import Path
from app.observe.retention import Retention
from app.observe.store import TraceStore
from app.observe.writer import TraceWriter
from tests.support.fake_turns import a_turn
from tests.support.fakes import recent

writer = TraceWriter(TraceStore(Path(sys.argv[1]), Retention()))
writer.start()
for number in range(100_000):
    writer.add(a_turn(number))
    if number % 3 == 0:
        writer.flush()
        print(number, flush=True)
"""


def test_nothing_that_was_committed_is_lost_by_kill_minus_9(path: Path) -> None:
    """A real process is killed while it writes; the database opens again with all it had said."""
    root = ROOT
    command = [sys.executable, "-c", WRITE_AND_SAY, str(path)]
    env = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True, env=env) as child:
        assert child.stdout is not None
        last = 0
        for _ in range(200):
            last = int(child.stdout.readline())
        child.kill()
        said = [int(line) for line in child.stdout if line.endswith("\n")]
    last = max([last, *said])
    store = TraceStore(path, FOREVER)
    kept = ids(store)
    # Without a hole, and at least as far as was said.
    assert kept == [f"turn_{number}" for number in range(len(kept) - 1, -1, -1)]
    assert len(kept) >= last + 1
    with store.reading() as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    store.close()
