"""Roll-out of a new engine beside the old one: a share of the conversations, and the way back.

A conversation is given to one engine at its beginning and stays there, so that its cached prefix
does. When the new engine does not answer, the old one does, in the same turn: the caller hears one
answer, a little later. When the new one is worse than the old one
(``app.observe.canary_statistics``), it is withdrawn: all conversations go on with the old one,
from their next request on.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from types import TracebackType
from typing import Any, Self, Unpack

import msgspec

from app.observe import NO_ANSWER, CanaryJudge, CanaryRules, Lane, lane_of, verdict_of
from app.routing.canary_denylist import Withdrawals
from app.routing.engines import LlmEngine, LlmReply
from llm_core import (
    ChatMessage,
    EngineClient,
    EngineStats,
    FirstToken,
    GenerationDone,
    GenerationEvent,
    Guide,
    LlmError,
    ModelInfo,
    OptionFields,
    PrefillResult,
    RequestTimeoutError,
    SamplingParams,
    TextDelta,
    Usage,
)

log = logging.getLogger(__name__)

# The new engine has so long for its first sign before the old one is asked instead.
DEFAULT_PATIENCE_S = 1.5
_SHOWN_DIGITS = 12


class Rollout:
    """Two engines, and who is served by which.

    ``share``: of the conversations, those of the new engine. ``key`` names what is tried (content
    and options); once withdrawn, it stays so over restarts if ``withdrawals`` remembers.
    """

    def __init__(
        self,
        stable: EngineClient,
        canary: EngineClient,
        share: float,
        *,
        key: str = "",
        rules: CanaryRules | None = None,
        withdrawals: Withdrawals | None = None,
        patience_s: float = DEFAULT_PATIENCE_S,
    ) -> None:
        """Must be made on the event loop that uses the engines."""
        self.stable = stable
        self.canary = canary
        self.share = share
        self.patience_s = patience_s
        self.withdrawn_because = ""
        self._key = key
        self._judge = CanaryJudge(rules or CanaryRules())
        self._withdrawals = withdrawals
        self._loop = asyncio.get_running_loop()
        self._num_open = 0
        self._closing: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """The new engine has not been withdrawn."""
        return not self.withdrawn_because

    def lane_of(self, conversation_id: str) -> Lane:
        """Which engine the conversation is given to: always the same while the roll-out runs."""
        digest = hashlib.blake2b(conversation_id.encode(), digest_size=8).digest()
        is_chosen = int.from_bytes(digest, "big") < self.share * 2**64
        return "canary" if is_chosen and self.is_running else "stable"

    def engine_for(self, conversation_id: str) -> RoutedEngine:
        """The engine that a conversation asks."""
        return RoutedEngine(self, self.lane_of(conversation_id))

    def observe(self, turn: dict[str, Any]) -> None:
        """Take a finished turn into account (a sink of ``TraceWriter``, so any one thread)."""
        lane, verdict = lane_of(turn), verdict_of(turn)
        if lane is None or verdict is None or not self.is_running:
            return
        if reason := self._judge.add(lane, verdict):
            self.withdraw(reason)

    def withdraw(self, reason: str) -> None:
        """The old engine takes over everything; the new one is closed when its replies are over.
        Any thread."""
        self.withdrawn_because = reason
        log.warning(
            "the new engine is withdrawn: %s", reason, extra={"model": self.canary.info.name}
        )
        if self._withdrawals is not None:
            self._withdrawals.add(self._key, reason)
        self._loop.call_soon_threadsafe(self._close_when_idle)

    def opened(self, by: int) -> None:
        """``by`` more replies of the new engine are open."""
        self._num_open += by
        if not self.is_running:
            self._close_when_idle()

    def _close_when_idle(self) -> None:
        if self._num_open == 0:
            self._close_canary()

    async def close(self) -> None:
        """Ends the new engine."""
        await self._close_canary()

    def _close_canary(self) -> asyncio.Task[None]:
        if self._closing is None:
            self._closing = asyncio.create_task(self.canary.close(), name="close canary")
        return self._closing


class RoutedEngine:
    """A ``LlmEngine``: one conversation's way to the engine that it was given to."""

    def __init__(self, rollout: Rollout, lane: Lane) -> None:
        self._rollout = rollout
        self._lane = lane

    @property
    def lane(self) -> Lane:
        """Which engine it would ask now."""
        is_there = self._rollout.is_running and self._rollout.canary.is_alive
        return self._lane if is_there else "stable"

    @property
    def info(self) -> ModelInfo:
        """See ``LlmEngine``."""
        return self._client.info

    @property
    def is_alive(self) -> bool:
        """See ``LlmEngine``."""
        return self._client.is_alive

    @property
    def problem(self) -> str:
        """See ``LlmEngine``."""
        return self._client.problem

    async def prepare_guide(self, guide: Guide) -> None:
        """See ``LlmEngine``."""
        await self._client.prepare_guide(guide)

    @property
    def _client(self) -> EngineClient:
        return self._rollout.canary if self.lane == "canary" else self._rollout.stable

    async def stats(self) -> EngineStats:
        """See ``LlmEngine``."""
        return await self._client.stats()

    async def prefill(
        self, messages: Sequence[ChatMessage], **options: Unpack[OptionFields]
    ) -> PrefillResult:
        """See ``LlmEngine``. Raises RequestTimeoutError when the new engine does not answer."""
        if self.lane == "stable":
            return await self._rollout.stable.prefill(messages, **options)
        try:
            async with asyncio.timeout(self._rollout.patience_s):
                return await self._rollout.canary.prefill(messages, **options)
        except TimeoutError as error:
            raise RequestTimeoutError("the new engine did not read the prompt in time") from error

    async def generate(
        self,
        messages: Sequence[ChatMessage],
        params: SamplingParams,
        **options: Unpack[OptionFields],
    ) -> AsyncGenerator[GenerationEvent, None]:
        """See ``LlmEngine``."""
        if self.lane == "stable":
            stable = self._rollout.stable.generate(messages, params, **options)
            async with aclosing(stable) as events:
                async for event in events:
                    yield event
            return
        async with await self.open_reply(messages, params, **options) as reply:
            async for event in reply:
                yield event

    async def open_reply(
        self,
        messages: Sequence[ChatMessage],
        params: SamplingParams,
        **options: Unpack[OptionFields],
    ) -> RoutedReply:
        """See ``LlmEngine``."""
        reply = RoutedReply(self._rollout, self.lane, messages, params, options)
        await reply.open()
        return reply


class RoutedReply:
    """A ``LlmReply`` that the old engine takes over when the new one fails.

    Before its first text the old engine is asked the same; behind it, it is asked to go on with
    what was said. Only a reply under a guide (calls of tools, schemas) cannot be gone on with in
    the middle: then the error is the reply's end, as it is without a roll-out.
    """

    def __init__(
        self,
        rollout: Rollout,
        lane: Lane,
        messages: Sequence[ChatMessage],
        params: SamplingParams,
        options: OptionFields,
    ) -> None:
        self.lane = lane
        self.fallback = ""
        """The code of the error for which the old engine took over."""
        self._rollout = rollout
        self._messages = messages
        self._params = params
        self._options = options
        self._reply: LlmReply | None = None
        self._timer: asyncio.Timeout | None = None  # of the wait that goes on
        self._has_sign = False  # of life
        # An answer begun in hope has no deadline: it comes behind all that are awaited.
        self._is_awaited = options.get("deadline_ns") is not None
        self._text = ""
        self._num_tokens = 0
        self._num_before = 0  # tokens of the first engine, when the second one goes on
        self._trims_space = False
        self._is_counted = lane == "canary"
        if self._is_counted:
            rollout.opened(1)

    @property
    def served(self) -> dict[str, Any]:
        """Facts for the trace."""
        is_canary = self.lane == "canary" and not self.fallback
        client = self._rollout.canary if is_canary else self._rollout.stable
        facts: dict[str, Any] = {"engine": self.lane, "model": model_id(client.info)}
        if self.fallback:
            facts["engine_fallback"] = self.fallback
        return facts

    async def open(self) -> None:
        """Asks the engine, and the old one if that fails. Raises LlmError."""
        client = self._rollout.canary if self.lane == "canary" else self._rollout.stable
        try:
            try:
                async with self._patience():
                    self._reply = await client.open_reply(
                        self._messages, self._params, **self._options
                    )
            except (LlmError, TimeoutError) as error:
                await self._fall_back(error)
        except BaseException:
            await self._close()
            raise

    @property
    def _patience_s(self) -> float | None:
        is_new = self.lane == "canary" and not self.fallback and not self._has_sign
        return self._rollout.patience_s if is_new and self._is_awaited else None

    @asynccontextmanager
    async def _patience(self) -> AsyncIterator[None]:
        """Raises TimeoutError when the wait in the block is too long."""
        try:
            async with asyncio.timeout(self._patience_s) as self._timer:
                yield
        finally:
            self._timer = None

    async def _fall_back(self, error: Exception) -> None:
        if self.lane == "stable" or self.fallback or (self._text and self._params.guide):
            raise error
        self.fallback = error.code if isinstance(error, LlmError) else NO_ANSWER
        log.warning("the new engine failed (%s): the old one takes over", self.fallback)
        if self._reply is not None:
            await self._reply.__aexit__(None, None, None)
        messages, params = list(self._messages), self._params
        if self._text.strip():
            # The prompt ends with the text's last visible letter: a space behind it comes again.
            self._trims_space = self._text != self._text.rstrip()
            messages.append(ChatMessage("assistant", self._text))
            left = max(1, params.max_tokens - self._num_tokens)
            params = msgspec.structs.replace(params, continue_last=True, max_tokens=left)
            self._num_before = self._num_tokens
        self._reply = await self._rollout.stable.open_reply(messages, params, **self._options)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerationEvent:
        """Raises as ``llm_core.Reply``."""
        while True:
            assert self._reply is not None, "opened before"
            try:
                async with self._patience():
                    event = await anext(self._reply)
            except (LlmError, TimeoutError) as error:
                await self._fall_back(error)
                continue
            self._has_sign = True
            if (passed := self._passed_on(event)) is not None:
                return passed

    def _passed_on(self, event: GenerationEvent) -> GenerationEvent | None:
        goes_on = self._num_before > 0
        match event:
            case FirstToken() if goes_on:
                return None  # the answer had one
            case TextDelta():
                text = event.text
                if self._trims_space:
                    text = text.lstrip(" ")
                    self._trims_space = not text
                self._num_tokens = self._num_before + event.num_tokens
                self._text += text
                return msgspec.structs.replace(event, text=text, num_tokens=self._num_tokens)
            case GenerationDone() if goes_on:
                usage = event.usage
                whole = Usage(
                    prompt_tokens=usage.prompt_tokens,
                    cached_tokens=usage.cached_tokens,
                    completion_tokens=self._num_before + usage.completion_tokens,
                )
                return msgspec.structs.replace(event, usage=whole)
        return event

    def set_deadline(self, deadline_ns: int | None) -> None:
        """See ``LlmReply``. Whoever says when words are needed waits for them, also with None."""
        self._options["deadline_ns"] = deadline_ns
        self._is_awaited = True
        patience_s, timer = self._patience_s, self._timer
        if patience_s is not None and timer is not None and timer.when() is None:
            timer.reschedule(asyncio.get_running_loop().time() + patience_s)  # awaited from now on
        if self._reply is not None:
            self._reply.set_deadline(deadline_ns)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        if self._is_counted:
            self._is_counted = False
            self._rollout.opened(-1)
        if self._reply is not None:
            await self._reply.__aexit__(None, None, None)


def model_id(info: ModelInfo) -> str:
    """A model's name and the beginning of its content's hash: which bytes answered."""
    digest = info.content_hash.removeprefix("sha256:")[:_SHOWN_DIGITS]
    return f"{info.name}@{digest}" if digest else info.name


def asked_facts(engine: LlmEngine) -> dict[str, Any]:
    """What the trace should say of the engine that will be asked."""
    facts: dict[str, Any] = {"model": model_id(engine.info)}
    if isinstance(engine, RoutedEngine):
        facts["engine"] = engine.lane
    return facts


def served_facts(reply: LlmReply) -> dict[str, Any]:
    """What the trace should say of who served ``reply``; nothing where there is no choice."""
    return reply.served if isinstance(reply, RoutedReply) else {}
