"""The simulated caller at servers that hang up, break the protocol, or meet a fault of ours."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from websockets.asyncio.server import ServerConnection, serve

from app.clients.call import CallClient, Trouble, open_call
from app.clients.phone_providers import PEERS
from app.clients.recording import RATE, VoicedFrames
from app.clients.talk import CallerAudio, TalkError
from tests.support.fakes import EnergyVad

Side = Callable[[ServerConnection], Awaitable[None]]


@asynccontextmanager
async def server(stream: Side, session: Side) -> AsyncIterator[str]:
    """What it does with the provider's connection and with the client that attaches; its URL."""

    async def answer(socket: ServerConnection) -> None:
        assert socket.request is not None
        is_stream = socket.request.path.startswith("/phone/stream")
        await (stream if is_stream else session)(socket)

    async with serve(answer, "127.0.0.1", 0, compression=None) as running:
        host, port = next(iter(running.sockets)).getsockname()[:2]
        yield f"http://{host}:{port}"


async def listen(socket: ServerConnection) -> None:
    async for _ in socket:
        pass


async def say_no(socket: ServerConnection) -> None:
    await socket.close(1008, "no such account")


async def find_nothing(socket: ServerConnection) -> None:
    await socket.send(json.dumps({"type": "error", "error": {"message": "no such call"}}))
    await listen(socket)


async def be_full(socket: ServerConnection) -> None:
    await socket.close(1013, "full")


async def babble(socket: ServerConnection) -> None:
    await socket.send("[]")
    await listen(socket)


@pytest.mark.parametrize(
    ("stream", "session", "complaint"),
    [
        (say_no, find_nothing, "did not take the call .*1008: no such account"),
        (listen, be_full, "closed the attached session: .*1013 .* full"),
        (listen, babble, "not a Realtime event"),
    ],
)
async def test_a_call_that_does_not_come_about(stream: Side, session: Side, complaint: str) -> None:
    async with server(stream, session) as url:
        with pytest.raises(TalkError, match=complaint):
            async with open_call(url, "twilio"):
                pass


async def test_an_event_that_no_server_sends_ends_the_talk_at_once() -> None:
    has_spoken = asyncio.Event()

    async def stream(socket: ServerConnection) -> None:
        async for message in socket:
            if json.loads(message)["event"] == "media":
                has_spoken.set()

    async def session(socket: ServerConnection) -> None:
        await socket.send(json.dumps({"type": "session.created"}))
        await has_spoken.wait()
        await socket.send(json.dumps({"type": "response.created"}))
        await listen(socket)

    voiced = VoicedFrames(np.zeros(RATE, np.float32), RATE, cast(Any, EnergyVad()))
    audio = CallerAudio(Path("x.wav"), np.zeros(30 * RATE, np.int16), voiced, RATE)
    async with server(stream, session) as url, open_call(url, "twilio") as client:
        async with asyncio.timeout(10):
            with pytest.raises(TalkError, match=r"broke the protocol: malformed response\.created"):
                await client.speak(audio, timeout_s=30)


async def test_a_fault_of_the_receiver_is_not_lost() -> None:
    class Link:
        farewell = ""

        async def send(self, message: object) -> None: ...

        async def receive(self) -> str:
            return "{}"

        async def close(self) -> None: ...

    peer = PEERS["twilio"]("CA1", "")

    def read(message: object) -> object:
        raise ZeroDivisionError

    cast(Any, peer).read = read
    client = CallClient(peer, cast(Any, Link()), Trouble())
    await client.begin()
    await client.has_ended.wait()
    with pytest.raises(ZeroDivisionError):
        await client.hang_up()
    await client.hang_up()


async def test_keys_after_the_end_of_the_call_are_lost() -> None:
    has_hung_up = asyncio.Event()

    async def stream(socket: ServerConnection) -> None:
        await has_hung_up.wait()

    async def session(socket: ServerConnection) -> None:
        await socket.send(json.dumps({"type": "session.created"}))
        await listen(socket)

    async with server(stream, session) as url, open_call(url, "twilio") as client:
        has_hung_up.set()
        await client.has_ended.wait()
        await client.press("1#")
        assert await client.hear_greeting() == 0
