"""One life of the engine process, and the streams of events that hang on it.

``client.EngineClient`` is what others use; it starts another life when one ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import logging
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from llm_core import ipc
from llm_core.child_process import importable, module_command
from llm_core.client.heartbeat import Heartbeat
from llm_core.errors import (
    EngineDiedError,
    InvalidRequestError,
    LlmError,
    ModelLoadError,
    from_code,
)
from llm_core.messages import (
    EngineConfig,
    EngineStats,
    FirstToken,
    GenerationDone,
    GuideReady,
    ModelInfo,
    PrefillResult,
    TextDelta,
    TokenLogprob,
)
from llm_core.process_logging import log_arguments

logger = logging.getLogger("llm_core.client.engine_client")

_EXIT_TIMEOUT_S = 5.0

Final = GenerationDone | PrefillResult | GuideReady | EngineStats


class Stream:
    """What a request has received and its consumer has not taken.

    Bounded without dropping anything: texts that wait are joined, so at most three events wait,
    and the reading side never has to. Of a draft's revisions only the last one counts.
    """

    def __init__(self, *, is_draft: bool = False) -> None:
        self._is_draft = is_draft
        self._first: FirstToken | None = None
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._num_tokens = 0
        self._final: Final | LlmError | None = None
        self._computed: PrefillResult | None = None
        self._changed = asyncio.Event()
        self._pushed = asyncio.Event()

    @property
    def is_final(self) -> bool:
        """The engine has nothing more to say."""
        return self._final is not None

    def push(self, event: FirstToken | TextDelta | Final | LlmError) -> None:
        self._pushed.set()
        if isinstance(event, PrefillResult) and self._is_draft:
            self._computed = event
            return
        if isinstance(event, FirstToken):
            self._first = event
        elif isinstance(event, TextDelta):
            self._texts.append(event.text)
            self._logprobs.extend(event.logprobs)
            self._num_tokens = event.num_tokens
        elif self._final is None:
            self._final = event
        self._changed.set()

    async def next(self) -> FirstToken | TextDelta | Final:
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

    async def computed(self, revision: int) -> PrefillResult:
        """The result of a draft's ``revision``, or of a later one. Raises as ``next``."""
        while self._computed is None or self._computed.revision < revision:
            if isinstance(self._final, LlmError):
                raise self._final
            self._pushed.clear()
            await self._pushed.wait()
        return self._computed

    def _settle(self) -> None:
        if not self._texts and self._final is None:
            self._changed.clear()


class EngineProcess:
    """One life of the engine process, and the streams that hang on it."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_death: Callable[[], None],
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._on_death = on_death
        self._ids = itertools.count(1)
        self._streams: dict[int, Stream] = {}
        self._tasks: list[asyncio.Task[None]] = []  # while the engine serves
        self._heartbeat: Heartbeat | None = None
        self._info: ModelInfo | None = None
        self._is_closing = False
        self.has_begun = False
        """Has begun to load the model."""
        self._hangs_because = ""
        self._status = "is loading the model"
        self._ended = asyncio.Event()

    @classmethod
    async def spawn(cls, config: EngineConfig, on_death: Callable[[], None]) -> EngineProcess:
        """A process without a model: it has, or will have, loaded its code. Raises ModelLoadError.

        ``on_death`` is called once, if it ends after ``load`` without having been closed.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            try:
                process = await asyncio.create_subprocess_exec(
                    *_command_line(theirs.fileno(), config),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env=_environment(config),
                    # Ctrl-C reaches all of a terminal's group. The engine is to go on until the
                    # turns are over, and while it loads its code it could not even ignore it. A
                    # group of its own, not a session: Linux shares CPU time out among sessions, and
                    # the engine would have as much of it as all ears and voices together.
                    preexec_fn=os.setpgrp,
                )
            except BaseException as error:
                writer.close()
                if isinstance(error, OSError):
                    message = f"the engine process cannot be started: {error}"
                    raise ModelLoadError(message) from error
                raise
        # From here on ``close`` ends the process; nothing may wait in between.
        return cls(process, reader, writer, on_death)

    async def load(
        self, start: ipc.Start, timeout_s: float, *, begins_within_s: float | None = None
    ) -> None:
        """Waits until the model is loaded; a process that fails, or does not begin in time, is
        ended. Raises ModelLoadError."""
        limit_s = timeout_s
        try:
            self._writer.write(ipc.encode_command(start))
            async with asyncio.timeout(timeout_s) as timer:
                if begins_within_s is not None:
                    limit_s = begins_within_s
                    timer.reschedule(asyncio.get_running_loop().time() + limit_s)
                first = await self._read_loading()
                self.has_begun = first is not None
                timer.reschedule(asyncio.get_running_loop().time() + timeout_s)
                limit_s = timeout_s
                await self._load(start.config, first)
        except TimeoutError as error:
            await self.close()
            raise ModelLoadError(f"the engine was not ready after {limit_s:g} s") from error
        except BaseException:
            await self.close()
            raise

    @property
    def has_exited(self) -> bool:
        return self._process.returncode is not None

    async def exited(self) -> None:
        """Returns when the process has ended, whatever the reason."""
        await self._process.wait()

    @property
    def info(self) -> ModelInfo:
        assert self._info is not None, "load() has returned"
        return self._info

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._info is not None and not self._ended.is_set()

    @property
    def status(self) -> str:
        """How a process ended that is not alive: "was killed by SIGKILL"."""
        return self._status

    def new_id(self) -> int:
        return next(self._ids)

    def open(self, command: ipc.Request) -> Stream:
        """Sends a command that begins a request; its events go to the stream until
        ``close_stream``. Raises InvalidRequestError when it cannot be sent."""
        frame = _encode(command)
        stream = Stream(is_draft=isinstance(command, ipc.OpenDraft | ipc.ForkDraft))
        self._streams[command.request_id] = stream
        self._writer.write(frame)
        return stream

    def send(self, command: ipc.DraftCommand | ipc.SetDeadline) -> None:
        """Sends a command about a request that is open. Raises InvalidRequestError when it cannot
        be sent, EngineDiedError when there is nobody to send it to."""
        frame = _encode(command)
        if not self.is_alive:
            raise EngineDiedError("the engine process has ended")
        self._writer.write(frame)

    def close_stream(self, request_id: int) -> None:
        """Forgets a stream, and aborts its request if the engine is not done with it. Does not
        wait, so that it works in a task that is being cancelled."""
        stream = self._streams.pop(request_id, None)
        if stream is not None and not stream.is_final and self.is_alive:
            self._writer.write(ipc.encode_command(ipc.Abort(request_id)))

    async def ask(
        self,
        request_id: int,
        command: ipc.Prefill | ipc.Pin | ipc.PrepareGuide | ipc.GetStats,
    ) -> FirstToken | TextDelta | Final:
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
        if not await self._exits():
            logger.warning("the engine process does not end, killing it")
            self._process.kill()
            if not await self._exits():  # a driver keeps it; the next one need not wait for that
                logger.error("the engine process %d cannot be killed", self.pid)
                self._writer.transport.abort()
        for task in self._tasks:
            await task
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            logger.debug("the engine closed the connection first")

    async def _exits(self) -> bool:
        """Whether the process ends soon."""
        try:
            async with asyncio.timeout(_EXIT_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    async def _read_loading(self) -> list[ipc.Event] | None:
        try:
            return await ipc.read_events(self._reader)
        except ipc.ProtocolError as error:
            raise ModelLoadError(f"the engine process is not understood: {error}") from error

    async def _load(self, config: EngineConfig, events: list[ipc.Event] | None) -> None:
        while events and isinstance(events[0], ipc.Alive):
            events = await self._read_loading()
        match events:
            case [ipc.Ready(info)]:
                self._info = info
                self._heartbeat = Heartbeat(config.hang_timeout_s)
                # They serve all callers: they must not carry the log context of the one that
                # started them.
                self._tasks = [
                    asyncio.create_task(work, name=name, context=contextvars.Context())
                    for work, name in (
                        (self._read(), "llm-engine-events"),
                        (self._watch(self._heartbeat), "llm-engine-heartbeat"),
                    )
                ]
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
        self._ended.set()
        self._writer.close()
        self._status = "was closed" if self._is_closing else await self._exit_status() + reason
        if not self._is_closing:
            logger.error("the engine process %s", self._status)
        message = f"the engine process {self._status} while the request was running"
        if not self._is_closing:
            message += "; it is being restarted"
        for stream in self._streams.values():
            stream.push(EngineDiedError(message))
        self._streams.clear()
        if not self._is_closing:
            self._on_death()

    async def _watch(self, heartbeat: Heartbeat) -> None:
        """Kills the process when it hangs."""
        loop = asyncio.get_running_loop()
        is_traced = False
        last_s = loop.time()
        while not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(heartbeat.period_s):
                    await self._ended.wait()
            now_s = loop.time()
            reason = heartbeat.tick(now_s - last_s)
            last_s = now_s
            if not reason or self._ended.is_set() or self._is_closing:
                continue
            if _is_traced(self.pid):
                if not is_traced:
                    logger.warning("the engine process is in a debugger's hands: %s", reason)
                is_traced = True
                continue
            self._status = self._hangs_because = f"hangs ({reason}) and was killed"
            self._ended.set()
            self._process.kill()
            self._writer.transport.abort()  # a process that cannot be killed keeps its side open

    def _dispatch(self, event: ipc.Event) -> None:
        assert self._heartbeat is not None, "events are read while the engine serves"
        self._heartbeat.heard()
        if isinstance(event, ipc.Alive):
            self._heartbeat.beat([(doing, ms / 1000) for doing, ms in event.threads])
            return
        if isinstance(event, ipc.Ready | ipc.StartFailed):
            raise ipc.ProtocolError("a start event after the start")
        stream = self._streams.get(event.request_id)
        if stream is None:
            return  # aborted while the event was on its way
        match event:
            case ipc.Generated(_, generated):
                stream.push(generated)
            case ipc.Prefilled(_, result) | ipc.GuidePrepared(_, result):
                stream.push(result)
            case ipc.Stats(_, stats):
                stream.push(stats)
            case ipc.Failed(_, code, message):
                stream.push(from_code(code, message))

    async def _exit_status(self) -> str:
        """How the process ended, for people; kills it if it has only closed its socket."""
        if self._hangs_because:
            return self._hangs_because
        try:
            async with asyncio.timeout(1.0):
                status = await self._process.wait()
        except TimeoutError:
            self._process.kill()
            return "closed its connection"
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"exited with status {status}"


def _is_traced(pid: int) -> bool:
    """Whether a debugger has stopped the process, or may have. Linux; elsewhere False."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return "TracerPid:\t0\n" not in status and "TracerPid:" in status


def _encode(command: ipc.Command) -> bytes:
    try:
        return ipc.encode_command(command)
    except ipc.ProtocolError as error:
        raise InvalidRequestError(f"the request cannot be sent: {error}") from error


def _command_line(descriptor: int, config: EngineConfig) -> list[str]:
    log = log_arguments(logger, config.log_format)
    return module_command("llm_core.worker", "--fd", str(descriptor), *log)


def _environment(config: EngineConfig) -> dict[str, str]:
    """The process's environment: our package importable, and the thread settings.

    They must be set before torch is loaded. The compiled decoder has threads of its own, and those
    of torch must then sleep: spinning, they took a core from it, and from all else on the machine.
    Where torch computes on several threads, spinning between regions is what makes them pay
    (sleeping costs about 50 us a region, more than most matmuls of a small model), but spinning
    threads that share a core with other work are many times slower than one thread: so ask for more
    only on a machine with cores to spare.
    OMP_WAIT_POLICY, where the operator sets it, is left alone.
    """
    environment = importable(os.environ)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        environment[name] = str(config.num_threads)
    may_spin = config.backend == "torch" and config.num_threads > 1
    environment.setdefault("OMP_WAIT_POLICY", "active" if may_spin else "passive")
    environment["TOKENIZERS_PARALLELISM"] = "false"
    # A row of logits is freed and needed again at every step: kept, its pages need no new zeroes
    # (a sampled token takes 0.15 ms instead of 0.32 at 49k tokens).
    environment.setdefault("MALLOC_MMAP_THRESHOLD_", str(32 << 20))
    environment.setdefault("MALLOC_TRIM_THRESHOLD_", str(256 << 20))
    return environment
