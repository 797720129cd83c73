"""``parley talk``: recordings go in, replies come out, and the time they took is shown."""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, Group
from rich.padding import Padding
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from app.cli.models import configured_models, fetch_models
from app.cli.waterfall import early_note, waterfall
from app.clients import (
    INVALID_KEY,
    RATE,
    CallerAudio,
    LoggedTurn,
    NoSpeechError,
    OwnServer,
    TalkError,
    TalkLog,
    TalkResult,
    is_valid_key,
    load_caller_audio,
    open_talk,
    own_server,
    write_mono,
)
from app.config import load_settings
from app.errors import AudioInputError, ConfigError, ParleyError
from app.models import ModelStore
from audio.vad import VadModel


@dataclass(frozen=True)
class TalkOptions:
    """What the command line asked for; see its help. ``url`` None: start a server."""

    files: list[Path]
    url: str | None = None
    api_key: str | None = None
    out: Path | None = None
    record: Path | None = None
    as_json: bool = False
    same_conversation: bool = False
    timeout_s: float = 15.0
    home: Path | None = None


def run_talk(options: TalkOptions) -> bool:
    """Says all recordings; True when each was answered.

    Raises ParleyError when nothing could be said at all.
    """
    if options.api_key is not None and not is_valid_key(options.api_key):
        raise ConfigError(f"--api-key or PARLEY_API_KEY: {INVALID_KEY}")
    check_places(options)
    return run_until_stopped(_talk(options))


def check_places(options: TalkOptions) -> None:
    """All results have a place that can be written, before anybody speaks. Raises ConfigError."""
    for name, place in (("--out", options.out), ("--record", options.record)):
        if place is None:
            continue
        if len(options.files) > 1:
            _check_folder_name(name, place)
            _make_folder(name, place)
        else:
            _check_file_name(name, place)
            _make_folder(name, place.parent)
            _check_old_file(name, place)
    if options.out is None and not options.as_json:
        _make_folder("--out is not given, and the reply goes here", Path())


def _check_folder_name(name: str, place: Path) -> None:
    if place.is_dir():
        return
    if place.exists() or place.suffix.lower() == ".wav":
        raise ConfigError(f"{name} {place} must be a folder: there are several recordings")


def _check_file_name(name: str, place: Path) -> None:
    if place.is_dir():
        raise ConfigError(f"{name} {place} is a folder: give a file name, like reply.wav")
    if place.suffix.lower() != ".wav":
        raise ConfigError(f"{name} {place} must end in .wav: that is what is written")


def _make_folder(name: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{name}: cannot make the folder {folder}: {error.strerror}") from error
    try:
        # Tried rather than asked for: permissions do not tell of a read-only disk.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{name}: cannot write in {folder}: {error.strerror}") from error


def _check_old_file(name: str, place: Path) -> None:
    """A file that is there can be replaced; it is left as it is."""
    try:
        with place.open("r+b"):
            pass
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigError(f"{name}: cannot write {place}: {error.strerror}") from error


def run_until_stopped(command: Coroutine[Any, Any, bool]) -> bool:
    """Runs ``command``. SIGTERM cancels it, so that it leaves no server behind, and raises
    SystemExit with the status that a shell expects."""

    async def run() -> bool:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await command

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None


async def _talk(options: TalkOptions) -> bool:
    async with AsyncExitStack() as stack:
        return await Talk(options, stack).run()


class Speaker(Protocol):
    """One conversation; see ``TalkClient.speak``."""

    async def speak(
        self,
        audio: CallerAudio,
        *,
        timeout_s: float,
        on_tick: Callable[[float, TalkLog], None],
    ) -> TalkResult: ...


class Talk:
    """One run of the command. The server and the conversation are opened when first needed."""

    def __init__(self, options: TalkOptions, stack: AsyncExitStack) -> None:
        self._options = options
        self._stack = stack
        self._calls = AsyncExitStack()
        self._vad = VadModel()
        self._server: OwnServer | None = None
        self._address: tuple[str, str | None] | None = None
        self._client: Speaker | None = None
        self._show = Console(highlight=False)
        self._notes = Console(stderr=True, highlight=False)

    async def run(self) -> bool:
        """All recordings, one after the other."""
        try:
            return await self._say_all()
        finally:
            # Before a server of ours ends, which waits for running turns to be over.
            await self._hang_up()

    async def _say_all(self) -> bool:
        all_answered = True
        for path in self._options.files:
            try:
                result = await self._say(path)
                self._report(result)
                all_answered &= result.turns[-1].status != "failed"
            except (ParleyError, OSError) as error:
                all_answered = False
                self._report_failure(path, error)
                if not self._may_go_on(error):
                    return False
            if not self._options.same_conversation:
                await self._hang_up()
        return all_answered

    def _may_go_on(self, error: Exception) -> bool:
        """Whether the next recording has a chance after this failure."""
        if isinstance(error, AudioInputError | NoSpeechError):
            return True
        if self._server is not None and self._server.has_died:
            return False
        # No server, no folder to write to, or a conversation that is broken for good.
        return isinstance(error, TalkError) and not (
            self._options.same_conversation or self._client is None
        )

    async def _say(self, path: Path) -> TalkResult:
        audio = load_caller_audio(path, self._vad)
        client = await self._call()
        try:
            with self._progress(audio) as on_tick:
                return await client.speak(audio, timeout_s=self._options.timeout_s, on_tick=on_tick)
        except TalkError as error:
            if self._server is not None and self._server.has_died:
                raise TalkError(self._server.death_notice()) from error
            raise

    async def _call(self) -> Speaker:
        if self._client is None:
            url, api_key = await self._find_server()
            self._client = await self._calls.enter_async_context(self._open(url, api_key))
        return self._client

    def _open(self, url: str, api_key: str | None) -> AbstractAsyncContextManager[Speaker]:
        return open_talk(url, api_key=api_key)

    async def _hang_up(self) -> None:
        self._client = None
        await self._calls.aclose()

    async def _find_server(self) -> tuple[str, str | None]:
        if self._address is None:
            if self._options.url is not None:
                self._address = self._options.url, self._options.api_key
            else:
                settings = load_settings(home=self._options.home)
                key = self._options.api_key or next(iter(settings.api_keys), None)
                self._address = await self._start_server(), key
        return self._address

    async def _start_server(self) -> str:
        settings = load_settings(home=self._options.home)
        # Here rather than in the server, so that a first start shows its downloads.
        fetch_models(ModelStore(settings.home), configured_models(settings), self._notes)
        title = "Starting the server"
        with self._notes.status(title) as status:

            def on_log(line: str) -> None:
                status.update(Text.assemble(title, ("  " + line[-60:], "dim")))

            self._server = await self._stack.enter_async_context(
                own_server(home=self._options.home, on_log=on_log, settings=self._own_settings())
            )
        return self._server.url

    def _own_settings(self) -> dict[str, str]:
        """Environment variables of a server of our own."""
        return {}

    @contextmanager
    def _progress(self, audio: CallerAudio) -> Iterator[_OnTick]:
        progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            console=self._notes,
            transient=True,
            # Ten redraws a second are plenty, and leave the processor to the server.
            refresh_per_second=10,
            disable=not self._notes.is_terminal,
        )
        with progress:
            yield _OnTick(progress, audio)

    def _report(self, result: TalkResult) -> None:
        written = self._write(result)
        if self._options.as_json:
            self._show.print(json.dumps(rounded(result.to_dict())), soft_wrap=True, markup=False)
        else:
            self._show.print(render(result, written))

    def _write(self, result: TalkResult) -> list[tuple[str, Path]]:
        """Writes what was asked for; titles and paths of it. Raises OSError."""
        stem = result.audio.path.stem
        written = []
        if reply := self._place(self._options.out, f"{stem}.reply.wav"):
            write_mono(reply, result.reply_audio)
            written.append(("reply", reply))
        elif not self._options.as_json:
            reply = Path(f"{stem}.reply.wav")
            write_mono(reply, result.reply_audio)
            written.append(("reply", reply))
        if both := self._place(self._options.record, f"{stem}.both.wav"):
            result.recording.write(both)
            written.append(("both sides", both))
        return written

    def _place(self, place: Path | None, name: str) -> Path | None:
        return place / name if place is not None and len(self._options.files) > 1 else place

    def _report_failure(self, path: Path, error: ParleyError | OSError) -> None:
        code = error.code if isinstance(error, ParleyError) else "cannot_write"
        message = error.message if isinstance(error, ParleyError) else str(error)
        if self._options.as_json:
            failure = {"file": str(path), "error": {"code": code, "message": message}}
            self._show.print(json.dumps(failure), soft_wrap=True, markup=False)
        self._notes.print(Text.assemble(("parley: ", "bold red"), message), soft_wrap=True)


class _OnTick:
    """Keeps the progress bar up to date while the caller speaks."""

    def __init__(self, progress: Progress, audio: CallerAudio) -> None:
        self._progress = progress
        self._audio = audio
        self._task = progress.add_task(audio.path.name, total=audio.duration_s)

    def __call__(self, now_s: float, log: TalkLog) -> None:
        self._progress.update(
            self._task,
            completed=min(now_s, self._audio.duration_s),
            description=f"{self._audio.path.name}  {self._state(now_s, log)}",
        )

    def _state(self, now_s: float, log: TalkLog) -> str:
        if log.recording.reply_end > now_s * RATE:
            return "Parley speaks"
        if log.is_caller_speaking or now_s < self._audio.duration_s:
            return "speaking" if log.is_caller_speaking else "playing the recording"
        if any(turn.awaits_response or turn.is_running for turn in log.turns):
            return "Parley thinks"
        return "listening"


def rounded(value: Any) -> Any:
    """The same JSON value with three decimals: what is beyond is noise."""
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def render(result: TalkResult, written: list[tuple[str, Path]]) -> Group:
    """A person's view of a result."""
    title = Text.assemble(
        (result.audio.path.name, "bold"),
        (f"  {result.audio.duration_s:.1f} s, {result.audio.source_rate / 1000:g} kHz", "dim"),
    )
    words = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    words.add_column(no_wrap=True, style="dim")
    words.add_column(overflow="fold")
    for turn in result.turns:
        unheard = "(goes on below)" if turn.is_withdrawn else "(nothing)"
        words.add_row("You", Text(turn.transcript or unheard))
        words.add_row("Parley", _reply_text(turn))
    last = result.turns[-1]
    parts: list[Text | Table] = [words, Text()]
    if len(result.turns) > 1:
        parts.append(Text(f"The last of {len(result.turns)} turns:", style="dim"))
    parts.append(
        waterfall(last.trace)
        if last.trace is not None
        else Text("no stages: the server sends no turn traces", style="dim")
    )
    if note := early_note(last.trace or {}):
        parts.append(Text(note, style="dim"))
    if (gap_ms := result.gaps_ms[-1]) is not None:
        parts.append(Text(f"silence in the recording of both sides: {gap_ms:,.0f} ms", style="dim"))
    for name, path in written:
        parts.append(Text(f"{name} written to {path}", style="dim"))
    for message in result.errors:
        parts.append(Text(f"the server complained: {message}", style="yellow"))
    return Group(title, Padding(Group(*parts), (0, 0, 1, 2)))


def _reply_text(turn: LoggedTurn) -> Text:
    text = Text(turn.reply or "(no words)")
    if turn.status == "failed":
        return Text(f"the answer failed: {turn.failure}", style="red")
    if turn.status == "cancelled":
        text.append("  (taken back)" if turn.is_withdrawn else "  (interrupted)", style="dim")
    if turn.status == "incomplete":
        text.append("  (cut short)", style="dim")
    return text
