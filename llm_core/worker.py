"""The engine process: ``python -m llm_core.worker --fd N``, started by ``client.EngineClient``.

One thread reads commands into a bounded queue; the main thread steps the engine, looks at the queue
between steps, and sleeps on it when there is nothing to compute. The process ends when the other
side of its socket is closed, whatever the reason, so that it never outlives its parent.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from llm_core.client import (
    Abort,
    Command,
    CommitDraft,
    DraftCommand,
    Event,
    Failed,
    ForkDraft,
    Generate,
    Generated,
    GetStats,
    OpenDraft,
    Pin,
    Prefill,
    Prefilled,
    ProtocolError,
    Ready,
    Request,
    SetDeadline,
    Start,
    StartFailed,
    Stats,
    TruncateDraft,
    UpdateDraft,
    encode_events,
    receive_command,
)
from llm_core.engine import Engine, Output
from llm_core.errors import LlmError, ModelLoadError
from llm_core.messages import EngineConfig, PrefillResult
from llm_core.model_hash import content_hash
from llm_core.process_logging import add_log_arguments, start_logging

logger = logging.getLogger("llm_core.worker")

_EXIT_GRACE_S = 2.0
_MAX_COMMANDS = 1024


@dataclass(frozen=True, slots=True)
class _Received:
    command: Command
    received_ns: int


class _Inbox:
    """Commands from the socket, stamped as they arrive; None in the queue is the end.

    Bounded: when it is full the reader thread waits, the socket fills, and the client's own
    writing waits in turn. Nothing is dropped.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._queue: queue.Queue[_Received | None] = queue.Queue(_MAX_COMMANDS)
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._read, name="llm-commands", daemon=True)
        self._thread.start()

    def take(self, *, wait: bool) -> list[_Received] | None:
        """All that has arrived, after waiting for at least one if asked to; None at the end."""
        taken: list[_Received] = []
        try:
            item = self._queue.get(block=wait)
            while item is not None:
                taken.append(item)
                item = self._queue.get_nowait()
        except queue.Empty:
            return taken
        return None

    def finish(self) -> None:
        """The main thread is done; the reader need not end the process by force."""
        self._finished.set()

    def _read(self) -> None:
        try:
            while (command := receive_command(self._connection)) is not None:
                self._queue.put(_Received(command, time.monotonic_ns()))
        except ProtocolError as error:
            logger.error("command not understood: %s", error)
        try:
            self._queue.put(None, timeout=_EXIT_GRACE_S)
        except queue.Full:
            logger.warning("the step loop does not take commands any more")
        # The main thread may be deep in loading a model; the parent is gone, so go too.
        if not self._finished.wait(_EXIT_GRACE_S):
            os._exit(1)


class Worker:
    """Turns commands into engine calls and engine outputs into events."""

    def __init__(self, engine: Engine, inbox: _Inbox, connection: socket.socket) -> None:
        self._engine = engine
        self._inbox = inbox
        self._connection = connection

    def run(self) -> None:
        """Returns when the client has closed its side."""
        while (received := self._inbox.take(wait=not self._engine.has_work)) is not None:
            events = [event for item in received for event in self._handle(item)]
            events += [_event(output) for output in self._engine.step()]
            if events:
                _send(self._connection, events)

    def _handle(self, item: _Received) -> list[Event]:
        command = item.command
        match command:
            case Start():
                logger.error("a second start command is ignored")
            case Abort(request_id):
                self._engine.abort(request_id)
            case SetDeadline(request_id, deadline_ns):
                self._engine.set_deadline(request_id, deadline_ns)
            case GetStats(request_id):
                return [Stats(request_id, self._engine.stats())]
            case _:
                try:
                    result = self._begin(command, item.received_ns)
                except LlmError as error:
                    return [Failed(command.request_id, error.code, str(error))]
                if result is not None:
                    return [Prefilled(command.request_id, result)]
        return []

    def _begin(self, command: Request | DraftCommand, received_ns: int) -> PrefillResult | None:
        """What the engine answers at once, if it does. Raises LlmError."""
        engine = self._engine
        match command:
            case Generate(request_id, messages, params, options):
                engine.submit(
                    request_id, messages, params, received_ns=received_ns, options=options
                )
            case Prefill(request_id, messages, options):
                engine.submit_prefill(
                    request_id, messages, received_ns=received_ns, options=options
                )
            case Pin(request_id, messages, cache_salt):
                return engine.pin(request_id, messages, received_ns=received_ns, salt=cache_salt)
            case OpenDraft(request_id, messages, options):
                engine.open_draft(request_id, messages, received_ns=received_ns, options=options)
            case ForkDraft(request_id, source_id):
                return engine.fork_draft(request_id, source_id, received_ns=received_ns)
            case UpdateDraft(request_id, messages):
                return engine.update_draft(request_id, messages)
            case TruncateDraft(request_id, num_tokens):
                return engine.truncate_draft(request_id, num_tokens)
            case CommitDraft(request_id, params, options):
                engine.commit_draft(request_id, params, received_ns=received_ns, options=options)
        return None


def _event(output: Output) -> Event:
    request_id, result = output
    if isinstance(result, LlmError):
        return Failed(request_id, result.code, str(result))
    if isinstance(result, PrefillResult):
        return Prefilled(request_id, result)
    return Generated(request_id, result)


def _send(connection: socket.socket, events: list[Event]) -> None:
    try:
        connection.sendall(encode_events(events))
    except ConnectionError:
        # The client is gone; the inbox reports the end of its side too, and ends the loop.
        logger.info("the client has closed the connection")


def _load(config: EngineConfig) -> Engine:
    try:
        engine = Engine.load(config)
    except LlmError:
        raise
    except Exception as error:
        # A damaged file can fail anywhere in reading it; the client needs a reason, not a hang.
        logger.exception("loading the model failed")
        raise ModelLoadError(
            f"cannot load {config.model_path}: {type(error).__name__}: {error}"
        ) from error
    # What is loaded stays for good: keep the collector from walking over it between steps.
    gc.collect()
    gc.freeze()
    return engine


def serve(connection: socket.socket) -> int:
    """Serves one client until it closes; returns the exit status."""
    inbox = _Inbox(connection)
    try:
        received = inbox.take(wait=True)
        if not received:
            return 0
        first = received[0].command
        if not isinstance(first, Start):
            logger.error("the first command is not start")
            return 1
        try:
            engine = _load(first.config)
            content = content_hash(Path(first.config.model_path))
            info = msgspec.structs.replace(engine.info, content_hash=content)
        except LlmError as error:
            _send(connection, [StartFailed(error.code, str(error))])
            return 1
        _send(connection, [Ready(info)])
        Worker(engine, inbox, connection).run()
        return 0
    finally:
        inbox.finish()


def main() -> int:
    parser = argparse.ArgumentParser(description="LLM engine process; started by its client")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket")
    add_log_arguments(parser)
    arguments = parser.parse_args()
    start_logging(arguments, "engine")
    # A service manager's stop reaches all processes of the service; the parent decides, and closes
    # the socket.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=arguments.fd) as connection:
        return serve(connection)


if __name__ == "__main__":
    sys.exit(main())
