"""Anything at all, in any order, over real sockets: the server answers, and nobody else notices.

``PARLEY_FUZZ_S`` sets how long each part goes on (300 for a thorough run), ``PARLEY_FUZZ_SEED``
repeats one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from app.conversation.tools import ToolBox, tool
from app.server import listening
from app.web import create_app
from tests.busy import Stopwatch
from tests.fakes import ScriptedEngine, ScriptedRecognizer, fake_services
from tests.fuzz_events import EventMaker
from tests.openai_events import check_server_event

FUZZ_S = float(os.environ.get("PARLEY_FUZZ_S", "5"))
SEED = int(os.environ.get("PARLEY_FUZZ_SEED", "0")) or random.randrange(1, 2**31)
NUM_CALLERS = 4
# A bystander's answer takes a few ms, and much longer when the loop is held up.
MAX_BYSTANDER_S = 5.0
TIMEOUT = pytest.mark.timeout(int(FUZZ_S) + 90)

CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


@tool
async def look() -> str:
    """Look."""
    await asyncio.sleep(0.01)
    return "nothing"


def num_threads() -> int:
    """Without those in which Starlette reads files, which live on for some seconds of idleness."""
    return sum(not thread.name.startswith("AnyIO") for thread in threading.enumerate())


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - what is counted is not a folder of files


@asynccontextmanager
async def server(caplog: pytest.LogCaptureFixture) -> AsyncIterator[tuple[str, FastAPI]]:
    """Fails if anything of ours went wrong or was left behind."""
    print(f"PARLEY_FUZZ_SEED={SEED}")
    loop, unhandled = asyncio.get_running_loop(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, context: unhandled.append(context))
    caplog.set_level(logging.WARNING)
    engine = ScriptedEngine(f"Let me see. {CALL}", "It is **this** one, I think.", CALL, "Yes. No.")
    services = fake_services(
        engine,
        ScriptedRecognizer(*["Well then."] * 100_000),
        tools=ToolBox([look]),
        port=0,
        playout_lead_ms=60_000,
        max_sessions=64,
        max_sessions_per_minute=100_000,
        max_messages_per_s=100_000,
    )
    cast(Any, services.engine).is_alive = True
    app = create_app(services.settings, services)
    async with listening(app, services.settings) as url:
        await answers_in_time(url, 1)  # what is made once and kept is made now
        before = asyncio.all_tasks()
        threads, descriptors = num_threads(), num_descriptors()
        yield url, app
        async with asyncio.timeout(20):
            while (  # noqa: ASYNC110 - what is waited for sets no event
                len(app.state.connections)
                or asyncio.all_tasks() - before
                or engine.num_running
                or num_descriptors() > descriptors
            ):
                await asyncio.sleep(0.02)
        assert num_threads() <= threads
    assert unhandled == []
    # uvicorn calls a handshake that we denied an error.
    errors = [
        record
        for record in caplog.records
        if record.levelno >= logging.ERROR and "completing handshake" not in record.getMessage()
    ]
    assert not errors, errors[0].exc_text or errors[0].getMessage()


async def answers_in_time(url: str, times: int) -> float:
    """A well-behaved caller asks ``times`` and again; the longest that it waited, in seconds."""
    longest_s = 0.0
    async with connect(url.replace("http", "ws") + "/v1/realtime") as socket:
        await until(socket, "session.created")
        for _ in range(times):
            watch = Stopwatch()
            content = [{"type": "input_text", "text": "Hi"}]
            item = {"type": "message", "role": "user", "content": content}
            await socket.send(json.dumps({"type": "conversation.item.create", "item": item}))
            response = {"output_modalities": ["text"], "tool_choice": "none"}
            await socket.send(json.dumps({"type": "response.create", "response": response}))
            done = await until(socket, "response.done")
            assert done["response"]["status"] == "completed", done
            longest_s = max(longest_s, watch.took_s())
            await asyncio.sleep(0.05)
    return longest_s


async def until(socket: ClientConnection, kind: str) -> dict[str, Any]:
    while True:
        event: dict[str, Any] = json.loads(await socket.recv())
        assert event["type"] != "error", event
        if event["type"] == kind:
            return event


async def bystander(url: str, ends_s: float) -> float:
    longest_s = 0.0
    while time.monotonic() < ends_s:
        longest_s = max(longest_s, await answers_in_time(url, 5))
    return longest_s


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
    async with server(caplog) as (url, _):
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
    async with server(caplog) as (url, _), httpx.AsyncClient(base_url=url) as http:
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
    async with server(caplog) as (url, _):
        rng = random.Random(SEED)

        async def come_and_go() -> None:
            if rng.random() < 0.3:
                await shakes_hands_badly(url, rng)
                return
            with contextlib.suppress(InvalidHandshake, ConnectionClosed, TimeoutError, OSError):
                async with asyncio.timeout(rng.random() * 0.3):
                    await talks_nonsense(url, rng)

        for _ in range(5):
            async with asyncio.TaskGroup() as callers:
                for _ in range(10):
                    callers.create_task(come_and_go())
        assert await answers_in_time(url, 3) < MAX_BYSTANDER_S
