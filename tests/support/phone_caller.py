"""A phone at the other end of a real socket, and a server with stand-ins for the models."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from fastapi import FastAPI
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from app.api.telephony.routes import audiosocket
from app.clients.phone_providers import (
    PEERS,
    Goodbye,
    Mark,
    Message,
    Order,
    Peer,
    Play,
    new_call_id,
)
from app.conversation.tools import ToolBox
from app.server.lifecycle import create_app, listening
from audio.codecs import decode, encode
from tests.support.fakes import ScriptedEngine, ScriptedRecognizer, fake_services

OrderT = TypeVar("OrderT", bound=Order)
PATIENCE_S = 30.0  # nobody waits so long, unless the machine is very busy


@dataclass
class Server:
    """A running one. ``port``: AudioSocket's."""

    url: str
    port: int
    app: FastAPI
    engine: ScriptedEngine

    @property
    def num_calls(self) -> int:
        return len(self.app.state.connections)

    async def until_free(self) -> None:
        """Returns when no call is left."""
        async with asyncio.timeout(PATIENCE_S):
            while self.num_calls or self.engine.num_running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@asynccontextmanager
async def phone_server(
    web_root: Path,
    *replies: str,
    texts: tuple[str, ...] = ("Hello?",) * 40,
    tools: ToolBox | None = None,
    **settings: Any,
) -> AsyncIterator[Server]:
    """Checks that nothing is left behind at its end."""
    tasks, fds = asyncio.all_tasks(), num_open_files()
    engine = ScriptedEngine(*replies)
    known = {
        "host": "127.0.0.1",
        "port": 0,
        "audiosocket_port": 0,
        "phone_greeting": "",
        "turn_detection": "server_vad",
        "max_sessions": 60,
        **settings,
    }
    services = fake_services(engine, ScriptedRecognizer(*texts), None, tools, **known)
    (web_root / "index.html").write_text("<!doctype html><title>Parley</title>")
    app = create_app(services.settings, services, web_root=web_root)
    phones = audiosocket(app.state.phone, services.settings)
    async with phones as port, listening(app, services.settings) as url:
        assert port is not None
        server = Server(url, port, app, engine)
        yield server
        await server.until_free()
    await until_same(lambda: asyncio.all_tasks() - tasks, "tasks")
    # The loop's own pool of threads may have opened one.
    await until_same(lambda: num_open_files() > fds + 1, "open files")


class Caller:
    """Whoever has phoned. ``plays``: marks are given back as soon as they come."""

    def __init__(self, peer: Peer, send: Callable[[Message], Any]) -> None:
        self.peer = peer
        self.plays = True
        self.orders: list[Order] = []
        self.held: list[Mark] = []
        self.ended = asyncio.Event()
        self.send = send
        self._came = asyncio.Event()
        self._number = 0

    async def hello(self) -> None:
        for message in self.peer.hello():
            await self.send(message)

    async def say(self, seconds: float, level: float = 0.3) -> None:
        """A loud tone (or silence), all at once."""
        rate, size = self.peer.format.rate, self.peer.format.rate * self.peer.frame_ms // 1000
        for start in range(0, int(seconds * rate), size):
            t = np.arange(start, start + size) / rate
            wave = (level * np.sin(2 * np.pi * 220 * t)).astype(np.float32)
            await self.send(self.peer.audio(encode(wave, self.peer.format), self._number))
            self._number += 1

    async def ask(self) -> None:
        """A turn, and the silence that ends it."""
        await self.say(0.6)
        await self.say(0.7, level=0.0)

    async def press(self, keys: str) -> None:
        for key in keys:
            await self.send(self.peer.key(key))

    async def goodbye(self) -> None:
        if (message := self.peer.goodbye()) is not None:
            await self.send(message)

    async def until(self, kind: type[OrderT], count: int = 1) -> list[OrderT]:
        """The first ``count`` orders of a kind that have come since ``forget``."""
        async with asyncio.timeout(PATIENCE_S):
            while len(found := [o for o in self.orders if isinstance(o, kind)]) < count:
                assert not self.ended.is_set(), "the server has hung up"
                self._came.clear()
                await self._came.wait()
        return found[:count]

    async def until_ended(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.ended.wait()

    def forget(self) -> None:
        self.orders.clear()

    @property
    def played_s(self) -> float:
        """Length of all audio that has come since ``forget``."""
        fmt = self.peer.format
        num_bytes = sum(len(o.payload) for o in self.orders if isinstance(o, Play))
        return num_bytes / fmt.sample_len / fmt.rate

    @property
    def loudness(self) -> float:
        """Of the loudest sample that has come since ``forget``."""
        payload = b"".join(o.payload for o in self.orders if isinstance(o, Play))
        return float(np.abs(decode(payload, self.peer.format)).max(initial=0.0))

    async def give_back(self) -> None:
        """The marks that were kept back."""
        self.plays = True
        for mark in self.held:
            await self.send(mark.reply)
        self.held.clear()

    async def take(self, message: Message) -> None:
        order = self.peer.read(message)  # raises PeerError: the test fails when it ends
        self.orders.append(order)
        if isinstance(order, Mark):
            if self.plays:
                await self.send(order.reply)
            else:
                self.held.append(order)
        if isinstance(order, Goodbye):
            self.ended.set()
        self._came.set()

    def end(self) -> None:
        self.ended.set()
        self._came.set()


@asynccontextmanager
async def phone(
    server: Server, provider: str = "twilio", *, token: str = "", begins: bool = True
) -> AsyncIterator[Caller]:
    """A call; hung up at the end of the block without a word."""
    peer = PEERS[provider](new_call_id(provider), token)
    opened = _tcp(server.port) if provider == "audiosocket" else _websocket(server.url)
    async with opened as (send, messages):
        caller = Caller(peer, send)

        async def receive() -> None:
            try:
                async for message in messages:
                    await caller.take(message)
            except (ConnectionClosed, OSError):
                pass  # the end, as any other
            finally:
                caller.end()

        receiving = asyncio.create_task(receive())
        try:
            if begins:
                await caller.hello()
            yield caller
        finally:
            receiving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await receiving


@asynccontextmanager
async def _websocket(url: str) -> AsyncIterator[tuple[Any, Any]]:
    connection: ClientConnection
    async with connect(url.replace("http", "ws") + "/phone/stream", proxy=None) as connection:

        async def send(message: Message) -> None:
            with contextlib.suppress(ConnectionClosed):
                await connection.send(message)

        yield send, connection


@asynccontextmanager
async def _tcp(port: int) -> AsyncIterator[tuple[Any, Any]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def send(message: Message) -> None:
        writer.write(cast(bytes, message))
        with contextlib.suppress(OSError):
            await writer.drain()

    async def frames() -> AsyncIterator[bytes]:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                header = await reader.readexactly(3)
                yield header + await reader.readexactly(int.from_bytes(header[1:], "big"))

    try:
        yield send, frames()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def until_same(excess: Callable[[], object], what: str) -> None:
    """Waits until nothing is in excess; fails with what is."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while excess():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"{what} left: {excess()}") from None


def num_open_files() -> int:
    """File descriptors of this process."""
    return len([*Path("/proc/self/fd").iterdir()])
