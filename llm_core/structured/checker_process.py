"""Compiles guides in processes that can be killed.

Started as ``python -m llm_core.structured.checker_process --fd N``.

llguidance compiles in one uninterruptible call, whose time none of its limits bounds: a schema of
forty characters can keep it busy for ever. So each guide is first compiled here, in a fork of this
process with limits of CPU time and memory; what passes is compiled again by the engine, which then
knows that it ends. This process has read the vocabulary, so a fork has only the guide to compile.

::

    engine --(Setup, then one CheckGuide after another)--> guide_check --fork--> compile, and end
           <------------------ Checked -------------------              <--pipe-- or be killed
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import resource
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from llm_core import ipc
from llm_core.errors import InvalidRequestError, is_fault
from llm_core.messages import Guide, ToolFormat
from llm_core.process_logging import add_log_arguments, start_logging
from llm_core.structured.compiler import Vocabulary, compile_grammar
from llm_core.structured.grammar import grammar_of, name_of

if TYPE_CHECKING:
    import llguidance

logger = logging.getLogger("llm_core.structured.checker_process")

# The largest of what people write (128 functions, 300 properties) takes 0.1 s.
CPU_LIMIT_S = 1.0
# For a machine that is busy otherwise; then it is nobody's fault.
WALL_LIMIT_S = 10.0
MEMORY_LIMIT_BYTES = 256 << 20
# Replies that run come before guides of replies that do not.
NICENESS = 5


class Setup(msgspec.Struct, frozen=True):
    """The first message."""

    vocabulary: Vocabulary
    tool_format: ToolFormat


class CheckGuide(msgspec.Struct, frozen=True):
    """Asks for one Checked."""

    guide: Guide


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """``grammar`` can be compiled within the limits, and takes ``num_bytes`` of memory, about.
    Otherwise ``error`` says why the guide is refused; or there was no time to find out
    (``is_late``)."""

    grammar: str = ""
    num_bytes: int = 0
    error: str = ""
    is_late: bool = False


def check(guide: Guide, library: llguidance.LLTokenizer, tool_format: ToolFormat) -> Checked:
    """Compiles in a fork. Returns within WALL_LIMIT_S."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _compile_and_exit(guide, library, tool_format, writing)
    os.close(writing)
    answer = _read_until(reading, time.monotonic() + WALL_LIMIT_S)
    os.close(reading)
    if answer is None:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if answer is None:
        return Checked(is_late=True)
    if os.WIFEXITED(status) and answer:
        return msgspec.msgpack.decode(answer, type=Checked)
    return Checked(error=f"{name_of(guide)}: {_why(os.WTERMSIG(status))}")


def _compile_and_exit(
    guide: Guide, library: llguidance.LLTokenizer, tool_format: ToolFormat, pipe: int
) -> NoReturn:
    """The forked process."""
    try:
        _limit_self()
        before = _peak_bytes()
        try:
            grammar = grammar_of(guide, tool_format)
            compile_grammar(library, grammar)
            checked = Checked(grammar=grammar.text, num_bytes=_peak_bytes() - before)
        except InvalidRequestError as error:
            checked = Checked(error=str(error))
        except MemoryError:
            checked = Checked(error=f"{name_of(guide)}: {_why(signal.SIGABRT)}")
        except BaseException as error:
            if not is_fault(error):
                raise
            reason = f"{type(error).__name__}: {error}"[:300]
            checked = Checked(error=f"{name_of(guide)}: it cannot be compiled: {reason}")
        with os.fdopen(pipe, "wb") as stream:
            stream.write(msgspec.msgpack.encode(checked))
    finally:
        os._exit(0)  # nothing of the process that was forked is to be cleaned up


def _limit_self() -> None:
    """A process above a limit is ended by a signal, also in the middle of foreign code."""
    # What is said as it dies would be no line of our log.
    faulthandler.disable()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # Linux; others do not have this limit
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY_LIMIT_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)


def _why(number: int) -> str:
    match signal.Signals(number):
        case signal.SIGPROF:
            return f"compiling it takes more than {CPU_LIMIT_S:g} s"
        case signal.SIGABRT:
            return f"compiling it takes more than {MEMORY_LIMIT_BYTES >> 20} MB"
        case other:
            return f"compiling it fails ({other.name})"


def _read_until(pipe: int, end_s: float) -> bytes | None:
    """All that is written to the pipe until it is closed; None when that is too late."""
    parts: list[bytes] = []
    while select.select([pipe], [], [], max(0.0, end_s - time.monotonic()))[0]:
        part = os.read(pipe, 1 << 20)
        if not part:
            return b"".join(parts)
        parts.append(part)
    return None


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def serve(connection: socket.socket) -> None:
    """Reads the vocabulary, then answers until the engine closes its side. Raises ProtocolError."""
    setup = ipc.receive(connection, Setup)
    if setup is None:
        return
    library = setup.vocabulary.to_library_alone()
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    while (command := ipc.receive(connection, CheckGuide)) is not None:
        ipc.send(connection, check(command.guide, library, setup.tool_format))


def main() -> None:
    parser = argparse.ArgumentParser(description="tries guides out; started by an engine")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket")
    add_log_arguments(parser)
    arguments = parser.parse_args()
    start_logging(arguments, "guides")
    for number in (signal.SIGINT, signal.SIGTERM):  # the engine closes its side in time
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=arguments.fd) as connection, contextlib.suppress(ConnectionError):
        serve(connection)


if __name__ == "__main__":
    main()
