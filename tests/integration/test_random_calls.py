"""Callers who come and go at random moments, and an engine that is killed: nothing is left."""

from __future__ import annotations

import asyncio
import base64
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from tests.integration.test_bad_input import (
    Running,
    answers,
    append,
    client,
    event,
    eventually,
    received,
    running,
    until,
)
from tests.support.fakes import silence, voice

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("llm_model_path", "asr_model_dir", "tts_voice_path"),
]

NUM_CALLERS = 51
MAX_GROWTH_BYTES = 48 * 1024 * 1024
SPEECH = base64.b64encode(voice(0.5) + silence(0.3)).decode()
QUESTION = event(
    "conversation.item.create",
    item={
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "Tell me a very long story about the sea."}],
    },
)


def num_descriptors() -> int:
    """Open files and sockets of this process."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - what is counted is not a folder of files


def resident_bytes() -> int:
    """Memory of this process; the engine has its own."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def host_and_port(server: Running) -> tuple[str, int]:
    parts = urlsplit(server.url)
    assert parts.hostname is not None and parts.port is not None
    return parts.hostname, parts.port


async def leaves_in_the_handshake(server: Running, rng: random.Random) -> None:
    """A TCP connection that is cut within the request, or right behind it."""
    host, port = host_and_port(server)
    request = (
        f"GET /v1/realtime HTTP/1.1\r\nHost: {host}:{port}\r\nUpgrade: websocket\r\n"
        "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    ).encode()
    _, writer = await asyncio.open_connection(host, port)
    writer.write(request[: rng.choice((0, 7, len(request) - 2, len(request), len(request)))])
    await writer.drain()
    writer.transport.abort()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def some_events(socket: ClientConnection, number: int) -> None:
    """Listen to ``number`` events, fewer if no more come soon."""
    with suppress(TimeoutError):
        async with asyncio.timeout(2):
            for _ in range(number):
                await received(socket)


async def leaves_at_once(socket: ClientConnection, rng: random.Random) -> None:
    """Does not even wait for the session."""


async def leaves_while_speaking(socket: ClientConnection, rng: random.Random) -> None:
    """In the speech, in the pause behind it, or when the answer begins."""
    await socket.send(append(SPEECH))
    if rng.random() < 0.5:
        await socket.send(append(base64.b64encode(silence(1.0)).decode()))
    await some_events(socket, rng.randrange(2, 12))


async def leaves_while_answered(socket: ClientConnection, rng: random.Random) -> None:
    """Somewhere between the request and the middle of the answer."""
    await socket.send(QUESTION)
    modality = rng.choice(("text", "audio"))
    await socket.send(event("response.create", response={"output_modalities": [modality]}))
    await some_events(socket, rng.randrange(0, 25))


async def leaves_after_cancelling(socket: ClientConnection, rng: random.Random) -> None:
    """With a cancelled answer, and the next one asked for."""
    await socket.send(QUESTION)
    await socket.send(event("response.create"))
    await some_events(socket, rng.randrange(5, 15))
    await socket.send(event("response.cancel"))
    await socket.send(event("response.create"))
    await some_events(socket, rng.randrange(0, 8))


LEAVERS: tuple[Callable[[ClientConnection, random.Random], Awaitable[None]], ...] = (
    leaves_at_once,
    leaves_while_speaking,
    leaves_while_answered,
    leaves_while_answered,
    leaves_after_cancelling,
)


async def comes_and_goes(server: Running, rng: random.Random) -> None:
    if rng.random() < 0.2:
        await leaves_in_the_handshake(server, rng)
        return
    socket = await connect(server.url, max_size=None, close_timeout=2)
    with suppress(ConnectionClosed):
        await rng.choice(LEAVERS)(socket, rng)
    if rng.random() < 0.6:
        socket.transport.abort()
    else:
        await socket.close()
    await socket.wait_closed()


@asynccontextmanager
async def serving(**settings: object) -> AsyncIterator[Running]:
    async with running(max_reply_tokens=48, temperature=0.0, **settings) as server:
        async with client(server.url) as socket:
            await answers(socket)
        yield server


@pytest.mark.timeout(120)
async def test_callers_who_come_and_go_leave_nothing() -> None:
    async with serving() as server:
        rng = random.Random(36)
        # What is made once and kept (thread pools, caches) is made by the first callers.
        await asyncio.gather(*(comes_and_goes(server, rng) for _ in range(6)))
        before = await server.counts()
        descriptors, memory = num_descriptors(), resident_bytes()

        for _ in range(NUM_CALLERS // 3):
            await asyncio.gather(*(comes_and_goes(server, rng) for _ in range(3)))

        assert await server.counts() == before
        await eventually(lambda: num_descriptors() <= descriptors, "all descriptors are closed")
        assert resident_bytes() - memory < MAX_GROWTH_BYTES
        async with client(server.url) as socket:
            await answers(socket)


@pytest.mark.timeout(120)
async def test_an_engine_killed_in_an_answer_is_reported_and_replaced() -> None:
    async with serving() as server, client(server.url) as socket, httpx.AsyncClient() as http:
        host, port = host_and_port(server)
        ready_url = f"http://{host}:{port}/readyz"
        assert (await http.get(ready_url)).status_code == 200
        await socket.send(QUESTION)
        await socket.send(event("response.create", response={"output_modalities": ["text"]}))
        await until(socket, "response.output_text.delta")

        process = server.services.engine._process
        assert process is not None
        os.kill(process._process.pid, signal.SIGKILL)
        done = (await until(socket, "response.done"))["response"]
        assert done["status"] == "failed"
        error = done["status_details"]["error"]
        assert error["code"] == "engine_died"
        assert "killed by SIGKILL" in error["message"]
        assert (await http.get(ready_url)).status_code == 503, "while another one is loading"

        async with asyncio.timeout(30):
            await answers(socket)
        assert (await http.get(ready_url)).status_code == 200
        stats = await server.services.engine.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
