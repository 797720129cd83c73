"""The files and functions that one spoken turn over WebRTC runs through.

    python -m bench.structure.turn_path [--tree DIR] [--json OUT] [--count NAME ...]

Starts a real server of a source tree (this one, or the checkout DIR), with default settings and the
embedded models, and makes one WebRTC call with one synthesised question. A profile function in the
server and in its engine process (``bench.structure.call_recorder``) records what is called from the
first sample of the question until the spoken answer has been played and its trace is stored. Code
that is only imported does not count. The C sources count as files when the library that was
compiled from them is loaded: calls into C are not followed one by one.

A second server without the profile function answers the same question again and again for the CPU
time of a turn. ``--count`` adds the number of calls of a function, by the end of its dotted name.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import json
import os
import shutil
import sqlite3
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from app.clients.server_process import OwnServer, own_server
from app.config import load_settings
from app.errors import ParleyError
from app.models.store import ModelStore
from audio.resample import resample
from audio.tts.synthesizer import Synthesizer
from bench.harness.figures import cpu_seconds
from bench.harness.results import Result, add_json_option, report
from bench.structure import call_recorder
from tests.support.rtc_client import RATE, Pcm, RtcClient

PRODUCT = ("app", "audio", "llm_core", "kernels")
# Renders and tokenisations of a conversation, each once for every time it is sent to the engine.
COUNTED = ("ChatTemplate.render", "Tokenizer.encode_pieces")
QUESTION = "What is a good way to start running?"
_TURN_TIMEOUT_S = 180.0  # other programs may take the processors
_STORE_TIMEOUT_S = 60.0
_NATIVE_PREFIX = "parley-"


@dataclass
class TurnPath:
    """Files of one turn with their lines, and how often the functions in them were called.

    ``files``: every file of the turn, by path relative to the tree. ``call_files``: those that only
    set-up of the call needs. ``calls``: by ``path:qualified name``.
    """

    files: dict[str, int]
    call_files: dict[str, int]
    calls: Counter[str]
    uses_native: bool
    counts: dict[str, int] = field(default_factory=dict)
    cpu_s: float | None = None
    cpu_turns: int = 0

    def packages(self) -> Iterator[tuple[str, int, int]]:
        """(package, files, lines), sorted; modules directly in a top-level folder are one part."""
        parts = [path.split("/") for path in self.files]
        names = sorted({"/".join(p[:2]) if len(p) > 2 else f"{p[0]}/*.py" for p in parts})
        for name in names:
            top = name.removesuffix("/*.py")
            chosen = [
                path
                for path in self.files
                if (path.rpartition("/")[0] == top if name.endswith("*.py") else True)
                and path.startswith(f"{top}/")
            ]
            yield name, len(chosen), sum(self.files[path] for path in chosen)

    def result(self) -> Result:
        """The figures, with every file and its lines."""
        compiled = [path for path in self.files if path.endswith((".c", ".h"))]
        result = Result(("measure", "value"), details={"files": self.files})
        result.add("files of the turn", len(self.files))
        result.add("lines of these files", sum(self.files.values()))
        result.add("of the files, C sources of the native decoder", len(compiled))
        result.add("of the lines, C", sum(self.files[path] for path in compiled))
        result.add("functions called", len(self.calls))
        result.add("further files for the set-up of the call", len(self.call_files))
        result.add("lines of these", sum(self.call_files.values()))
        for name, num_files, lines in self.packages():
            result.add(f"files in {name}", num_files)
            result.add(f"lines in {name}", lines)
        for name, count in self.counts.items():
            result.add(f"calls of {name}", count)
        if self.cpu_s is not None:
            result.add("CPU seconds a turn, server and engine, not profiled", self.cpu_s)
        return result


def question_audio(text: str) -> Pcm:
    """``text`` spoken by the installed voice without its random variation, 48 kHz."""
    settings = load_settings()
    model = ModelStore(settings.home).resolve(settings.tts_model)
    voice = Synthesizer(model, noise_scale=0.0, noise_w_scale=0.0)
    speech = resample(voice.synthesize(text), voice.sample_rate, RATE)
    return (speech.clip(-1, 1) * 32_767).astype(np.int16)


class Server:
    """A server of ``tree`` with an empty home that shares the installed models."""

    def __init__(self, tree: Path, folder: Path, *, is_recorded: bool) -> None:
        settings = load_settings()
        self._tree = tree
        self._home = folder / "home"
        self._home.mkdir()
        (self._home / "models").symlink_to(settings.home / "models")
        self._recorded = folder / "recorded" if is_recorded else None
        self.environment = {
            "PYTHONPATH": str(tree),
            "PARLEY_NATIVE_DIR": str(settings.compiled_dir),
            # It starts beside the first turns, for when the engine process dies.
            "PARLEY_LLM_STANDBY": "false",
        }
        if self._recorded is not None:
            self._recorded.mkdir()
            shutil.copy(call_recorder.__file__, self._recorded / "sitecustomize.py")
            self.environment |= {
                "PYTHONPATH": os.pathsep.join((str(self._recorded), str(tree))),
                "PARLEY_RECORDER_ROOT": str(tree),
                "PARLEY_RECORDER_DIR": str(self._recorded),
            }

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[OwnServer]:
        """The server, ready for calls."""
        async with own_server(home=self._home, settings=self.environment) as server:
            yield server

    def num_traces(self) -> int:
        """Turns in the trace database."""
        path = self._home / "traces.db"
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            (count,) = database.execute("SELECT count(*) FROM turns").fetchone()
        return int(count)

    async def begin_phase(self, name: str, ended: str = "") -> list[dict[str, Any]]:
        """Let all processes record for phase ``name``; returns what each recorded in ``ended``."""
        if self._recorded is None:
            return []
        processes = [path.name.split(".")[1] for path in self._recorded.glob("process.*.json")]
        temporary = self._recorded / "phase.part"
        temporary.write_text(name)
        temporary.replace(self._recorded / "phase")
        if not ended:
            await asyncio.sleep(0.2)  # ten times the interval at which they look
            return []
        paths = [self._recorded / f"{ended}.{pid}.json" for pid in processes]
        async with asyncio.timeout(_STORE_TIMEOUT_S):
            while not all(path.exists() or not _is_alive(path) for path in paths):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return [json.loads(path.read_text()) for path in paths if path.exists()]


def _is_alive(path: Path) -> bool:
    return Path("/proc", path.name.split(".")[1]).exists()


async def ask(client: RtcClient, server: Server, question: Pcm) -> None:
    """One turn: returns when the answer has been played and its trace is stored."""
    num_before = server.num_traces()
    client.microphone.say(question)
    try:
        await client.until("output_audio_buffer.stopped", _TURN_TIMEOUT_S)
    except TimeoutError as error:
        raise ParleyError(f"the question was not answered; events: {client.names()}") from error
    async with asyncio.timeout(_STORE_TIMEOUT_S):
        while server.num_traces() == num_before:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def record_turn(tree: Path, question: Pcm, counted: list[str]) -> TurnPath:
    """The path of one turn. Raises ParleyError when nothing of ``tree`` was called."""
    with tempfile.TemporaryDirectory(prefix="parley-path-") as name:
        server = Server(tree, Path(name), is_recorded=True)
        async with server.running() as running:
            await server.begin_phase("call")
            async with RtcClient(running.url) as client:
                await client.connect()
                await asyncio.sleep(1.0)  # what a new session computes in advance
                of_call = await server.begin_phase("turn", ended="call")
                await ask(client, server, question)
                of_turn = await server.begin_phase("", ended="turn")
    calls = _called(of_turn)
    if not calls:
        raise ParleyError(f"no function of {tree} was called: is it a checkout of Parley?")
    paths = {place.partition(":")[0] for place in calls}
    uses_native = any(
        library.startswith(_NATIVE_PREFIX) for found in of_turn for library in found["libraries"]
    )
    if uses_native:
        paths |= {str(path.relative_to(tree)) for path in c_sources(tree)}
    set_up = {place.partition(":")[0] for place in _called(of_call)} - paths
    return TurnPath(
        files={path: num_lines(tree / path) for path in sorted(paths)},
        call_files={path: num_lines(tree / path) for path in sorted(set_up)},
        calls=calls,
        uses_native=uses_native,
        counts={name: sum(calls[place] for place in places_of(tree, name)) for name in counted},
    )


async def cpu_s_a_turn(tree: Path, question: Pcm, num_turns: int) -> float:
    """CPU seconds of server and engine for one of ``num_turns`` turns, the first not counted."""
    with tempfile.TemporaryDirectory(prefix="parley-path-") as name:
        server = Server(tree, Path(name), is_recorded=False)
        async with server.running() as running, RtcClient(running.url) as client:
            await client.connect()
            await ask(client, server, question)
            before_s = cpu_seconds(running.process.pid)
            for _ in range(num_turns):
                await ask(client, server, question)
            after_s = cpu_seconds(running.process.pid)
    if before_s is None or after_s is None:
        raise ParleyError("the CPU time of the server cannot be read from /proc")
    return round((after_s - before_s) / num_turns, 3)


def _called(recorded: list[dict[str, Any]]) -> Counter[str]:
    calls: Counter[str] = Counter()
    for found in recorded:
        for path, functions in found["functions"].items():
            if path.split("/")[0] in PRODUCT:
                calls.update({f"{path}:{name}": count for name, count in functions.items()})
    return calls


def c_sources(tree: Path) -> list[Path]:
    """The sources and headers that the native library is compiled from."""
    sources = (path for suffix in ("*.c", "*.h") for path in (tree / "kernels").rglob(suffix))
    return sorted(sources)


def num_lines(path: Path) -> int:
    return len(path.read_bytes().splitlines())


def places_of(tree: Path, dotted_name: str) -> list[str]:
    """``path:qualified name`` of the functions that ``dotted_name`` is the end of.

    Raises ParleyError when the tree has none: 0 calls would look like a result.
    """
    found = []
    for top in PRODUCT:
        for path in sorted((tree / top).rglob("*.py")):
            relative = str(path.relative_to(tree))
            module = relative.removesuffix(".py").replace("/", ".")
            for name in _functions(ast.parse(path.read_bytes()), ""):
                if f".{module}.{name}".endswith(f".{dotted_name}"):
                    found.append(f"{relative}:{name}")
    if not found:
        raise ParleyError(f"--count {dotted_name}: {tree} has no function of that name")
    return found


def _functions(node: ast.AST, prefix: str) -> Iterator[str]:
    """Qualified names, as ``__qualname__`` has them, of the functions below ``node``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{child.name}"
            yield from _functions(child, f"{prefix}{child.name}.<locals>.")
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        else:
            yield from _functions(child, prefix)


def show_files(path: TurnPath) -> None:
    """One line a file, with the first functions that were called in it."""
    for file, lines in path.files.items():
        names = [place.partition(":")[2] for place in path.calls if place.startswith(f"{file}:")]
        called = ", ".join(names[:3]) if names else "(compiled in)"
        print(f"{file:56} {lines:5} lines {len(names):3} functions: {called}")
    library = (
        "loaded: all C sources count" if path.uses_native else "not loaded: no C source counts"
    )
    print(f"\nThe native library was {library}.\n")


async def measure(arguments: argparse.Namespace) -> TurnPath:
    counted = [*COUNTED, *arguments.count]
    for name in counted:
        places_of(arguments.tree, name)  # a wrong name is refused before the minutes of a call
    question = question_audio(arguments.say)
    path = await record_turn(arguments.tree, question, counted)
    if arguments.cpu_turns:
        path.cpu_s = await cpu_s_a_turn(arguments.tree, question, arguments.cpu_turns)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    root = Path(__file__).resolve().parents[2]
    parser.add_argument("--tree", type=Path, default=root, help="another checkout of the project")
    parser.add_argument("--say", default=QUESTION, help="the question")
    parser.add_argument("--count", nargs="+", default=[], metavar="NAME", help="of functions")
    parser.add_argument("--cpu-turns", type=int, default=4, help="0: CPU time is not measured")
    add_json_option(parser)
    arguments = parser.parse_args()
    arguments.tree = arguments.tree.resolve()
    try:
        path = asyncio.run(measure(arguments))
    except ParleyError as error:
        sys.exit(str(error))
    show_files(path)
    report(path.result(), arguments)


if __name__ == "__main__":
    main()
