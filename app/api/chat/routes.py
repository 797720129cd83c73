"""``POST /v1/chat/completions``, whole and streamed (server-sent events).

A client may be gone at any moment: leaving the engine's stream aborts the request there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack, aclosing
from functools import partial

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send

from app.access import peer_of
from app.api.chat.output import ChatOutput, Wire
from app.api.chat.request import Chat, ChatDefaults, parse_chat
from app.api.http.body import read_parsed
from app.api.http.cancel_on_disconnect import Answer
from app.api.http.concurrency import ConcurrencyLimiter
from app.api.http.errors import error_body, error_response
from app.api.http.sse import sse_event, sse_start
from app.api.models import check_model
from app.routing import LlmEngine
from llm_core import (
    FirstToken,
    GenerationDone,
    GenerationEvent,
    LlmError,
    TextDelta,
    Usage,
)

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 * 1024 * 1024
# Whoever speaks with us waits in silence; whoever reads can wait a little longer.
_PRIORITY = -1


def chat_router(engine: LlmEngine, defaults: ChatDefaults, max_requests: int) -> APIRouter:
    """The route. ``defaults`` hold for requests that name no temperature; ``max_requests`` may be
    worked on at once. Raises (to the app's handlers) ClientError for a bad request, and
    UnavailableError while the server ends or when all places are taken; answers that have begun
    are finished."""
    router = APIRouter()
    places = ConcurrencyLimiter(max_requests, "chat")

    @router.post("/v1/chat/completions", response_model=None)
    async def create(request: Request) -> Response:
        state = request.app.state
        grant = state.gatekeeper.check(request.headers)
        state.connections.check_open()
        owner = grant.limited_as(peer_of(request))
        state.rate_limits.check_chat(owner)
        with places.take(owner) as place:
            parse = partial(parse_chat, context_len=engine.info.context_len, defaults=defaults)
            chat = await read_parsed(request, MAX_BODY_BYTES, parse)
            check_model(chat.model, engine)
            return _Answer(engine, chat, place.pop_all())

    return router


class _Answer(Answer):
    """Runs the request and sends what it brings. Status and headers wait for the first event, so
    that an error before it has its own status."""

    def __init__(self, engine: LlmEngine, chat: Chat, place: ExitStack) -> None:
        super().__init__(place)
        self._engine = engine
        self._chat = chat
        info = engine.info
        self._output = ChatOutput(chat, info.name, info.tool_format)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(
            self._engine.generate(self._chat.messages, self._chat.params, priority=_PRIORITY)
        ) as events:
            try:
                first = await anext(events)
                if not self._chat.stream:
                    whole = await self._whole(first, events)
                    response = Response(msgspec.json.encode(whole), media_type="application/json")
                    await response(scope, receive, send)
                    return
            except LlmError as error:
                _log(error)
                await error_response(error)(scope, receive, send)
                return
            await self._stream(first, events, send)

    async def _wanted(
        self, first: GenerationEvent, rest: AsyncIterator[GenerationEvent]
    ) -> AsyncIterator[GenerationEvent]:
        """All events, or those until the output is over: then their end as well. Whoever takes
        them feeds the output with each before the next."""
        told, num_tokens = None, 0
        async for event in _chained(first, rest):
            yield event
            if isinstance(event, FirstToken):
                told = event
            elif isinstance(event, TextDelta):
                num_tokens = event.num_tokens
            if self._output.is_over:
                assert told is not None, "the first token comes before all text"
                yield GenerationDone(
                    finish_reason="stop",
                    usage=Usage(
                        prompt_tokens=told.prompt_tokens,
                        cached_tokens=told.cached_tokens,
                        completion_tokens=num_tokens,
                        unseen_tokens=told.unseen_tokens,
                    ),
                    num_steps=num_tokens,
                    finished_ns=time.monotonic_ns(),
                )
                return

    async def _whole(self, first: GenerationEvent, events: AsyncIterator[GenerationEvent]) -> Wire:
        async for event in self._wanted(first, events):
            if isinstance(event, TextDelta):
                self._output.feed(event)
            elif isinstance(event, GenerationDone):
                self._output.finish()
                return self._output.whole(event)
        raise AssertionError("a generation ends with GenerationDone")

    async def _stream(
        self, first: GenerationEvent, events: AsyncIterator[GenerationEvent], send: Send
    ) -> None:
        await send(sse_start())
        try:
            async for chunk in self._chunks(first, events):
                await send(sse_event(msgspec.json.encode(chunk)))
        except LlmError as error:
            # The status is out; clients look for this instead of a chunk.
            _log(error)
            await send(sse_event(msgspec.json.encode(error_body(error)), is_last=True))
            return
        await send(sse_event(b"[DONE]", is_last=True))

    async def _chunks(
        self, first: GenerationEvent, events: AsyncIterator[GenerationEvent]
    ) -> AsyncGenerator[Wire, None]:
        output, always = self._output, self._chat.usage_always
        prompt = Usage(prompt_tokens=0, cached_tokens=0, completion_tokens=0)
        async for event in self._wanted(first, events):
            match event:
                case FirstToken():
                    prompt = Usage(
                        prompt_tokens=event.prompt_tokens,
                        cached_tokens=event.cached_tokens,
                        completion_tokens=0,
                    )
                    role = {"role": "assistant", "content": "", "refusal": None}
                    yield output.chunk(role, usage=prompt if always else None)
                case TextDelta():
                    usage = msgspec.structs.replace(prompt, completion_tokens=event.num_tokens)
                    for piece in output.feed(event):
                        yield output.chunk(piece, usage=usage if always else None)
                case GenerationDone():
                    usage = event.usage
                    for piece in output.finish():
                        yield output.chunk(piece, usage=usage if always else None)
                    yield output.chunk(
                        {},
                        finish_reason=output.finish_reason(event),
                        usage=usage if always else None,
                    )
                    if self._chat.usage_at_end:
                        yield output.chunk(None, usage=usage)


async def _chained(
    first: GenerationEvent, rest: AsyncIterator[GenerationEvent]
) -> AsyncIterator[GenerationEvent]:
    yield first
    async for event in rest:
        yield event


def _log(error: LlmError) -> None:
    logger.info("chat request failed", extra={"code": error.code})
