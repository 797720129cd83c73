"""Phone streams that have not begun keep nobody out, and pages of other sites begin none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from app.api.telephony import pending_streams
from app.api.telephony.pending_streams import PendingStreams
from app.clients.phone_providers import PEERS, Play
from app.errors import UnavailableError
from tests.support.phone_caller import PATIENCE_S, Server, phone, phone_server

FULL = "streams have not begun yet; try again soon."


class Stream:
    """One that waits in a lobby until it is let in, times out, or is displaced."""

    def __init__(self, lobby: PendingStreams, address: str | None) -> None:
        self.may_begin = asyncio.Event()
        self.task = asyncio.create_task(self._wait(lobby, address))

    async def _wait(self, lobby: PendingStreams, address: str | None) -> None:
        async with lobby.waiting(address):
            await self.may_begin.wait()

    async def outcome(self) -> str:
        self.may_begin.set()
        try:
            await self.task
        except UnavailableError as error:
            assert error.message.endswith(FULL)
            return "displaced"
        except TimeoutError:
            return "too late"
        return "begun"


async def streams(lobby: PendingStreams, *addresses: str | None) -> list[Stream]:
    made = [Stream(lobby, address) for address in addresses]
    for _ in range(3):
        await asyncio.sleep(0)
    return made


async def outcomes(made: list[Stream]) -> list[str]:
    return [await stream.outcome() for stream in made]


async def test_the_oldest_stream_of_an_address_makes_room() -> None:
    lobby = PendingStreams(max_calls=8)
    waiting = await streams(lobby, "other", *["a"] * 11)
    displaced = [stream for stream in waiting if stream.task.done()]
    assert displaced == waiting[1:4]
    assert await outcomes(waiting) == ["begun", *["displaced"] * 3, *["begun"] * 8]
    assert len(lobby) == 0


async def test_the_oldest_of_all_makes_room_when_many_addresses_wait() -> None:
    lobby = PendingStreams(max_calls=8)
    waiting = await streams(lobby, *(f"address {number}" for number in range(34)))
    assert await outcomes(waiting) == [*["displaced"] * 2, *["begun"] * 32]


async def test_streams_with_a_token_are_counted_apart() -> None:
    lobby = PendingStreams(max_calls=2)
    waiting = await streams(lobby, None, *["a"] * 40, None, None)
    found = await outcomes(waiting)
    assert (found[0], found[-2:]) == ("begun", ["begun", "displaced"])
    assert found[1:-2] == [*["displaced"] * 32, *["begun"] * 8]


async def test_a_crowd_that_comes_in_one_moment_leaves_the_newest() -> None:
    lobby = PendingStreams(max_calls=8)
    crowd = [Stream(lobby, "a") for _ in range(100)]
    for _ in range(3):
        await asyncio.sleep(0)
    assert await outcomes(crowd) == [*["displaced"] * 92, *["begun"] * 8]


async def test_streams_have_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_streams, "START_TIMEOUT_S", 0.01)
    lobby = PendingStreams(max_calls=8)
    (stream,) = await streams(lobby, "a")
    await asyncio.wait([stream.task])
    assert await stream.outcome() == "too late"
    assert len(lobby) == 0


# --- over real sockets ---


@asynccontextmanager
async def silent_sockets(server: Server, count: int) -> AsyncIterator[list[ClientConnection]]:
    url = server.url.replace("http", "ws") + "/phone/stream"
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(connect(url, proxy=None, close_timeout=1))
            for _ in range(count)
        ]


@pytest.mark.parametrize("settings", [{}, {"api_keys": ("k1",), "phone_token": "p1"}])
@pytest.mark.parametrize("brings_token_in", ["path", "parameter"])
async def test_silent_sockets_keep_no_provider_out(
    settings: dict[str, Any],
    brings_token_in: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pending_streams, "START_TIMEOUT_S", 60.0)
    async with (
        phone_server(tmp_path, "Yes it is.", max_sessions=2, **settings) as server,
        silent_sockets(server, 20) as silent,
    ):
        assert server.num_calls == 0, "none of them has a place"
        first = silent[0]
        with pytest.raises(ConnectionClosed) as closed:
            async with asyncio.timeout(PATIENCE_S):
                await first.recv()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1013
        assert closed.value.rcvd.reason.endswith(FULL)
        token = "p1" if settings else ""
        if brings_token_in == "parameter":
            async with phone(server, "twilio", token=token) as caller:
                await caller.ask()
                await caller.until(Play)
            return
        url = server.url.replace("http", "ws") + f"/phone/stream/{token or 'any'}"
        async with connect(url, proxy=None) as socket:
            for message in PEERS["twilio"]("CA1").hello():
                await socket.send(message)
            async with asyncio.timeout(PATIENCE_S):
                while not server.num_calls:  # noqa: ASYNC110 - what is waited for is in the server
                    await asyncio.sleep(0.01)


@pytest.mark.parametrize("path", ["/phone/stream", "/phone/stream/p1"])
async def test_pages_of_other_sites_begin_no_call(path: str, tmp_path: Path) -> None:
    for settings in ({}, {"phone_token": "p1"}):
        async with phone_server(tmp_path, "Yes it is.", **settings) as server:
            url = server.url.replace("http", "ws")
            for socket in (path, "/v1/realtime"):
                with pytest.raises(InvalidStatus) as refused:
                    await connect(url + socket, origin="https://evil.example", proxy=None)
                response = refused.value.response
                assert response.status_code == 403
                error = json.loads(response.body)["error"]
                assert error["code"] == "origin_not_allowed"
    allowed = {"allowed_origins": ("https://friend.example",)}
    async with phone_server(tmp_path, "Yes it is.", **allowed) as server:
        url = server.url.replace("http", "ws") + path
        async with connect(url, origin="https://friend.example", proxy=None) as socket:
            await socket.send("{}")
            with pytest.raises(ConnectionClosed, match="1008"):
                await socket.recv()


async def test_a_phone_stream_takes_no_large_messages(tmp_path: Path) -> None:
    async with phone_server(tmp_path, "Yes it is.") as server:
        for path in ("/phone/stream", "/phone/stream/token", "/%70hone/stream"):
            async with connect(server.url.replace("http", "ws") + path, proxy=None) as socket:
                await socket.send("x" * 300_000)
                with pytest.raises(ConnectionClosed) as closed:
                    async with asyncio.timeout(PATIENCE_S):
                        await socket.recv()
                assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009
