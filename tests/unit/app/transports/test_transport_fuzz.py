"""Anything at all over WebRTC and the phone's lines, and offers that nobody should make.

How long, and how one is repeated: see ``fuzz_server``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pylibsrtp
import pytest
from aiortc.rtp import RtpPacket
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from app.clients.phone_providers import PEERS, Message
from tests.support.fuzz_events import EventMaker
from tests.support.fuzz_phone import PhoneMaker
from tests.support.fuzz_server import (
    FUZZ_S,
    MAX_BYSTANDER_S,
    SEED,
    TIMEOUT,
    Target,
    bystander,
    server,
)
from tests.support.openai_events import check_server_event
from tests.support.rtc_client import RtcClient
from tests.unit.app.transports.test_webrtc_sdp import OFFER

pytestmark = TIMEOUT


async def harass(target: Target, attack: Callable[[random.Random], Awaitable[None]]) -> None:
    """Two at once for ``FUZZ_S``, beside a caller who is answered all the while."""
    ends_s = time.monotonic() + FUZZ_S

    async def again_and_again(number: int) -> None:
        rng = random.Random(SEED + number)
        while time.monotonic() < ends_s:
            await attack(rng)

    async with asyncio.TaskGroup() as group:
        for number in range(2):
            group.create_task(again_and_again(number))
        unaffected = group.create_task(bystander(target.url, ends_s))
    assert unaffected.result() < MAX_BYSTANDER_S


# --- phones ---


@pytest.mark.parametrize("line", ["websocket", "audiosocket"])
async def test_nonsense_over_the_phone(caplog: pytest.LogCaptureFixture, line: str) -> None:
    """Over the WebSocket each call is of another provider."""
    is_tcp = line == "audiosocket"
    providers = [p for p in PEERS if (p == "audiosocket") == is_tcp]
    speak = _over_tcp if is_tcp else _over_websocket
    async with server(caplog, phone_greeting="Hello there.") as target:

        async def attack(rng: random.Random) -> None:
            maker = PhoneMaker(rng.choice(providers), rng)
            script = [maker.peer.hello()] if rng.random() < 0.8 else []
            script += [maker.messages() for _ in range(rng.randrange(1, 60))]
            await speak(target, maker, [message for part in script for message in part])

        await harass(target, attack)


async def _over_websocket(target: Target, maker: PhoneMaker, script: list[Message]) -> None:
    line = await connect(target.url.replace("http", "ws") + "/phone/stream", proxy=None)

    async def listen() -> None:
        with contextlib.suppress(ConnectionClosed):
            async for message in line:
                maker.take(message)

    listening = asyncio.create_task(listen())
    try:
        with contextlib.suppress(ConnectionClosed):
            for message in script:
                # Lone surrogates are no text; a WebSocket cannot carry them.
                await line.send(_utf8(message))
                await _breathe(maker.rng)
    finally:
        if maker.rng.random() < 0.5:
            line.transport.abort()
        else:
            await line.close()
        await listening
    assert line.close_code != 1011


def _utf8(message: Message) -> Message:
    return message.encode("utf-8", "replace").decode() if isinstance(message, str) else message


async def _over_tcp(target: Target, maker: PhoneMaker, script: list[Message]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)

    async def listen() -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                header = await reader.readexactly(3)
                maker.take(header + await reader.readexactly(int.from_bytes(header[1:], "big")))

    listening = asyncio.create_task(listen())
    try:
        with contextlib.suppress(OSError):
            for message in script:
                assert isinstance(message, bytes)
                writer.write(message)
                await writer.drain()
                await _breathe(maker.rng)
    finally:
        if maker.rng.random() < 0.5:
            writer.transport.abort()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        await listening


async def _breathe(rng: random.Random) -> None:
    if rng.random() < 0.1:
        await asyncio.sleep(rng.random() * 0.05)


# --- WebRTC ---


async def test_nonsense_over_the_data_channel_and_the_media(
    caplog: pytest.LogCaptureFixture,
) -> None:
    num_connected = num_failed = 0
    async with server(caplog) as target:

        async def attack(rng: random.Random) -> None:
            nonlocal num_connected, num_failed
            maker = EventMaker(rng)
            received: list[str] = []
            async with RtcClient(target.url) as client:
                client.channel.on("message", received.append)
                try:
                    await client.connect()
                except TimeoutError:  # on a machine that is too busy
                    num_failed += 1
                    return
                num_connected += 1
                for _ in range(rng.randrange(1, 60)):
                    _check(received, maker)
                    if client.channel.readyState != "open":
                        break
                    message = maker.message()
                    if rng.random() < 0.3:
                        await _send_garbage(client, rng)
                    client.channel.send(_utf8(message))
                    await _breathe(rng)
            _check(received, maker)

        await harass(target, attack)
    print(f"{num_connected} calls, {num_failed} did not come about")
    assert num_connected and num_failed <= num_connected // 20


def _check(received: list[str], maker: EventMaker) -> None:
    """Each event that has come since the last time is one that a client expects."""
    while received:
        event: dict[str, Any] = json.loads(received.pop(0))
        check_server_event(event)
        maker.see(event)
        if event["type"] == "error":
            assert event["error"]["type"] == "invalid_request_error", event


async def _send_garbage(client: RtcClient, rng: random.Random) -> None:
    """Within the encrypted connection: audio that is none, reports that are none, broken SCTP."""
    transport = client.connection.getSenders()[0].transport
    noise = rng.randbytes(rng.randrange(1, 200))
    # The client's own end may refuse to encrypt what has the number of an old packet.
    with contextlib.suppress(ConnectionError, pylibsrtp.Error):
        match rng.randrange(4):
            case 0:
                packet = RtpPacket(
                    payload_type=rng.choice((96, 111, 0)),
                    sequence_number=rng.getrandbits(16),
                    timestamp=rng.getrandbits(32),
                    ssrc=rng.choice((7, rng.getrandbits(32))),
                    payload=noise,
                )
                await transport._send_rtp(packet.serialize())
            case 1:  # a report of some type, of the right length or not
                words = rng.choice((len(noise) // 4, rng.randrange(100)))
                head = bytes([0x80 | rng.randrange(32), rng.randrange(200, 208)])
                await transport._send_rtp(head + words.to_bytes(2, "big") + bytes(4) + noise)
            case 2:
                await transport._send_data(noise)
            case 3:  # a chunk of SCTP with the right ports and a checksum that is wrong
                await transport._send_data(b"\x13\x88\x13\x88" + noise)


async def test_offers_that_nobody_should_make(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody will connect; here that is not waited for as long as usual.
    monkeypatch.setattr("app.transports.webrtc.peer.CONNECT_TIMEOUT_S", 1.0)
    async with (
        server(caplog) as target,
        httpx.AsyncClient(base_url=target.url, verify=False, timeout=30) as http,
    ):

        async def attack(rng: random.Random) -> None:
            sdp = _spoiled_offer(rng)
            path = "/v1/realtime/calls" + rng.choice(
                ("", "", "?model=x", "?resume=rtc_1", "?a=%ff")
            )
            if rng.random() < 0.7:
                kind = rng.choice(("application/sdp", "application/sdp", "text/plain", ""))
                reply = await http.post(path, content=sdp, headers={"content-type": kind})
            else:
                session = json.dumps(EventMaker(rng).value(4)).encode()
                fields = {"sdp": (None, sdp), "session": (None, session)}
                files: Any = {name: fields[name] for name in fields if rng.random() < 0.9}
                reply = await http.post(path, files=files or {"x": (None, b"")})
            assert reply.status_code < 500, (reply.status_code, sdp)
            if reply.status_code != 201:
                assert reply.json()["error"]["message"]
                return
            _send_datagrams(reply.text, rng)
            if rng.random() < 0.5:
                await http.post(reply.headers["location"] + "/hangup")

        await harass(target, attack)


def _spoiled_offer(rng: random.Random) -> bytes:
    lines = OFFER.split("\r\n")
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(lines))
        match rng.randrange(6):
            case 0:
                del lines[at]
            case 1:
                lines.insert(at, rng.choice(lines))
            case 2:
                lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]
            case 3:
                lines[at] = re.sub(r"\d+", lambda m: str(rng.choice((0, -1, 10**30))), lines[at])
            case 4:
                lines[at] += rng.choice((" ", "\0", "ü", "x" * 5_000, ":" * 50))
            case 5:
                rng.shuffle(lines)
        lines = lines or ["v=0"]
    sdp = "\r\n".join(lines).encode()
    return rng.randbytes(rng.randrange(300)) if rng.random() < 0.05 else sdp


def _send_datagrams(answer: str, rng: random.Random) -> None:
    """To the ports of a call: like STUN, DTLS and RTP at first sight, and not at the second."""
    ports = {int(found) for found in re.findall(r" 127\.0\.0\.1 (\d+) typ host", answer)}
    ports |= {int(found) for found in re.findall(r"udp \d+ [\d.]+ (\d+) typ host", answer)}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for port in ports:
            for _ in range(rng.randrange(8)):
                first = rng.choice((b"\x00\x01", b"\x01\x01", b"\x16\xfe", b"\x80\x6f", b""))
                cookie = rng.choice((b"", b"\x00\x08\x21\x12\xa4\x42"))
                datagram = first + cookie + rng.randbytes(rng.randrange(120))
                stranger.sendto(datagram, ("127.0.0.1", port))
