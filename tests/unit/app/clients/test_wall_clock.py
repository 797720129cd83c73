"""Wall clocks are set, forwards and back: they tell dates, and nothing is measured by them."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pytest

from app.clients.talk import open_talk
from audio.vad import VadModel
from tests.support.scripted_realtime import scripted_server, tone
from tests.unit.app.clients.test_talk_client import RATE, answer_after, audio_of
from tests.unit.project.test_layout import PACKAGES, ROOT

# Where wall time is read, and what for.
READS_DATES = {
    "app/api/chat/output.py": "when an answer was made",
    "app/api/models.py": "since when a model is there",
    "app/api/telephony/call.py": "when a key was pressed",
    "app/api/realtime/connection.py": "until when a session may last: told to the client",
    "bench/harness/machine.py": "the date of a report",
    "bench/harness/results.py": "the date of a result",
    "app/cli/traces.py": "traces of the last days",
    "app/access/client_secrets.py": "until when a secret is good: told to the client",
    "app/observe/query.py": "traces of the last days",
    "app/observe/retention.py": "what is too old: compared with a clock that nobody sets",
    "app/observe/trace.py": "when a turn ended",
    "app/transports/webrtc/call.py": "certificates say until when they are good",
    "llm_core/chat/template.py": "templates may tell the model what day it is",
}
WALL_CLOCKS = {
    "time.time",
    "time.time_ns",
    "datetime.now",
    "datetime.datetime.now",
    "datetime.utcnow",
}


def reads_wall_clock(path: Path) -> bool:
    tree = ast.parse(path.read_text())
    return any(
        isinstance(node, ast.Attribute) and ast.unparse(node) in WALL_CLOCKS
        for node in ast.walk(tree)
    )


def test_only_dates_come_from_the_wall_clock() -> None:
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    found = {str(path.relative_to(ROOT)) for path in files if reads_wall_clock(path)}
    assert found == READS_DATES.keys()


@pytest.fixture
def jumping_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Each look at the wall clock is a year after or before the last one."""
    looks: list[float] = []
    real, years = time.time, cycle((1, -1))

    def now_s() -> float:
        looks.append(real() + next(years) * 365 * 86_400)
        return looks[-1]

    monkeypatch.setattr(time, "time", now_s)
    monkeypatch.setattr(time, "time_ns", lambda: int(now_s() * 1e9))
    yield looks


async def test_a_talk_goes_on_while_the_clock_is_set(jumping_clock: list[float]) -> None:
    async with (
        scripted_server(answer_after(RATE // 2, tone(0.2))) as server,
        open_talk(server.url) as client,
    ):
        time.time()
        result = await client.speak(audio_of(0.3, VadModel()), timeout_s=5)
    said = result.to_dict()
    assert said["reply"] == "It is this." and said["status"] == "completed"
    assert said["gap_in_recording_ms"] == pytest.approx(200, abs=60)
    assert said["reply_audio_s"] == pytest.approx(0.2)
    assert jumping_clock
