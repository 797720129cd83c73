"""Bodies that are too long, too slow, or stop in the middle, at each route that reads one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from app.api.audio import routes
from app.api.http import body
from app.api.http.body import BodyBudget
from app.errors import UnavailableError
from app.server.lifecycle import create_app, listening
from tests.support.fakes import ScriptedEngine, fake_services

ROUTES = {
    "/v1/chat/completions": "application/json",
    "/v1/realtime/client_secrets": "application/json",
    "/v1/realtime/calls": "application/sdp",
    "/phone/twilio/voice": "application/x-www-form-urlencoded",
    "/v1/audio/transcriptions": "multipart/form-data; boundary=b",
    "/v1/audio/speech": "application/json",
    "/v1/traces/{turn_id}/playout": "application/json",
}


@asynccontextmanager
async def serving(web_root: Path) -> AsyncIterator[tuple[int, Any]]:
    """A port, and the application behind it."""
    (web_root / "index.html").write_text("<!doctype html><title>Parley</title>")
    services = fake_services(ScriptedEngine("Hi"), port=0, phone_twilio_auth_token="secret")
    cast(Any, services.engine).is_alive = True
    app = create_app(services.settings, services, web_root=web_root)
    async with listening(app, services.settings) as url:
        yield int(url.rsplit(":", 1)[1]), app


async def begin(
    port: int, path: str, num_bytes: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request whose body is announced, and ends after some bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {ROUTES[path]}\r\n"
        f"Content-Length: {num_bytes}\r\n\r\n"
    )
    writer.write(head.encode() + b"v=0")
    await writer.drain()
    return reader, writer


def test_every_route_with_a_body_is_tried(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("")
    services = fake_services(ScriptedEngine("Hi"), port=0)
    paths = create_app(services.settings, services, web_root=tmp_path).openapi()["paths"]
    posts = {path for path, methods in paths.items() if "post" in methods}
    assert posts - {"/v1/realtime/calls/{call_id}/hangup"} == set(ROUTES)


@pytest.mark.parametrize("path", ROUTES)
async def test_a_body_that_stops_is_not_waited_for_for_ever(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(routes, "_FILE_TIMEOUT_S", 0.05)
    async with serving(tmp_path) as (port, _):
        reader, writer = await begin(port, path, 1000)
        async with asyncio.timeout(10):
            assert b" 408 " in await reader.readline()
        writer.close()


@pytest.mark.parametrize("path", ROUTES)
async def test_a_body_that_is_said_to_be_too_long_is_not_read(path: str, tmp_path: Path) -> None:
    async with serving(tmp_path) as (port, _):
        for num_bytes in (10**8, int("9" * 18)):
            reader, writer = await begin(port, path, num_bytes)
            async with asyncio.timeout(10):
                assert b" 413 " in await reader.readline()
            writer.close()


@pytest.mark.parametrize("path", ROUTES)
async def test_who_leaves_in_the_middle_is_no_fault_of_ours(
    path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with serving(tmp_path) as (port, _):
        tasks = asyncio.all_tasks()
        for _ in range(3):
            _, writer = await begin(port, path, 1000)
            async with asyncio.timeout(10):
                while not asyncio.all_tasks() - tasks:  # noqa: ASYNC110 - the request has begun
                    await asyncio.sleep(0)
            writer.transport.abort()
            async with asyncio.timeout(10):
                while asyncio.all_tasks() - tasks:  # noqa: ASYNC110 - nobody tells its end
                    await asyncio.sleep(0.01)
    assert [record.getMessage() for record in caplog.records] == []


def test_bodies_share_what_there_is_and_no_address_has_more_than_half() -> None:
    budget = BodyBudget(max_bytes=100)
    with budget.part("a") as one, budget.part("a") as another, budget.part("b") as other:
        one(30)
        another(20)
        other(50)
        assert len(budget) == 100
        for grow in (one, other):
            with pytest.raises(UnavailableError, match="try again soon") as refused:
                grow(1)
            assert refused.value.retry_after_s > 0
    assert len(budget) == 0
    with budget.part("c") as grow:
        grow(50)


@pytest.mark.parametrize("path", sorted(set(ROUTES) - {"/v1/audio/transcriptions"}))
async def test_bodies_that_are_being_read_are_bounded_together(path: str, tmp_path: Path) -> None:
    async with serving(tmp_path) as (port, app):
        app.state.bodies = budget = BodyBudget(max_bytes=10)
        _, waiting = await begin(port, path, 1000)  # sends three bytes
        async with asyncio.timeout(10):
            while len(budget) < 3:  # noqa: ASYNC110 - what is waited for is in the server
                await asyncio.sleep(0.005)
        reader, writer = await begin(port, path, 3)
        async with asyncio.timeout(10):
            head = await reader.readuntil(b"\r\n\r\n")
        assert b" 503 " in head and b"retry-after: 1\r\n" in head.lower()
        writer.close()
        waiting.transport.abort()
        async with asyncio.timeout(10):
            while len(budget):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        reader, writer = await begin(port, path, 3)
        async with asyncio.timeout(10):
            assert b" 503 " not in await reader.readline()
        writer.close()
