"""The engine process: ``python -m llm_core.worker --fd N``, started by ``client.EngineClient``.

One thread reads commands into a bounded queue; the main thread steps the engine, looks at the queue
between steps, and sleeps on it when there is nothing to compute. Requests whose guide is not
compiled wait until a third thread has done it. A fourth one tells the client all the time that the
process lives, and how long it has been at its step. The process ends when the other side of its
socket is closed, whatever the reason, so that it never outlives its parent.

A request in which something unforeseen is raised fails alone, as long as the engine's invariants
hold; otherwise the process ends, and the client starts another one.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from llm_core.client import period_s
from llm_core.engine import Engine
from llm_core.errors import (
    EngineBusyError,
    InternalError,
    InvalidRequestError,
    LlmError,
    ModelLoadError,
    is_fault,
)
from llm_core.faults import failure_of
from llm_core.ipc import (
    Abort,
    CommitDraft,
    DraftCommand,
    Event,
    Failed,
    ForkDraft,
    Generate,
    Generated,
    GetStats,
    GuidePrepared,
    OpenDraft,
    Pin,
    Prefill,
    Prefilled,
    PrepareGuide,
    Ready,
    Request,
    SetDeadline,
    Start,
    StartFailed,
    Stats,
    TruncateDraft,
    UpdateDraft,
)
from llm_core.messages import EngineConfig, GenerationEvent, Guide, GuideReady, PrefillResult
from llm_core.model_hash import content_hash
from llm_core.process_logging import add_log_arguments, log_arguments, start_logging
from llm_core.structured.checker import GuideChecker
from llm_core.structured.checker_process import Setup
from llm_core.structured.constraint import CompiledGuide, GuideCompiler
from llm_core.structured.grammar import guide_key
from llm_core.structured.preparation import GuideDesk, Prepared
from llm_core.worker_io import Heart, Inbox, Outbox, Received

logger = logging.getLogger("llm_core.worker")

# Each may take a second of the one thread that compiles guides.
_MAX_HELD = 16


class Worker:
    """Turns commands into engine calls and engine outputs into events."""

    def __init__(
        self, engine: Engine, inbox: Inbox, outbox: Outbox, desk: GuideDesk, max_held: int
    ) -> None:
        """``desk`` puts what it has prepared into the inbox; ``max_held`` requests may wait for
        it."""
        self._engine = engine
        self._inbox = inbox
        self._outbox = outbox
        self._desk = desk
        self._max_held = max_held
        self._held: dict[int, Received] = {}  # by the ids of their requests
        self._waiting: dict[bytes, list[int]] = {}  # these ids, by the keys of their guides

    def run(self) -> None:
        """Returns when the client has closed its side. Raises what ends the engine."""
        while (received := self._inbox.take(wait=not self._engine.has_work)) is not None:
            self.turn(received)

    def turn(self, received: Sequence[Received | Prepared]) -> None:
        """Handles what has arrived, and makes a step."""
        progress = self._engine.progress
        with progress.at("commands"):
            events = [event for item in received for event in self._handle(item)]
        with progress.at("step"):
            outputs = self._engine.step()
        for request_id, result in outputs:
            events.append(_event(request_id, result))
            self._check_after(result)
        if events:
            self._outbox.send(events)

    def _check_after(self, result: object) -> None:
        """Raises AssertionError when a fault has left more than its request in disorder."""
        if isinstance(result, InternalError):
            self._engine.check()

    def _handle(self, item: Received | Prepared) -> list[Event]:
        if isinstance(item, Prepared):
            return self._on_prepared(item)
        match item.command:
            case Start():
                logger.error("a second start command is ignored")
            case Abort(request_id):
                self._held.pop(request_id, None)
                self._engine.abort(request_id)
            case SetDeadline(request_id, deadline_ns):
                self._set_deadline(request_id, deadline_ns)
            case GetStats(request_id):
                stats = self._engine.stats()
                num_held = sum(isinstance(held.command, Generate) for held in self._held.values())
                stats = msgspec.structs.replace(stats, num_waiting=stats.num_waiting + num_held)
                return [Stats(request_id, stats)]
            case _:
                return self._try(item.command, item)
        return []

    def _try(self, command: Request | DraftCommand, item: Received) -> list[Event]:
        request_id = command.request_id
        try:
            if isinstance(command, PrepareGuide):
                return self._prepare(command, item)
            guide = _guide_of(command)
            if guide is not None and self._find(command, guide, item) is None:
                return []
            result = self._begin(command, item.received_ns)
        except BaseException as error:
            failure = failure_of(error, f"request {request_id}")
            if isinstance(command, CommitDraft) or isinstance(failure, InternalError):
                self._engine.abort(request_id)
            self._check_after(failure)
            return [_failed(request_id, failure)]
        return [] if result is None else [Prefilled(request_id, result)]

    def _prepare(self, command: PrepareGuide, item: Received) -> list[Event]:
        compiled = self._find(command, command.guide, item)
        if compiled is None:
            return []
        return [GuidePrepared(command.request_id, GuideReady(num_bytes=compiled.num_bytes))]

    def _find(
        self, command: Request | DraftCommand, guide: Guide, item: Received
    ) -> CompiledGuide | None:
        """The guide of a request. None: it is not compiled yet, and the request waits for it.
        Raises InvalidRequestError when it cannot be, EngineBusyError when too many wait."""
        key = guide_key(guide)
        compiled = self._engine.guides.find(key)
        if compiled is not None:
            return compiled
        if len(self._held) >= self._max_held:
            raise EngineBusyError(
                f"{len(self._held)} requests wait for their guides to be compiled; try again later"
            )
        if key not in self._waiting:
            self._waiting[key] = []
            self._desk.ask(key, guide, _priority_of(command))
        self._waiting[key].append(command.request_id)
        self._held[command.request_id] = item
        return None

    def _on_prepared(self, prepared: Prepared) -> list[Event]:
        outcome = prepared.outcome
        failure = None
        if isinstance(outcome, CompiledGuide | InvalidRequestError):
            self._engine.guides.keep(prepared.key, outcome)
        else:
            failure = outcome
        events: list[Event] = []
        for request_id in self._waiting.pop(prepared.key):
            item = self._held.pop(request_id, None)
            if item is None:
                continue  # aborted
            if failure is not None:
                self._engine.abort(request_id)  # a draft that was to be committed
                events.append(_failed(request_id, failure))
            else:
                events += self._handle(item)
        return events

    def _set_deadline(self, request_id: int, deadline_ns: int | None) -> None:
        held = self._held.get(request_id)
        if held is not None and isinstance(held.command, Generate | CommitDraft):
            options = msgspec.structs.replace(held.command.options, deadline_ns=deadline_ns)
            command = msgspec.structs.replace(held.command, options=options)
            self._held[request_id] = replace(held, command=command)
        self._engine.set_deadline(request_id, deadline_ns)

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


def _guide_of(command: Request | DraftCommand) -> Guide | None:
    return command.params.guide if isinstance(command, Generate | CommitDraft) else None


def _priority_of(command: Request | DraftCommand) -> int:
    return command.options.priority if isinstance(command, Generate | CommitDraft) else 0


def _event(request_id: int, result: GenerationEvent | PrefillResult | LlmError) -> Event:
    if isinstance(result, LlmError):
        return _failed(request_id, result)
    if isinstance(result, PrefillResult):
        return Prefilled(request_id, result)
    return Generated(request_id, result)


def _failed(request_id: int, error: LlmError) -> Failed:
    return Failed(request_id, error.code, str(error))


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


def _open_desk(compiler: GuideCompiler, start: Start, inbox: Inbox) -> GuideDesk:
    checker = None
    with contextlib.suppress(InvalidRequestError):  # this model follows no guide
        setup = Setup(compiler.vocabulary, compiler.tool_format)
        checker = GuideChecker(setup, log_arguments(logger, start.config.log_format))
    return GuideDesk(compiler, checker, inbox.put, start.known_guides)


def serve(connection: socket.socket) -> int:
    """Serves one client until it closes; returns the exit status."""
    inbox, outbox = Inbox(connection), Outbox(connection)
    try:
        received = inbox.take(wait=True)
        if not received:
            return 0
        first = received[0]
        if not (isinstance(first, Received) and isinstance(first.command, Start)):
            logger.error("the first command is not start")
            return 1
        heart = Heart(outbox, period_s(first.command.config.hang_timeout_s))
        try:
            return _serve(first.command, inbox, outbox, heart)
        finally:
            heart.stop()
    finally:
        inbox.finish()


def _serve(start: Start, inbox: Inbox, outbox: Outbox, heart: Heart) -> int:
    config = start.config
    try:
        engine = _load(config)
        content = content_hash(Path(config.model_path))
        info = msgspec.structs.replace(engine.info, content_hash=content)
    except LlmError as error:
        outbox.send([StartFailed(error.code, str(error))])
        return 1
    desk = _open_desk(engine.guides, start, inbox)
    heart.threads = (engine.progress, desk.progress)
    outbox.send([Ready(info)])
    try:
        Worker(engine, inbox, outbox, desk, _MAX_HELD).run()
    except BaseException as error:
        if not is_fault(error):
            raise
        logger.exception("the engine cannot go on, and ends")
        return 1
    finally:
        desk.close()
    return 0


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
