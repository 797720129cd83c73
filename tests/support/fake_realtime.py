"""A client's end of a Realtime connection, and a session without a conversation in it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, cast

from app.conversation import events as e
from app.transports.base import ChannelClosed
from tests.support.openai_events import check_server_event

Wire = dict[str, Any]


class FakeChannel:
    """Both ends in memory. What the server sends is checked against the openai package."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[str | bytes | ChannelClosed] = asyncio.Queue()
        self.sent: list[Wire] = []
        self.closed: ChannelClosed | None = None
        self._has_closed = asyncio.Event()
        self._arrived = asyncio.Event()
        self._num_read = 0

    async def receive(self) -> str | bytes:
        message = await self.incoming.get()
        if isinstance(message, ChannelClosed):
            raise message
        return message

    async def send(self, text: str) -> None:
        if self.closed is not None:
            raise self.closed
        event = json.loads(text)
        check_server_event(event)
        self.sent.append(event)
        self._arrived.set()

    async def close(self, code: int, reason: str) -> None:
        self.closed = self.closed or ChannelClosed(code, reason)
        self.incoming.put_nowait(self.closed)
        self._has_closed.set()

    async def when_closed(self) -> ChannelClosed:
        """How the server closed."""
        await self._has_closed.wait()
        assert self.closed is not None
        return self.closed

    async def next(self) -> Wire:
        """The next event that the server sent."""
        while self._num_read == len(self.sent):
            self._arrived.clear()
            await self._arrived.wait()
        self._num_read += 1
        return self.sent[self._num_read - 1]

    async def until(self, kind: str) -> Wire:
        """The next event of this type, skipping others; an unexpected error fails."""
        while (event := await self.next())["type"] != kind:
            assert event["type"] != "error", event
        return event

    def say(self, kind: str, **fields: Any) -> None:
        self.incoming.put_nowait(json.dumps({"type": kind, **fields}))

    async def refused(self, kind: str, **fields: Any) -> Wire:
        """Send an event that must fail; the error, which must name the event."""
        self.say(kind, event_id="evt_bad", **fields)
        error = cast(Wire, (await self.next())["error"])
        assert error["event_id"] == "evt_bad"
        return error


class FakeSession:
    """Notes what it is told; ``failure`` is raised by the next call."""

    def __init__(self, services: Any, config: Any, sink: e.Sink) -> None:
        self.id = "sess_fake"
        self.config = config
        self.sink = sink
        self.calls: list[tuple[Any, ...]] = []
        self.failure: Exception | None = None
        self.broken = asyncio.Event()
        self.is_closed = False
        self.is_idle = True

    async def run(self) -> None:
        await self.broken.wait()
        raise RuntimeError("the loop broke")

    async def close(self) -> None:
        self.is_closed = True

    async def prepare_tools(self, config: Any, param: str) -> None:
        """There is no engine."""

    async def update(self, config: Any) -> None:
        self._note("update", config)
        self.config = config

    def get_item(self, item_id: str) -> e.Item:
        self._note("get_item", item_id)
        return e.Item(item_id, "user", [e.Part("input_text", "Hi")])

    def __getattr__(self, name: str) -> Callable[..., Awaitable[None]]:
        async def call(*args: Any, **kwargs: Any) -> None:
            self._note(name, *args, **kwargs)

        return call

    def _note(self, name: str, *args: Any, **kwargs: Any) -> None:
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        self.calls.append((name, *args, *([kwargs] if kwargs else [])))
