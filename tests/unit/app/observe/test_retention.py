"""When traces and recordings are too old, on machines whose clocks are set."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from app.observe.retention import Retention, RetentionClock
from app.observe.store import TraceStore
from app.observe.turn_audio import AudioFiles
from app.observe.writer import TraceWriter
from tests.support.fake_turns import a_turn
from tests.support.fakes import recent

DAY_S = 86_400.0
NOON_S = 1_790_000_000.0  # some day


class Clocks:
    """Wall time, and the time since the machine was started."""

    def __init__(self) -> None:
        self.wall_s, self.running_s = NOON_S, 5000.0

    def pass_by(self, seconds: float) -> None:
        self.wall_s += seconds
        self.running_s += seconds

    def clock(self, max_age_s: float = 30 * DAY_S, newest_s: float | None = None) -> RetentionClock:
        return RetentionClock(
            max_age_s, newest_s, wall_s=lambda: self.wall_s, running_s=lambda: self.running_s
        )


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


def test_a_clock_that_only_runs_is_believed(clocks: Clocks) -> None:
    clock = clocks.clock(newest_s=NOON_S - DAY_S)
    for _ in range(100):
        clocks.pass_by(DAY_S / 3)
        clocks.wall_s += 60  # and is put right a little
        assert clock.now_s() == clocks.wall_s


@pytest.mark.parametrize("jump_s", [365 * DAY_S, -365 * DAY_S, 3600.0])
def test_a_jump_is_believed_after_a_day_and_told_once(
    clocks: Clocks, jump_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    clock = clocks.clock()
    clocks.wall_s += jump_s
    for _ in range(24):
        assert clock.now_s() is None
        clocks.pass_by(3600)
    assert clock.now_s() == clocks.wall_s
    clocks.pass_by(60)
    assert clock.now_s() == clocks.wall_s
    (message,) = caplog.messages
    assert message.startswith(f"the clock was set by {jump_s:+,.0f} s: for 86400 s nothing")


def test_a_jump_that_is_taken_back_has_not_been(clocks: Clocks) -> None:
    clock = clocks.clock()
    clocks.wall_s += 365 * DAY_S
    assert clock.now_s() is None
    clocks.pass_by(60)
    clocks.wall_s -= 365 * DAY_S
    assert clock.now_s() == clocks.wall_s


def test_each_further_jump_begins_a_new_day(clocks: Clocks) -> None:
    clock = clocks.clock()
    for _ in range(3):
        clocks.wall_s += 40 * DAY_S
        assert clock.now_s() is None
        clocks.pass_by(0.9 * DAY_S)
        assert clock.now_s() is None
    clocks.pass_by(0.2 * DAY_S)
    assert clock.now_s() == clocks.wall_s


def test_a_start_at_which_all_would_go_waits_a_day(
    clocks: Clocks, caplog: pytest.LogCaptureFixture
) -> None:
    clock = clocks.clock(newest_s=NOON_S - 31 * DAY_S)
    assert clock.now_s() is None
    clocks.pass_by(DAY_S)
    assert clock.now_s() == clocks.wall_s
    assert caplog.messages[0].startswith("the newest trace is older")


def test_nobody_waits_longer_than_things_are_kept(clocks: Clocks) -> None:
    clock = clocks.clock(max_age_s=600)
    clocks.wall_s += 3600
    assert clock.now_s() is None
    clocks.pass_by(600)
    assert clock.now_s() == clocks.wall_s


def test_a_clock_set_a_year_ahead_costs_no_trace_and_no_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started_s = time.time()
    store = TraceStore(tmp_path / "traces.db", Retention(max_age_s=DAY_S))
    files = AudioFiles(tmp_path / "recordings", max_age_s=DAY_S, max_bytes=10_000)
    store.write([a_turn(1, ended_at_ms=int((started_s - 3 * DAY_S) * 1000))])
    store.write([a_turn(2, ended_at_ms=int(started_s * 1000))])
    files.write("turn_2", b"x" * 100)
    writer = TraceWriter(store, recordings=files)
    writer._prune()
    assert [turn["turn_id"] for turn in recent(store, 9)] == ["turn_2"], "what is old goes"
    monkeypatch.setattr(time, "time", lambda: started_s + 365 * DAY_S)
    with caplog.at_level(logging.WARNING):
        writer._prune()
    assert [turn["turn_id"] for turn in recent(store, 9)] == ["turn_2"]
    assert files.path("turn_2") is not None
    assert "the clock was set by" in caplog.messages[0]

    again = TraceWriter(store, recordings=files)  # a start with the wrong clock
    again._prune()
    assert [turn["turn_id"] for turn in recent(store, 9)] == ["turn_2"]
    assert files.path("turn_2") is not None
    assert files.prune(started_s + 2 * DAY_S) == 1 and store.prune(started_s + 2 * DAY_S) == 1
    store.close()
