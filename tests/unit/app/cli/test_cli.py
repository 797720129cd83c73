"""The command line as a user meets it: words, exit codes, files. No models needed."""

from __future__ import annotations

import asyncio
import importlib.abc
import json
import os
import runpy
import signal
import subprocess
import sys
import wave
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.cli import talk
from app.cli.main import DEFAULT_SYSTEM, EXIT_INTERRUPTED, main
from app.clients.server_process import ServerStartError, own_server
from tests.support.paths import ROOT
from tests.support.scripted_realtime import RATE, Call, scripted_server, tone


def parley(*arguments: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "app", *arguments],
        cwd=kwargs.pop("cwd", ROOT),
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"} | kwargs.pop("env", {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **kwargs,
    )


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_wav(path: Path, pcm: bytes = tone(0.3)) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(pcm)
    return path


async def answering(call: Call, event: dict[str, Any]) -> None:
    """Answers every call once, when 300 ms have come in."""
    if call.num_audio_samples == RATE * 3 // 10:
        await call.answer("what is [b]it[/b]?", "It is this.", tone(0.2))


async def run_talk(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """`parley talk` in a thread of this process, so that a scripted server can answer it.

    Signal handlers are only for the main thread: they are left out.
    """

    def run() -> int:
        try:
            main(["talk", *arguments])
        except SystemExit as ended:
            assert isinstance(ended.code, int | None)
            return ended.code or 0
        return 0

    code = await asyncio.to_thread(run)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def quiet_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio.SelectorEventLoop, "add_signal_handler", lambda *args: None)


# -- the commands --------------------------------------------------------------------------------


def children_cpu_s() -> float:
    """CPU seconds of all programs that this one has run to their end."""
    times = os.times()
    return times.children_user + times.children_system


def test_help_names_all_commands_and_is_quick() -> None:
    started_s = children_cpu_s()
    help_text = parley("--help").stdout
    took_s = children_cpu_s() - started_s
    for command in ("serve", "talk", "chat", "models", "version"):
        assert command in help_text
    assert took_s < 2.5
    # What takes seconds is not loaded.
    probe = "import sys, app.cli.main; print(sorted({'torch', 'av', 'fastapi'} & set(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert loaded.stdout.strip() == "[]"


def test_ctrl_c_while_the_command_is_being_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, path: object, target: object = None) -> None:
            if name == "app.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "app.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("app", run_name="__main__")
    assert ended.value.code == EXIT_INTERRUPTED


@pytest.mark.parametrize("argument", ["version", "--version"])
def test_version(argument: str) -> None:
    from app import __version__

    assert parley(argument).stdout == f"parley {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["tlak"], "No such command"),
        (["talk"], "Missing argument"),
        (["talk", "absent.wav"], "does not exist"),
        (["talk", "."], "is a directory"),
        (["talk", "--timeout", "0", "README.md"], "'--timeout'"),
        (["serve", "--port", "99999"], "'--port'"),
        (["serve", "--log-level", "chatty"], "PARLEY_LOG_LEVEL"),
        (["chat", "  "], "prompt is empty"),
        (["chat", "--temperature", "9", "hi"], "'--temperature'"),
        (["chat", "--threads", "100000", "hi"], "'--threads'"),
        (["chat", "--seed", str(2**64), "hi"], "'--seed'"),
        (["chat", "\udcff"], "the prompt is not text in UTF-8"),
        (["chat", "--system", "\udcff", "hi"], "--system is not text in UTF-8"),
        (["models", "--json", "fetch"], "give the options after 'fetch'"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], complaint: str) -> None:
    done = parley(*arguments, stdin=subprocess.DEVNULL)
    assert done.returncode == 2, done.stderr
    assert complaint in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_chat_refuses_what_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(b"\xff\xfe\x00\x80")
    with (tmp_path / "noise").open("rb") as noise:
        done = parley("chat", stdin=noise)
    assert done.returncode == 2
    assert "standard input is not text in UTF-8" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_help_tells_the_default_instructions() -> None:
    help_text = " ".join(parley("chat", "--help").stdout.replace("│", " ").split())
    assert DEFAULT_SYSTEM in help_text


def test_a_bad_environment_is_named() -> None:
    done = parley("serve", env={"PARLEY_PORT": "eighty"})
    assert done.returncode == 2
    assert "PARLEY_PORT" in done.stderr


def test_chat_with_an_unknown_model(tmp_path: Path) -> None:
    done = parley("chat", "--model", "package:gpt-17", "hello", env={"PARLEY_HOME": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr.startswith("parley: unknown model 'package:gpt-17'")
    assert done.stdout == ""


# -- talk ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quiet_signals")
async def test_talk_shows_words_stages_and_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    question = write_wav(tmp_path / "question.wav")
    async with scripted_server(answering) as server:
        code, out, _ = await run_talk(capsys, str(question), "--url", server.url)
    assert code == 0
    assert "what is [b]it[/b]?" in out
    assert "It is this." in out
    for words in ("end of turn", "310 ms", "voice to voice", "600 ms"):
        assert words in out
    with wave.open(str(tmp_path / "question.reply.wav")) as reply:
        assert reply.getnframes() == RATE // 5


@pytest.mark.usefixtures("quiet_signals")
async def test_talk_json_is_one_object_a_file_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = [str(write_wav(tmp_path / f"{name}.wav")) for name in ("a", "b")]
    (tmp_path / "noise.wav").write_text("not audio")
    files.insert(1, str(tmp_path / "noise.wav"))
    async with scripted_server(answering) as server:
        code, out, err = await run_talk(capsys, *files, "--url", server.url, "--json")
    assert code == 1  # one of them is no audio
    first, bad, second = map(json.loads, out.splitlines())
    assert [first["file"], bad["file"], second["file"]] == files
    assert bad["error"]["code"] == "invalid_audio"
    assert "noise.wav" in bad["error"]["message"]
    assert "noise.wav" in err
    for said in (first, second):
        assert said["transcript"] == "what is [b]it[/b]?"
        assert said["reply_audio_s"] == 0.2
        assert said["voice_to_voice_ms"] == sum(said["stages_ms"].values())
        assert said["audio_s"] == 0.3
        assert len(said["turns"]) == 1
    assert len(server.calls) == 2
    assert names_in(tmp_path) == ["a.wav", "b.wav", "noise.wav"]


@pytest.mark.usefixtures("quiet_signals")
async def test_talk_writes_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(write_wav(tmp_path / f"{name}.wav")) for name in ("a", "b")]
    one, many, both = tmp_path / "new" / "one.wav", tmp_path / "many", tmp_path / "both.wav"
    async with scripted_server(answering) as server:
        code, *_ = await run_talk(
            capsys, files[0], "--url", server.url, "-o", str(one), "--record", str(both)
        )
        assert code == 0
        code, *_ = await run_talk(capsys, *files, "--url", server.url, "--json", "-o", str(many))
        assert code == 0
    assert one.is_file()
    assert names_in(many) == ["a.reply.wav", "b.reply.wav"]
    with wave.open(str(both)) as file:
        assert file.getnchannels() == 2
        assert 0.45 * RATE < file.getnframes() < 1.5 * RATE


@pytest.mark.usefixtures("quiet_signals")
async def test_talk_to_a_silent_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    question = str(write_wav(tmp_path / "question.wav"))
    async with scripted_server() as server:
        code, out, err = await run_talk(capsys, question, "--url", server.url, "--timeout", "0.5")
    assert code == 1
    assert out == ""
    assert err.startswith("parley: no speech was found in question.wav")


async def test_talk_that_is_told_to_stop_does_so_without_a_word(tmp_path: Path) -> None:
    question = str(write_wav(tmp_path / "question.wav"))
    speaks = asyncio.Event()

    async def script(call: Call, event: dict[str, Any]) -> None:
        if event["type"] == "input_audio_buffer.append":
            speaks.set()

    async with scripted_server(script) as server:
        command = [sys.executable, "-m", "app", "talk", question, "--url", server.url, "--json"]
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(30):
            await speaks.wait()
            process.terminate()
            assert await process.communicate() == (b"", b"")
    assert process.returncode == 128 + signal.SIGTERM


async def test_talk_hangs_up_before_it_ends_its_own_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The other way round the server waits for the turn, for as long as it drains.
    ended: list[str] = []

    @asynccontextmanager
    async def told(name: str, **fields: object) -> AsyncIterator[SimpleNamespace]:
        try:
            yield SimpleNamespace(url="", has_died=False, **fields)
        finally:
            ended.append(name)

    async def interrupted(*args: object, **kwargs: object) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(talk, "own_server", lambda **_: told("server"))
    monkeypatch.setattr(talk, "open_talk", lambda *_, **__: told("call", speak=interrupted))
    monkeypatch.setattr(talk, "fetch_models", lambda *_: None)
    options = talk.TalkOptions(files=[write_wav(tmp_path / "a.wav")], home=tmp_path)
    with pytest.raises(asyncio.CancelledError):
        async with AsyncExitStack() as stack:
            await talk.Talk(options, stack).run()
    assert ended == ["call", "server"]


def test_talk_to_nobody(tmp_path: Path, closed_port: int) -> None:
    files = [str(write_wav(tmp_path / f"{name}.wav")) for name in ("a", "b")]
    done = parley("talk", *files, "--url", f"http://127.0.0.1:{closed_port}")
    assert done.returncode == 1
    # Said once: the second recording has no better chance.
    assert done.stderr == (
        f"parley: cannot reach ws://127.0.0.1:{closed_port}/v1/realtime: Connection refused\n"
    )


def test_out_cannot_be_a_folder_for_one_file(tmp_path: Path) -> None:
    question = write_wav(tmp_path / "question.wav")
    done = parley("talk", str(question), "-o", str(tmp_path))
    assert done.returncode == 2
    assert "is a folder: give a file name" in done.stderr


@pytest.mark.parametrize("option", ["--out", "--record"])
@pytest.mark.parametrize(
    ("place", "num_files", "complaint"),
    [
        ("a.mp3", 1, "must end in .wav"),
        ("a", 1, "must end in .wav"),
        ("a.wav", 2, "must be a folder"),
        ("q0.wav", 2, "must be a folder"),
        ("q0.wav/a.wav", 1, "cannot make the folder"),
        ("/proc/a.wav", 1, "cannot write in /proc"),
    ],
)
def test_places_that_cannot_be_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    place: str,
    num_files: int,
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    files = [str(write_wav(Path(f"q{number}.wav"))) for number in range(num_files)]
    with pytest.raises(SystemExit) as ended:
        main(["talk", *files, option, place])
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err
    assert names_in(tmp_path) == files  # nothing was made on the way


@pytest.mark.parametrize("key", ["se\nsame", "se\x00same", "se\x1bsame", "s\u00e9same", "se same"])
def test_a_key_that_cannot_be_sent_is_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["talk", str(write_wav(tmp_path / "a.wav")), "--api-key", key])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "the API key has invalid characters" in error
    assert "same" not in error


# -- a server of our own -------------------------------------------------------------------------


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Writes a package `app` whose command is the given code, found before the real one."""
    package = tmp_path / "stand_in" / "app"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.setattr("app.__file__", str(package / "__init__.py"))

    def write(code: str) -> None:
        (package / "__main__.py").write_text(code)

    return write


async def test_own_server_is_started_and_stopped(
    stand_in: Callable[[str], None], tmp_path: Path
) -> None:
    stopped = tmp_path / "stopped"
    stand_in(
        "import pathlib, signal, sys\n"
        f"def stop(*_): pathlib.Path({str(stopped)!r}).touch(); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "print('loading', sys.argv[1:], file=sys.stderr, flush=True)\n"
        "print('Parley is listening on http://127.0.0.1:12345', flush=True)\n"
        "signal.pause()\n"
    )
    logged: list[str] = []
    async with own_server(home=tmp_path, on_log=logged.append) as server:
        assert server.url == "http://127.0.0.1:12345"
        assert not server.has_died
    assert stopped.exists()
    expected = ["serve", "--host", "127.0.0.1", "--port", "0", "--home", str(tmp_path)]
    assert logged == [f"loading {expected}"]


async def test_own_server_that_cannot_start_shows_why(stand_in: Callable[[str], None]) -> None:
    stand_in("import sys; print('no room', file=sys.stderr); sys.exit(3)")
    with pytest.raises(
        ServerStartError, match=r"ended with exit code 3; its last words:\n  no room"
    ):
        async with own_server(home=None):
            pass


async def test_own_server_that_will_not_stop_is_killed(
    stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.clients.server_process.STOP_TIMEOUT_S", 0.1)
    stand_in(
        "import signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('Parley is listening on http://127.0.0.1:1', flush=True)\n"
        "while True: signal.pause()\n"
    )
    async with own_server(home=None) as server:
        process = server.process
    assert process.returncode == -signal.SIGKILL
