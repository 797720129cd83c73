"""The async front of an engine that runs in a process of its own.

``EngineClient`` is what the rest of Parley uses. ``_EngineProcess`` is one life of the process:
when it dies its requests fail, and the next use starts another one.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from llm_core import ipc
from llm_core.errors import (
    EngineDiedError,
    InvalidRequestError,
    LlmError,
    ModelLoadError,
    from_code,
)
from llm_core.messages import (
    ChatMessage,
    EngineConfig,
    EngineStats,
    FirstToken,
    GenerationDone,
    GenerationEvent,
    ModelInfo,
    PrefillResult,
    SamplingParams,
    TextDelta,
    TokenLogprob,
)

logger = logging.getLogger("llm_core.client")

_EXIT_TIMEOUT_S = 5.0

_Final = GenerationDone | PrefillResult | EngineStats


class EngineClient:
    """A running engine. One event loop; any number of requests at once."""

    def __init__(self, config: EngineConfig, *, start_timeout_s: float = 120.0) -> None:
        """Use ``start``."""
        self._config = config
        self._start_timeout_s = start_timeout_s
        self._process: _EngineProcess | None = None
        self._starting: asyncio.Task[_EngineProcess] | None = None
        self._is_closed = False

    @classmethod
    async def start(cls, config: EngineConfig, *, start_timeout_s: float = 120.0) -> EngineClient:
        """Starts the process and loads the model. Raises ModelLoadError."""
        client = cls(config, start_timeout_s=start_timeout_s)
        try:
            await client._running_process()
        except BaseException:
            await client.close()
            raise
        return client

    @property
    def info(self) -> ModelInfo:
        """What is loaded."""
        assert self._process is not None, "start() returns a client that has started"
        return self._process.info

    @property
    def is_alive(self) -> bool:
        """False after the process died, until the next use or ``restart`` starts another."""
        return self._process is not None and self._process.is_alive

    async def generate(
        self, messages: Sequence[ChatMessage], params: SamplingParams
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Streams a reply: FirstToken, TextDelta ..., GenerationDone.

        Closing the generator (break with aclose, or cancelling the task) aborts the request in the
        engine at once. Text that the consumer has not taken yet is joined into one TextDelta.
        Raises InvalidRequestError, PromptTooLongError, EngineBusyError, EngineDiedError.
        """
        process = await self._running_process()
        request_id = process.new_id()
        stream = process.open(ipc.Generate(request_id, tuple(messages), params))
        try:
            await process.drain()
            while True:
                event = await stream.next()
                assert not isinstance(event, PrefillResult | EngineStats), "a reply is text"
                yield event
                if isinstance(event, GenerationDone):
                    return
        finally:
            process.close_stream(request_id)

    async def prefill(self, messages: Sequence[ChatMessage]) -> PrefillResult:
        """Computes the KV of a prompt (with the header of the reply), so that ``generate`` with it,
        or with one that begins alike, starts sooner. Cancelling aborts. Raises as ``generate``."""
        process = await self._running_process()
        request_id = process.new_id()
        result = await process.ask(request_id, ipc.Prefill(request_id, tuple(messages)))
        assert isinstance(result, PrefillResult), "prefill is answered by its result"
        return result

    async def stats(self) -> EngineStats:
        """A snapshot, in which all that this client asked or aborted before is counted."""
        process = await self._running_process()
        request_id = process.new_id()
        stats = await process.ask(request_id, ipc.GetStats(request_id))
        assert isinstance(stats, EngineStats), "stats are answered by stats"
        return stats

    async def restart(self) -> None:
        """Starts a new process if the old one has died. Raises ModelLoadError."""
        await self._running_process()

    async def close(self) -> None:
        """Ends the process; running requests fail with EngineDiedError. May be called twice."""
        self._is_closed = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if self._process is not None:
            await self._process.close()

    async def _running_process(self) -> _EngineProcess:
        if self._is_closed:
            raise EngineDiedError("the engine client is closed")
        if self._process is not None and self._process.is_alive:
            return self._process
        # A task of its own: all who need the engine wait for one start, and a caller who does not
        # want to wait any longer neither stops it for the others nor waits for its end.
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start_process(), name="llm-engine-start")
            self._starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            return await asyncio.shield(self._starting)
        except asyncio.CancelledError:
            if self._starting.cancelled():  # by `close`
                raise EngineDiedError("the engine client was closed") from None
            raise

    async def _start_process(self) -> _EngineProcess:
        if self._process is not None:
            logger.warning("restarting the engine process")
            await self._process.close()
        self._process = await _EngineProcess.start(self._config, self._start_timeout_s)
        return self._process


class _Stream:
    """What a request has received and its consumer has not taken.

    Bounded without dropping anything: texts that wait are joined, so at most three events wait,
    and the reading side never has to.
    """

    def __init__(self) -> None:
        self._first: FirstToken | None = None
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._num_tokens = 0
        self._final: _Final | LlmError | None = None
        self._changed = asyncio.Event()

    @property
    def is_final(self) -> bool:
        """The engine has nothing more to say."""
        return self._final is not None

    def push(self, event: FirstToken | TextDelta | _Final | LlmError) -> None:
        if isinstance(event, FirstToken):
            self._first = event
        elif isinstance(event, TextDelta):
            self._texts.append(event.text)
            self._logprobs.extend(event.logprobs)
            self._num_tokens = event.num_tokens
        elif self._final is None:
            self._final = event
        self._changed.set()

    async def next(self) -> FirstToken | TextDelta | _Final:
        """The next event in order. Raises the error that ended the request."""
        await self._changed.wait()
        if self._first is not None:
            first, self._first = self._first, None
            self._settle()
            return first
        if self._texts:
            text, self._texts = "".join(self._texts), []
            logprobs, self._logprobs = tuple(self._logprobs), []
            self._settle()
            return TextDelta(text=text, num_tokens=self._num_tokens, logprobs=logprobs)
        final = self._final
        assert final is not None, "changed is set only while something waits"
        if isinstance(final, LlmError):
            raise final
        return final

    def _settle(self) -> None:
        if not self._texts and self._final is None:
            self._changed.clear()


class _EngineProcess:
    """One life of the engine process, and the streams that hang on it."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count(1)
        self._streams: dict[int, _Stream] = {}
        self._reading: asyncio.Task[None] | None = None
        self._info: ModelInfo | None = None
        self._is_closing = False
        self._has_ended = False

    @classmethod
    async def start(cls, config: EngineConfig, timeout_s: float) -> _EngineProcess:
        """Spawns the process and waits until its model is loaded. Raises ModelLoadError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            try:
                process = await asyncio.create_subprocess_exec(
                    *_command_line(theirs.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env=_environment(config.num_threads),
                )
            except BaseException as error:
                writer.close()
                if isinstance(error, OSError):
                    message = f"the engine process cannot be started: {error}"
                    raise ModelLoadError(message) from error
                raise
        # From here on ``close`` ends the process; nothing may wait in between.
        engine = cls(process, reader, writer)
        try:
            async with asyncio.timeout(timeout_s):
                await engine._load(config)
        except TimeoutError as error:
            await engine.close()
            raise ModelLoadError(f"the engine was not ready after {timeout_s:g} s") from error
        except BaseException:
            await engine.close()
            raise
        return engine

    @property
    def info(self) -> ModelInfo:
        assert self._info is not None, "start() returns a process that has loaded"
        return self._info

    @property
    def is_alive(self) -> bool:
        return self._reading is not None and not self._has_ended

    def new_id(self) -> int:
        return next(self._ids)

    def open(self, command: ipc.Generate | ipc.Prefill | ipc.GetStats) -> _Stream:
        """Sends a command; its events go to the stream until ``close_stream``."""
        try:
            frame = ipc.encode_command(command)
        except ipc.ProtocolError as error:
            raise InvalidRequestError(f"the request cannot be sent: {error}") from error
        stream = _Stream()
        self._streams[command.request_id] = stream
        self._writer.write(frame)
        return stream

    def close_stream(self, request_id: int) -> None:
        """Forgets a stream, and aborts its request if the engine is not done with it. Does not
        wait, so that it works in a task that is being cancelled."""
        stream = self._streams.pop(request_id, None)
        if stream is not None and not stream.is_final and self.is_alive:
            self._writer.write(ipc.encode_command(ipc.Abort(request_id)))

    async def ask(
        self, request_id: int, command: ipc.Prefill | ipc.GetStats
    ) -> FirstToken | TextDelta | _Final:
        """Sends a command that has one answer, and waits for it."""
        stream = self.open(command)
        try:
            await self.drain()
            return await stream.next()
        finally:
            self.close_stream(request_id)

    async def drain(self) -> None:
        """Waits while the engine takes commands slower than they are written."""
        try:
            await self._writer.drain()
        except ConnectionError:
            logger.debug("the engine has closed the connection")  # the stream brings the reason

    async def close(self) -> None:
        """Ends the process and waits for it; by force if it does not listen."""
        self._is_closing = True
        self._writer.close()
        if self._info is None and self._process.returncode is None:
            self._process.kill()  # still loading: it would look at the socket only afterwards
        try:
            async with asyncio.timeout(_EXIT_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            logger.warning("the engine process does not end, killing it")
            self._process.kill()
            await self._process.wait()
        if self._reading is not None:
            await self._reading
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            logger.debug("the engine closed the connection first")

    async def _load(self, config: EngineConfig) -> None:
        self._writer.write(ipc.encode_command(ipc.Start(config)))
        try:
            events = await ipc.read_events(self._reader)
        except ipc.ProtocolError as error:
            raise ModelLoadError(f"the engine process is not understood: {error}") from error
        match events:
            case [ipc.Ready(info)]:
                self._info = info
                # Serves all callers: it must not carry the log context of the one that started it.
                self._reading = asyncio.create_task(
                    self._read(), name="llm-engine-events", context=contextvars.Context()
                )
            case [ipc.StartFailed(code, message)]:
                raise from_code(code, message)
            case _:
                status = await self._exit_status()
                raise ModelLoadError(
                    f"the engine process {status} before its model was loaded; "
                    "the reason is in its log (standard error)"
                )

    async def _read(self) -> None:
        reason = ""
        try:
            while (events := await ipc.read_events(self._reader)) is not None:
                for event in events:
                    self._dispatch(event)
        except ipc.ProtocolError as error:
            reason = f" ({error})"
        self._has_ended = True
        self._writer.close()
        status = "was closed" if self._is_closing else await self._exit_status()
        if not self._is_closing:
            logger.error("the engine process %s%s", status, reason)
        message = f"the engine process {status}{reason} while the request was running"
        if not self._is_closing:
            message += "; the next request starts a new one"
        for stream in self._streams.values():
            stream.push(EngineDiedError(message))
        self._streams.clear()

    def _dispatch(self, event: ipc.Event) -> None:
        if isinstance(event, ipc.Ready | ipc.StartFailed):
            raise ipc.ProtocolError("a start event after the start")
        stream = self._streams.get(event.request_id)
        if stream is None:
            return  # aborted while the event was on its way
        match event:
            case ipc.Generated(_, generated):
                stream.push(generated)
            case ipc.Prefilled(_, result):
                stream.push(result)
            case ipc.Stats(_, stats):
                stream.push(stats)
            case ipc.Failed(_, code, message):
                stream.push(from_code(code, message))

    async def _exit_status(self) -> str:
        """How the process ended, for people; kills it if it has only closed its socket."""
        try:
            async with asyncio.timeout(1.0):
                status = await self._process.wait()
        except TimeoutError:
            self._process.kill()
            return "closed its connection"
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"exited with status {status}"


def _command_line(descriptor: int) -> list[str]:
    level = logging.getLevelName(logger.getEffectiveLevel())
    # -P: what lies in the current directory must not be imported instead of us.
    command = [sys.executable, "-P", "-m", "llm_core.worker", "--fd", str(descriptor)]
    return [*command, "--log-level", level]


def _environment(num_threads: int) -> dict[str, str]:
    """The process's environment: our package importable, and the thread settings.

    They must be set before torch is loaded. A single thread has no parallel regions to wait in.
    With more, spinning between regions is what makes them pay (sleeping costs about 50 us a region,
    more than most matmuls of a small model), but spinning threads that share a core with other work
    are many times slower than one thread: so ask for more only on a machine with cores to spare.
    OMP_WAIT_POLICY, where the operator sets it, is left alone.
    """
    environment = dict(os.environ)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        environment[name] = str(num_threads)
    environment.setdefault("OMP_WAIT_POLICY", "passive" if num_threads == 1 else "active")
    environment["TOKENIZERS_PARALLELISM"] = "false"
    # A row of logits is freed and needed again at every step: kept, its pages need no new zeroes
    # (a sampled token takes 0.15 ms instead of 0.32 at 49k tokens).
    environment.setdefault("MALLOC_MMAP_THRESHOLD_", str(32 << 20))
    environment.setdefault("MALLOC_TRIM_THRESHOLD_", str(256 << 20))
    ours = str(Path(__file__).resolve().parent.parent)
    others = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{ours}{os.pathsep}{others}" if others else ours
    return environment
