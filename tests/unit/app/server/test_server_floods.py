"""Peers who send what costs most, over real sockets: others are served meanwhile. No models."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.frames import Frame, Opcode

from app.conversation.session import Session
from app.server import http_protocol
from app.server.lifecycle import create_app, listening
from tests.support.fake_realtime import FakeSession
from tests.support.fakes import ScriptedEngine, fake_services
from tests.unit.app.server.test_server import certificate, socket_url

PING = Frame(Opcode.PING, b"").serialize(mask=True)
PONG = Frame(Opcode.PONG, b"").serialize(mask=False)


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    (tmp_path / "index.html").write_text("<!doctype html>")
    services = fake_services(ScriptedEngine(), host="127.0.0.1", port=0)
    cast(Any, services.engine).is_alive = True
    make = cast(Any, lambda *args: cast(Session, FakeSession(*args)))
    app = create_app(services.settings, services, web_root=tmp_path, make_session=make)
    async with listening(app, services.settings) as url:
        yield url


async def raw_socket(
    url: str, trust: ssl.SSLContext | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A WebSocket whose frames are written by hand; the session has been created."""
    port = int(url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
    writer.write(
        b"GET /v1/realtime HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\n"
        b"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
    )
    assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
    kind, length = await reader.readexactly(2)
    assert (kind, length) == (0x81, 126)  # a text of up to 64 KB
    created = await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))
    assert json.loads(created)["type"] == "session.created"
    return reader, writer


async def all_of(reader: asyncio.StreamReader) -> bytes:
    """What comes until the end, which is a reset when we have sent what was not read any more."""
    data = b""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(10):
            while more := await reader.read(65536):
                data += more
    return data


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def answered(url: str) -> None:
    """Another caller comes, and is served."""
    async with connect(socket_url(url)) as socket:
        await socket.recv()
        await socket.send('{"type":"conversation.item.retrieve","item_id":"i"}')
        assert json.loads(await socket.recv())["type"] == "conversation.item.retrieved"


async def test_pings_are_all_answered_and_others_are_served_before(url: str) -> None:
    reader, writer = await raw_socket(url)
    writer.write(PING * 60_000)
    done = asyncio.create_task(reader.readexactly(60_000 * len(PONG)))
    await answered(url)
    assert not done.done()  # 60,000 frames are 180 portions
    async with asyncio.timeout(20):
        assert await done == PONG * 60_000
    await closed(writer)


async def test_a_message_in_many_fragments_is_read_and_one_in_too_many_is_not(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "MAX_FRAGMENTS", 1000)
    event = b'{"type":"conversation.item.retrieve","item_id":"i"}'
    for num_empty in (900, 1000):
        reader, writer = await raw_socket(url)
        writer.write(Frame(Opcode.TEXT, event[:10], fin=False).serialize(mask=True))
        writer.write(Frame(Opcode.CONT, b"", fin=False).serialize(mask=True) * num_empty)
        writer.write(Frame(Opcode.CONT, event[10:]).serialize(mask=True))
        if num_empty == 900:
            async with asyncio.timeout(10):
                await reader.readuntil(b"conversation.item.retrieved")
        else:
            answer = await all_of(reader)
            assert answer[2:4] == (1009).to_bytes(2, "big")
            assert answer[4:] == b"a message in more than 1000 fragments"
        await closed(writer)
    await answered(url)


async def test_fragments_without_end_and_without_content_end(url: str) -> None:
    reader, writer = await raw_socket(url)
    writer.write(Frame(Opcode.TEXT, b"{", fin=False).serialize(mask=True))
    empty = Frame(Opcode.CONT, b"", fin=False).serialize(mask=True) * 1000
    answer = asyncio.create_task(all_of(reader))
    with pytest.raises(ConnectionError):
        async with asyncio.timeout(20):
            while True:
                writer.write(empty)
                await writer.drain()
    assert b"fragments" in await answer
    await closed(writer)


async def test_a_body_in_tiny_chunks_holds_up_nobody(url: str) -> None:
    port = int(url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"messages": [{"role": "user", "content": "?"}], "model": "?" * 40_000})
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    writer.write(b"".join(b"1\r\n%c\r\n" % letter for letter in body.encode()) + b"0\r\n\r\n")
    head = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
    async with httpx.AsyncClient(base_url=url) as http:
        assert (await http.get("/healthz")).status_code == 200
    assert not head.done()
    async with asyncio.timeout(20):
        assert b" 404 " in await head  # all of it was read: the model's name is not ours
    await closed(writer)


async def test_the_same_over_tls(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<!doctype html>")
    cert, key = certificate(tmp_path)
    services = fake_services(ScriptedEngine(), host="127.0.0.1", port=0, tls_cert=cert, tls_key=key)
    cast(Any, services.engine).is_alive = True
    make = cast(Any, lambda *args: cast(Session, FakeSession(*args)))
    app = create_app(services.settings, services, web_root=tmp_path, make_session=make)
    trust = ssl.create_default_context(cafile=str(cert))
    async with listening(app, services.settings) as url:
        reader, writer = await raw_socket(url, trust)
        writer.write(PING * 10_000)
        async with asyncio.timeout(20):
            assert await reader.readexactly(10_000 * len(PONG)) == PONG * 10_000
        # A large message in one frame is as whole as before.
        event = {"type": "conversation.item.retrieve", "item_id": "i", "event_id": "e" * 300_000}
        writer.write(Frame(Opcode.TEXT, json.dumps(event).encode()).serialize(mask=True))
        async with asyncio.timeout(20):
            assert (await reader.read(100))[:1] == b"\x81"
        await closed(writer)
