"""The WebSocket channel by itself: order, bounds, and how it closes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from starlette.websockets import WebSocket

from app.transports.base import ChannelClosed
from app.transports.websocket import WebSocketChannel


class StuckSocket:
    """A WebSocket whose peer does not read, until ``unstick`` is set."""

    def __init__(self) -> None:
        self.unstick = asyncio.Event()
        self.sent: list[str] = []
        self.close_code: int | None = None
        self.incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        raise AttributeError(name)

    async def send_text(self, text: str) -> None:
        await self.unstick.wait()
        self.sent.append(text)

    async def receive(self) -> dict[str, Any]:
        return await self.incoming.get()

    async def close(self, code: int, reason: str) -> None:
        self.close_code = code
        self.incoming.put_nowait({"type": "websocket.disconnect", "code": code})


def channel_over(socket: StuckSocket, **limits: Any) -> WebSocketChannel:
    return WebSocketChannel(cast(WebSocket, socket), **limits)


async def test_messages_arrive_in_order_and_before_the_close() -> None:
    socket = StuckSocket()
    async with channel_over(socket) as channel:
        for number in range(20):
            await channel.send(str(number))
        socket.unstick.set()
    assert socket.sent == [str(number) for number in range(20)]
    assert socket.close_code == 1000


async def test_a_client_that_lets_too_much_pile_up_is_closed() -> None:
    socket = StuckSocket()
    async with channel_over(socket, max_queued_bytes=1000) as channel:
        receiving = asyncio.create_task(channel.receive())
        for _ in range(10):
            await channel.send("x" * 100)
        with pytest.raises(ChannelClosed) as overflow:
            await channel.send("one too many")
        assert overflow.value.code == 1013
        # The reader is woken: the session ends though the peer says nothing.
        with pytest.raises(ChannelClosed) as woken:
            await receiving
        assert woken.value.code == 1013
        with pytest.raises(ChannelClosed):
            await channel.receive()
    assert socket.close_code == 1013


async def test_a_client_that_falls_too_far_behind_is_closed() -> None:
    socket, now_s = StuckSocket(), 100.0
    async with channel_over(socket, max_queued_s=5.0, clock_s=lambda: now_s) as channel:
        await channel.send("first")
        now_s = 104.0
        await channel.send("in time")
        now_s = 106.0
        with pytest.raises(ChannelClosed, match="1013"):
            await channel.send("too late")


async def test_a_peer_that_closed_gets_nothing_more() -> None:
    socket = StuckSocket()
    async with channel_over(socket) as channel:
        socket.incoming.put_nowait({"type": "websocket.disconnect", "code": 1001, "reason": "off"})
        with pytest.raises(ChannelClosed) as closed:
            await channel.receive()
        assert (closed.value.code, closed.value.reason) == (1001, "off")
        with pytest.raises(ChannelClosed):
            await channel.send("too late")
    assert socket.close_code is None


async def test_long_reasons_are_cut_to_what_a_close_frame_holds() -> None:
    socket = StuckSocket()
    channel = channel_over(socket)
    async with channel:
        await channel.close(1008, "ü" * 200)
        await channel.close(1000, "again")
    assert socket.close_code == 1008
