"""``parley traces``: what it prints of a local database and of a server, and the exit codes."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from app.cli import main
from app.observe.retention import Retention
from app.observe.store import FILE_NAME, TraceStore
from app.server.lifecycle import create_app, listening
from tests.support.fake_turns import a_turn
from tests.support.fakes import ScriptedEngine, fake_services

NUM_TURNS = 30
SLOW = a_turn(NUM_TURNS)["stages_ms"] | {"tts": 966.0}
TURNS = [
    *(a_turn(number) for number in range(NUM_TURNS)),
    a_turn(NUM_TURNS, stages_ms=SLOW, voice_to_voice_ms=1500.0, session_id="sess_slow"),
]
Invoke = Callable[..., Result]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    store = TraceStore(tmp_path / FILE_NAME, Retention())
    store.write(TURNS)
    store.close()
    return tmp_path


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """A server with the same turns, behind the key k1, on a loop of its own."""
    (tmp_path / "index.html").write_text("<!doctype html>")
    services = fake_services(ScriptedEngine(), port=0, api_keys=("k1",))
    for turn in TURNS:
        services.traces.add(turn)
    app = create_app(services.settings, services, web_root=tmp_path)
    started: list[str] = []
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def run() -> None:
        async with listening(app, services.settings) as url:
            started.append(url)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    assert ready.wait(20)
    yield started[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


@pytest.fixture(params=["local", "remote"])
def invoke(request: pytest.FixtureRequest) -> Invoke:
    """Runs ``parley traces`` on the local database or on the server: they must say the same."""
    where = (
        ["--home", str(request.getfixturevalue("home"))]
        if request.param == "local"
        else ["--url", request.getfixturevalue("server"), "--api-key", "k1"]
    )

    def run(*args: str) -> Result:
        return CliRunner(env={"COLUMNS": "200"}).invoke(main.cli, ["traces", *args, *where])

    return run


def test_the_last_turns_with_their_stages(invoke: Invoke) -> None:
    result = invoke("--limit", "5")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert len(lines) == 1 + 5 + 1
    assert "turn_30" in lines[1] and "1,500" in lines[1] and "966" in lines[1]
    assert "turn_26" in lines[5] and "600" in lines[5]
    assert "--limit" in lines[6]


def test_a_narrow_terminal_shows_the_longest_stage(home: Path) -> None:
    narrow = CliRunner(env={"COLUMNS": "80"})
    args = ["traces", "--limit", "2", "--home", str(home)]
    lines = narrow.invoke(main.cli, args).stdout.splitlines()
    assert lines[1].split()[2:] == ["turn_30", "answered", "1,500", "voice", "966"]
    assert lines[2].endswith("end of turn 310")


def test_filters_and_json(invoke: Invoke) -> None:
    listed = json.loads(invoke("--json", "--min-ms", "700").stdout)
    assert listed["data"] == [TURNS[-1]]
    assert json.loads(invoke("--json", "--conversation", "sess_1").stdout)["data"][0] == TURNS[19]
    assert "no turns" in invoke("--outcome", "failed,timed_out").stdout
    since = json.loads(invoke("--json", "--since", "1796000025").stdout)
    assert len(since["data"]) == 6


def test_one_turn_as_a_waterfall(invoke: Invoke) -> None:
    last = invoke("show")
    assert last.exit_code == 0, last.output
    assert "turn_30" in last.stdout and "voice to voice" in last.stdout
    assert "966 ms" in last.stdout and "How are you?" in last.stdout
    assert "tpot_ms" in last.stdout
    assert json.loads(invoke("show", "turn_3", "--json").stdout) == TURNS[3]
    missing = invoke("show", "turn_99")
    assert missing.exit_code == 1


def test_the_budget_of_a_turn_and_what_was_done(tmp_path: Path) -> None:
    action = {"policy": "filler", "stage": "asr", "at_ms": 950.0, "overspent_ms": 0.0}
    budget = {
        "target_ms": 1000.0,
        "stages_ms": {"asr": 80.0},
        "misses_ms": {"asr": 15.0, "total": 412.0},
        "actions": [{**action, "saved_ms": 580.0}, {**action, "saved_ms": None}],
    }
    store = TraceStore(tmp_path / FILE_NAME, Retention())
    store.write([a_turn(1, budget=budget)])
    store.close()
    shown = CliRunner().invoke(main.cli, ["traces", "show", "--home", str(tmp_path)]).stdout
    assert "budget 1,000 ms over: transcription +15, whole +412 ms" in shown
    assert "filler, for transcription was late, 580 ms saved" in shown
    listed = CliRunner().invoke(
        main.cli, ["traces", "--over-budget", "--json", "--home", str(tmp_path)]
    )
    assert len(json.loads(listed.stdout)["data"]) == 1


def test_statistics_name_the_cause(invoke: Invoke) -> None:
    result = invoke("stats")
    assert result.exit_code == 0, result.output
    assert "31 turns, 4 conversations" in result.stdout
    slowest = result.stdout.split("the slowest")[1].splitlines()
    assert slowest[2].split()[2:] == ["turn_30", "1,500", "voice", "+900"]
    alone = invoke("stats", "--conversation", "sess_slow").stdout.split("the slowest")[1]
    assert alone.split()[-2:] == ["1,500", "–"], "nothing is above its own median"
    compared = invoke("stats", "--since", "1796000020", "--until", "1796000040", "--compare")
    assert "p50 before (20 turns)" in compared.stdout, compared.output
    assert json.loads(invoke("stats", "--json").stdout)["summary"]["turns"] == 31


def test_export_writes_a_line_for_each_turn(invoke: Invoke, tmp_path: Path) -> None:
    lines = invoke("export", "--format", "jsonl").stdout.splitlines()
    assert [json.loads(line) for line in lines] == TURNS[::-1]
    out = tmp_path / "turns.jsonl"
    assert invoke("export", "--out", str(out), "--conversation", "sess_slow").exit_code == 0
    assert json.loads(out.read_text()) == TURNS[-1]
    assert invoke("export", "--out", str(tmp_path / "no" / "where")).exit_code == 1


def test_wrong_usage(invoke: Invoke) -> None:
    for args in (
        ("--outcome", "happy"),
        ("--since", "yesterday"),
        ("--since", "0001-01-01"),
        ("--since", "1h", "--until", "2h"),
        ("stats", "--compare"),
        ("export", "--format", "xml"),
        ("--limit", "0"),
    ):
        assert invoke(*args).exit_code == 2, args


def test_an_empty_period_is_told_once(invoke: Invoke) -> None:
    told = " ".join(invoke("--since", "1h", "--until", "2h").output.replace("│", " ").split())
    assert "Invalid value for '--until': it must be later than '--since'." in told


def test_times_are_typed_as_they_are_printed(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        local = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(1_796_000_025))
        assert len(json.loads(invoke("--json", "--since", local).stdout)["data"]) == 6
    finally:
        monkeypatch.undo()
        time.tzset()


def run_main(*args: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main.main(["traces", *args])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_no_traces_and_no_server_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], closed_port: int
) -> None:
    assert run_main("--home", str(tmp_path)) == 1
    assert "there are no traces in" in capsys.readouterr().err
    assert not (tmp_path / FILE_NAME).exists(), "looking does not make one"
    assert run_main("--url", f"http://127.0.0.1:{closed_port}") == 1
    assert f":{closed_port}: Connection refused\n" in capsys.readouterr().err
    assert run_main("--url", "file:///etc/passwd") == 1
    assert "http" in capsys.readouterr().err


def test_a_server_that_refuses_is_quoted(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("--url", server, "--api-key", "wrong") == 1
    assert "The API key is not valid." in capsys.readouterr().err
