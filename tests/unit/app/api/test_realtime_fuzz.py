"""Anything at all, in any order, over real sockets: the server answers, and nobody else notices.

How long, and how one is repeated: see ``fuzz_server``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from tests.support.fuzz_events import EventMaker
from tests.support.fuzz_server import (
    FUZZ_S,
    MAX_BYSTANDER_S,
    SEED,
    TIMEOUT,
    answers_in_time,
    bystander,
    server,
)
from tests.support.leaks import Memory
from tests.support.openai_events import check_server_event

NUM_CALLERS = 4


async def talks_nonsense(url: str, rng: random.Random) -> None:
    """One connection: some events, whatever they are, and then gone, one way or another."""
    maker = EventMaker(rng)
    socket = await connect(url.replace("http", "ws") + "/v1/realtime", max_size=None)
    reading = asyncio.create_task(read_all(socket, maker))
    try:
        for _ in range(rng.randrange(1, 60)):
            await socket.send(maker.message())
            if rng.random() < 0.2:
                await asyncio.sleep(rng.random() * 0.05)
    finally:
        if rng.random() < 0.5:
            socket.transport.abort()
        else:
            await socket.close()
        await reading


async def read_all(socket: ClientConnection, maker: EventMaker) -> None:
    with contextlib.suppress(ConnectionClosed):
        async for text in socket:
            event = json.loads(text)
            check_server_event(event)
            maker.see(event)
            if event["type"] == "error":
                assert event["error"]["type"] == "invalid_request_error", event
                assert event["error"]["code"], event
    assert socket.close_code != 1011


@TIMEOUT
async def test_nonsense_over_the_socket(caplog: pytest.LogCaptureFixture) -> None:
    async with server(caplog) as target:
        url = target.url
        ends_s = time.monotonic() + FUZZ_S

        async def talk(number: int) -> None:
            rng = random.Random(SEED + number)
            while time.monotonic() < ends_s:
                await talks_nonsense(url, rng)

        async with asyncio.TaskGroup() as callers:
            for number in range(NUM_CALLERS):
                callers.create_task(talk(number))
            unaffected = callers.create_task(bystander(url, ends_s))
        assert unaffected.result() < MAX_BYSTANDER_S


@TIMEOUT
async def test_nonsense_over_http_and_in_handshakes(caplog: pytest.LogCaptureFixture) -> None:
    async with server(caplog) as target, httpx.AsyncClient(base_url=target.url) as http:
        url = target.url
        ends_s, rng = time.monotonic() + FUZZ_S / 2, random.Random(SEED)
        unaffected = asyncio.create_task(bystander(url, ends_s))
        while time.monotonic() < ends_s:
            maker = EventMaker(rng)
            message = maker.message()
            body = message if isinstance(message, bytes) else message.encode("utf-8", "replace")
            path = rng.choice(
                ("/v1/realtime/client_secrets", "/v1/traces", "/v1/models", "/healthz", "/x")
            )
            method = rng.choice(("GET", "POST", "PUT", "OPTIONS"))
            params = {"limit": rng.choice(("1", "-1", "a", "\0", "9" * 50))}
            answered = await http.request(method, path, content=body, params=params)
            assert answered.status_code < 500, (method, path, body)
            await shakes_hands_badly(url, rng)
        assert await unaffected < MAX_BYSTANDER_S


async def shakes_hands_badly(url: str, rng: random.Random) -> None:
    port = int(url.rsplit(":", 1)[1])
    request = (
        f"GET /v1/realtime?{rng.choice(('', 'model=x', 'call_id=%00', 'intent=%ff'))} HTTP/1.1\r\n"
        f"Host: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    ).encode()
    kind = rng.randrange(4)
    if kind == 0:
        request = rng.randbytes(rng.randrange(200))
    elif kind == 1:
        at = rng.randrange(len(request))
        request = request[:at] + rng.randbytes(3) + request[at:]
    elif kind == 2:
        request = request[: rng.randrange(len(request))]
    else:  # a good handshake, and then no WebSocket frames
        request += rng.randbytes(rng.randrange(1, 100))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        await writer.drain()
        if rng.random() < 0.5:
            async with asyncio.timeout(0.02):
                assert b" 500 " not in await reader.read(200)
    except (ConnectionError, TimeoutError):
        pass  # it closed first, or wants to hear more
    finally:
        writer.transport.abort()


@TIMEOUT
async def test_fifty_come_and_go_at_random_moments(caplog: pytest.LogCaptureFixture) -> None:
    async with server(caplog) as target:
        url, app = target.url, target.app
        rng = random.Random(SEED)

        async def come_and_go() -> None:
            if rng.random() < 0.3:
                await shakes_hands_badly(url, rng)
                return
            with contextlib.suppress(InvalidHandshake, ConnectionClosed, TimeoutError, OSError):
                async with asyncio.timeout(rng.random() * 0.3):
                    await talks_nonsense(url, rng)

        async def ten() -> None:
            async with asyncio.TaskGroup() as callers:
                for _ in range(10):
                    callers.create_task(come_and_go())
            async with asyncio.timeout(20):
                while len(app.state.connections):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)

        await ten()
        memory = Memory()
        for _ in range(5):
            await ten()
        assert await answers_in_time(url, 3) < MAX_BYSTANDER_S
        await memory.assert_returned()
