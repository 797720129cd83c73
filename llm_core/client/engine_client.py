"""The async front of an engine that runs in a process of its own.

``EngineClient`` is what the rest of Parley uses. When the process dies its requests fail with
EngineDiedError, and another one is started at once, without waiting for someone to need it.

A reply::

    async for event in client.generate(messages, params): ...

or with a handle, for who learns while it speaks when the next words are needed::

    async with await client.open_reply(messages, params, deadline_ns=...) as reply:
        async for event in reply:
            reply.set_deadline(when_playout_runs_dry_ns)

A transcript that still changes::

    async with await client.open_draft(messages) as draft:
        draft.update(longer_messages)  # keeps what is computed of the common beginning
        async with draft.commit(params) as reply: ...
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Self, Unpack

from llm_core import ipc
from llm_core.client.engine_process import EngineProcess, Stream
from llm_core.errors import EngineDiedError, LlmError, ModelLoadError
from llm_core.messages import (
    ChatMessage,
    EngineConfig,
    EngineStats,
    GenerationDone,
    GenerationEvent,
    Guide,
    GuideReady,
    ModelInfo,
    OptionFields,
    PrefillResult,
    RequestOptions,
    SamplingParams,
)
from llm_core.structured.grammar import MAX_KNOWN, guide_key

logger = logging.getLogger("llm_core.client.engine_client")

_FIRST_RETRY_S = 0.5
_LAST_RETRY_S = 30.0
# One in reserve that cannot live is not started over and over.
_SPARE_PAUSE_S = 10.0
# A process in reserve takes so long to load its code, and then begins within so long.
_CODE_S = 30.0
_SPARE_BEGINS_S = 3.0


class _Handle:
    """Something open in the engine; closing it aborts what is not done, and does not wait."""

    def __init__(self, process: EngineProcess, request_id: int, stream: Stream) -> None:
        self._process = process
        self._request_id = request_id
        self._stream = stream

    def close(self) -> None:
        """Ends it in the engine, blocks and all, if it is not over. May be called twice."""
        self._process.close_stream(self._request_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Reply(_Handle):
    """A generation that runs: iterate over its events, FirstToken, TextDelta ..., GenerationDone.

    Text that the consumer has not taken yet is joined into one TextDelta.
    """

    _is_done = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerationEvent:
        """Raises PromptTooLongError, EngineBusyError and the like when that ends the reply."""
        if self._is_done:
            raise StopAsyncIteration
        event = await self._stream.next()
        assert not isinstance(event, PrefillResult | GuideReady | EngineStats), "a reply is text"
        self._is_done = isinstance(event, GenerationDone)
        return event

    def set_deadline(self, deadline_ns: int | None) -> None:
        """When (``time.monotonic_ns``) the next token is needed: the instant at which the caller's
        audio runs dry. Has no effect on a reply that is over."""
        if not self._stream.is_final and self._process.is_alive:
            self._process.send(ipc.SetDeadline(self._request_id, deadline_ns))


class Draft(_Handle):
    """A prompt whose end may still change, computed while it does."""

    _revision = 0

    def update(self, messages: Sequence[ChatMessage]) -> None:
        """Makes the draft say ``messages``: what they have in common with the last ones stays
        computed, the rest is rolled back. An error shows in ``computed`` or in the reply."""
        self._change(ipc.UpdateDraft(self._request_id, tuple(messages)))

    def truncate(self, num_tokens: int) -> None:
        """Keeps the first ``num_tokens`` tokens of the prompt."""
        self._change(ipc.TruncateDraft(self._request_id, num_tokens))

    async def computed(self) -> PrefillResult:
        """Waits until the engine has computed what the draft says now. Raises what ended it."""
        return await self._stream.computed(self._revision)

    def fork(self) -> Draft:
        """A second draft that says the same and shares all that is computed."""
        request_id = self._process.new_id()
        stream = self._process.open(ipc.ForkDraft(request_id, self._request_id))
        return Draft(self._process, request_id, stream)

    def commit(self, params: SamplingParams, **options: Unpack[OptionFields]) -> Reply:
        """The draft is final: the reply to it. Closing either of them ends it. Of the options,
        salt, overflow and downgrades are those of the draft, or have no effect."""
        command = ipc.CommitDraft(self._request_id, params, RequestOptions(**options))
        self._process.send(command)
        return Reply(self._process, self._request_id, self._stream)

    def _change(self, command: ipc.UpdateDraft | ipc.TruncateDraft) -> None:
        self._process.send(command)
        self._revision += 1


class EngineClient:
    """A running engine. One event loop; any number of requests at once."""

    def __init__(self, config: EngineConfig, *, start_timeout_s: float = 120.0) -> None:
        """Use ``start``."""
        self._config = config
        self._start_timeout_s = start_timeout_s
        self._process: EngineProcess | None = None
        self._info: ModelInfo | None = None
        self._spare: EngineProcess | None = None  # has no model; see ``EngineConfig.standby``
        self._reserved_s = 0.0  # when it was started, by the loop's clock
        self._watching: set[asyncio.Task[None]] = set()  # processes that are or were in reserve
        self._starting: asyncio.Task[EngineProcess] | None = None
        self._supervising: asyncio.Task[None] | None = None
        self._problem = "the engine has not started"
        self._pinned: list[tuple[tuple[ChatMessage, ...], str]] = []
        self._known_guides: OrderedDict[bytes, int] = OrderedDict()  # see ``ipc.Start``
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
        assert self._info is not None, "start() returns a client that has started"
        return self._info

    @property
    def is_alive(self) -> bool:
        """False after the process died, until another one is ready."""
        return self._process is not None and self._process.is_alive

    @property
    def problem(self) -> str:
        """Why requests have to wait or fail now; "" while the engine is alive."""
        if self.is_alive:
            return ""
        if self._is_closed:
            return "the engine is closed"
        if not self._problem and self._process is not None:
            return f"the engine process {self._process.status}"
        return self._problem

    async def generate(
        self,
        messages: Sequence[ChatMessage],
        params: SamplingParams,
        **options: Unpack[OptionFields],
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Streams a reply: FirstToken, TextDelta ..., GenerationDone.

        Closing the generator (break with aclose, or cancelling the task) aborts the request in the
        engine at once. ``options`` are the fields of ``RequestOptions``. Raises
        InvalidRequestError, PromptTooLongError, EngineBusyError, RequestTimeoutError,
        EngineDiedError.
        """
        async with await self.open_reply(messages, params, **options) as reply:
            async for event in reply:
                yield event

    async def open_reply(
        self,
        messages: Sequence[ChatMessage],
        params: SamplingParams,
        **options: Unpack[OptionFields],
    ) -> Reply:
        """``generate`` with a handle. Must be closed."""
        process = await self._running_process()
        request_id = process.new_id()
        command = ipc.Generate(request_id, tuple(messages), params, RequestOptions(**options))
        reply = Reply(process, request_id, process.open(command))
        await _drain(process, reply)
        return reply

    async def open_draft(
        self, messages: Sequence[ChatMessage], **options: Unpack[OptionFields]
    ) -> Draft:
        """Begins to compute a prompt that may still change. Must be closed."""
        process = await self._running_process()
        request_id = process.new_id()
        command = ipc.OpenDraft(request_id, tuple(messages), RequestOptions(**options))
        draft = Draft(process, request_id, process.open(command))
        await _drain(process, draft)
        return draft

    async def prefill(
        self, messages: Sequence[ChatMessage], **options: Unpack[OptionFields]
    ) -> PrefillResult:
        """Computes the KV of a prompt (with the header of the reply), so that ``generate`` with it,
        or with one that begins alike, starts sooner. Cancelling aborts. Raises as ``generate``."""
        process = await self._running_process()
        request_id = process.new_id()
        command = ipc.Prefill(request_id, tuple(messages), RequestOptions(**options))
        result = await process.ask(request_id, command)
        assert isinstance(result, PrefillResult), "prefill is answered by its result"
        return result

    async def pin(self, messages: Sequence[ChatMessage], *, cache_salt: str = "") -> PrefillResult:
        """Computes what all conversations that begin with ``messages`` (a system prompt) share, and
        keeps it for good, in every process that is started from now on. Raises as ``generate``."""
        process = await self._running_process()
        pinned = (tuple(messages), cache_salt)
        result = await _pin(process, *pinned)
        if pinned not in self._pinned:
            self._pinned.append(pinned)
        return result

    async def prepare_guide(self, guide: Guide) -> None:
        """Sees to it that replies with ``guide`` can begin without a delay. Raises
        InvalidRequestError when it cannot be followed, and as ``generate``."""
        process = await self._running_process()
        request_id = process.new_id()
        ready = await process.ask(request_id, ipc.PrepareGuide(request_id, guide))
        assert isinstance(ready, GuideReady), "a guide is answered by being ready"
        self._known_guides[guide_key(guide)] = ready.num_bytes
        if len(self._known_guides) > MAX_KNOWN:
            self._known_guides.popitem(last=False)

    async def stats(self) -> EngineStats:
        """A snapshot, in which all that this client asked or aborted before is counted."""
        process = await self._running_process()
        request_id = process.new_id()
        stats = await process.ask(request_id, ipc.GetStats(request_id))
        assert isinstance(stats, EngineStats), "stats are answered by stats"
        return stats

    async def restart(self) -> None:
        """Waits for the new process if the old one has died. Raises ModelLoadError."""
        await self._running_process()

    async def close(self) -> None:
        """Ends the process; running requests fail with EngineDiedError. May be called twice."""
        self._is_closed = True
        for task in (self._supervising, self._starting, *self._watching):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        for process in (self._process, self._spare):
            if process is not None:
                await process.close()

    async def _running_process(self) -> EngineProcess:
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

    async def _start_process(self) -> EngineProcess:
        if self._process is not None:
            logger.warning("restarting the engine process")
            await self._process.close()
        process = await self._load_spare()
        if process is None:
            process = await EngineProcess.spawn(self._config, self._on_death)
            self._process = process  # so that `close` finds it
            await process.load(self._start_command, self._start_timeout_s)
        self._info = process.info
        self._problem = ""
        if self._config.standby:
            await self._reserve()
        return process

    @property
    def _start_command(self) -> ipc.Start:
        return ipc.Start(self._config, dict(self._known_guides))

    async def _load_spare(self) -> EngineProcess | None:
        """The process in reserve with the model; None when there is none that begins to load it."""
        spare, self._spare = self._spare, None
        if spare is None:
            return None
        if spare.has_exited:
            await spare.close()
            return None
        self._process = spare  # so that `close` finds it
        has_code = asyncio.get_running_loop().time() - self._reserved_s > _CODE_S
        begins_within_s = _SPARE_BEGINS_S if has_code else _CODE_S
        try:
            await spare.load(
                self._start_command, self._start_timeout_s, begins_within_s=begins_within_s
            )
        except ModelLoadError as error:
            if spare.has_begun:
                raise
            logger.warning("the engine process in reserve is of no use: %s", error)
            return None
        return spare

    async def _reserve(self) -> None:
        try:
            spare = await EngineProcess.spawn(self._config, self._on_death)
        except ModelLoadError as error:
            logger.warning("there is no engine process in reserve: %s", error)
            return
        self._spare = spare
        self._reserved_s = asyncio.get_running_loop().time()
        watching = asyncio.create_task(
            self._watch(spare), name="llm-engine-reserve", context=contextvars.Context()
        )
        self._watching.add(watching)
        watching.add_done_callback(self._watching.discard)

    async def _watch(self, spare: EngineProcess) -> None:
        """Another one in place of a process that ends before it is needed."""
        await spare.exited()
        if self._spare is not spare:
            return  # it was needed
        logger.warning("the engine process in reserve has ended; another one will be started")
        await asyncio.sleep(_SPARE_PAUSE_S)
        if self._spare is spare and self.is_alive:  # else who starts an engine sees to it
            self._spare = None
            await spare.close()
            await self._reserve()

    def _on_death(self) -> None:
        if not self._is_closed:
            assert self._process is not None, "it has died"
            self._problem = f"the engine process {self._process.status}; it is being restarted"
            self._supervising = asyncio.create_task(self._bring_back(), name="llm-engine-restart")

    async def _bring_back(self) -> None:
        """Starts another process, and again after a growing pause if that fails."""
        pause_s = _FIRST_RETRY_S
        while True:
            try:
                process = await self._running_process()
                for messages, cache_salt in self._pinned:
                    await _pin(process, messages, cache_salt)
                return
            except LlmError as error:
                if self._is_closed or (self._process is not None and self._process.is_alive):
                    logger.error("a pinned prompt is not computed again: %s", error)
                    return
                self._problem = f"the engine does not start: {error}"
                logger.error("the engine is not back: %s; next try in %g s", error, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_RETRY_S)


async def _pin(
    process: EngineProcess, messages: tuple[ChatMessage, ...], cache_salt: str
) -> PrefillResult:
    request_id = process.new_id()
    result = await process.ask(request_id, ipc.Pin(request_id, messages, cache_salt))
    assert isinstance(result, PrefillResult), "a pin is answered by its result"
    return result


async def _drain(process: EngineProcess, handle: _Handle) -> None:
    """Waits while the engine takes commands slower than they are written."""
    try:
        await process.drain()
    except BaseException:  # cancelled: nobody has the handle yet, to close it
        handle.close()
        raise
