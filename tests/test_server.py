"""The server over real sockets: routes, guards, limits, and its end. No models."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from starlette.websockets import WebSocket
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from app.conversation.session import Session
from app.errors import ConfigError
from app.server import _url, create_app, listening
from app.transports.base import ChannelClosed
from app.transports.websocket import WebSocketChannel
from tests.fake_realtime import FakeSession
from tests.fakes import ScriptedEngine, a_turn, fake_services
from tests.openai_events import check_server_event


@pytest.fixture
def web_root(tmp_path: Path) -> Path:
    (tmp_path / "index.html").write_text("<!doctype html><title>Parley</title>")
    (tmp_path / "talk.js").write_text("export {}")
    return tmp_path


Start = Callable[..., Any]


def our_threads() -> set[str]:
    """Starlette reads files in threads of AnyIO, which live on for some seconds of idleness."""
    return {t.name for t in threading.enumerate() if not t.name.startswith("AnyIO")}


@pytest.fixture
def start(web_root: Path) -> Start:
    """Starts a server with the settings given; checks that it leaves nothing behind."""

    @asynccontextmanager
    async def started(**settings: Any) -> AsyncIterator[str]:
        tasks, threads = asyncio.all_tasks(), our_threads()
        services = fake_services(ScriptedEngine(), host="127.0.0.1", port=0, **settings)
        cast(Any, services.engine).is_alive = True
        services.traces.add(a_turn(1))
        services.traces.add(a_turn(2))
        app = create_app(
            services.settings,
            services,
            web_root=web_root,
            make_session=lambda *args: cast(Session, FakeSession(*args)),
        )
        async with listening(app, services.settings) as url:
            yield url
        assert asyncio.all_tasks() == tasks
        assert our_threads() == threads

    return started


def socket_url(url: str, query: str = "") -> str:
    return url.replace("http", "ws") + "/v1/realtime" + query


async def created(socket: ClientConnection) -> dict[str, Any]:
    event = json.loads(await socket.recv())
    check_server_event(event)
    assert event["type"] == "session.created"
    session: dict[str, Any] = event["session"]
    return session


async def refusal(socket: ClientConnection) -> tuple[str, int]:
    """Code of the error event, and the close code behind it."""
    event = json.loads(await socket.recv())
    check_server_event(event)
    with pytest.raises(ConnectionClosed) as closed:
        await socket.recv()
    assert closed.value.rcvd is not None
    return event["error"]["code"], closed.value.rcvd.code


# --- HTTP ---


async def test_health_page_and_headers(start: Start) -> None:
    async with start() as url, httpx.AsyncClient(base_url=url) as http:
        assert (await http.get("/healthz")).json() == {"status": "ok"}
        ready = await http.get("/readyz")
        assert ready.status_code == 200
        assert ready.json() == {"status": "ready", "sessions": 0, "max_sessions": 16}
        page = await http.get("/")
        assert "<title>Parley" in page.text
        assert page.headers["cache-control"] == "no-cache"
        policy = page.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "http" not in policy
        assert page.headers["x-content-type-options"] == "nosniff"
        assert "server" not in page.headers
        script = await http.get("/talk.js")
        assert "javascript" in script.headers["content-type"]
        missing = await http.get("/../app/config.py")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "not_found"


async def test_a_rebound_name_is_turned_away_everywhere(start: Start) -> None:
    async with start() as url, httpx.AsyncClient(base_url=url) as http:
        for path in ("/", "/healthz", "/v1/traces", "/talk.js"):
            refused = await http.get(path, headers={"host": "evil.example:8080"})
            assert refused.status_code == 421, path
            assert refused.json()["error"]["code"] == "host_not_allowed"
            assert "turn_1" not in refused.text
        with pytest.raises(InvalidStatus) as denied:
            port = int(url.rsplit(":", 1)[1])
            rebound = f"ws://evil.example:{port}/v1/realtime"
            async with connect(rebound, host="127.0.0.1", port=port):
                pass
        assert denied.value.response.status_code == 421


async def test_an_engine_that_died_is_not_ready(web_root: Path) -> None:
    services = fake_services(ScriptedEngine(), port=0)
    cast(Any, services.engine).is_alive = False
    app = create_app(services.settings, services, web_root=web_root)
    async with listening(app, services.settings) as url, httpx.AsyncClient() as http:
        assert (await http.get(f"{url}/readyz")).status_code == 503
        assert (await http.get(f"{url}/healthz")).status_code == 200


async def test_traces_are_behind_the_key(start: Start) -> None:
    async with start(api_keys=("k1",)) as url, httpx.AsyncClient(base_url=url) as http:
        refused = await http.get("/v1/traces")
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.json()["error"]["code"] == "invalid_api_key"
        http.headers["authorization"] = "Bearer k1"
        traces = (await http.get("/v1/traces?limit=1")).json()
        assert (traces["object"], traces["data"]) == ("list", [a_turn(2)])
        assert len((await http.get("/v1/traces")).json()["data"]) == 2
        for limit in ("0", "1001", "many"):
            bad = await http.get(f"/v1/traces?limit={limit}")
            assert bad.status_code == 400
            assert bad.json()["error"]["param"] == "limit"
        other = await http.get("/v1/traces", headers={"origin": "http://evil.example"})
        assert other.status_code == 403


def test_a_missing_page_is_told_at_the_start(tmp_path: Path) -> None:
    services = fake_services(ScriptedEngine())
    with pytest.raises(ConfigError, match="index.html"):
        create_app(services.settings, services, web_root=tmp_path)


async def test_an_address_in_use_is_told_at_the_start(start: Start, web_root: Path) -> None:
    async with start() as url:
        port = int(url.rpartition(":")[2])
        services = fake_services(ScriptedEngine(), port=port)
        app = create_app(services.settings, services, web_root=web_root)
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            async with listening(app, services.settings):
                pass


def test_the_url_is_one_that_a_browser_can_open() -> None:
    assert _url("0.0.0.0", 80) == "http://127.0.0.1:80"
    assert _url("::", 80) == "http://[::1]:80"
    assert _url("::1", 80) == "http://[::1]:80"
    assert _url("voice.example", 80) == "http://voice.example:80"


# --- WebSocket: who gets in ---


async def test_a_client_without_a_model_name_gets_ours(start: Start) -> None:
    async with start() as url, connect(socket_url(url)) as socket:
        assert (await created(socket))["model"] == "parley"


async def test_keys_over_headers_and_subprotocols(start: Start) -> None:
    async with start(api_keys=("k1",)) as url:
        with pytest.raises(InvalidStatus) as refused:
            await connect(socket_url(url))
        assert refused.value.response.status_code == 401
        assert json.loads(refused.value.response.body or b"")["error"]["code"] == "invalid_api_key"
        headers = {"authorization": "Bearer k1"}
        async with connect(socket_url(url), additional_headers=headers) as socket:
            await created(socket)
            assert socket.subprotocol is None
        offered = cast(Any, ["realtime", "openai-insecure-api-key.k1"])
        async with connect(socket_url(url), subprotocols=offered) as socket:
            await created(socket)
            assert socket.subprotocol == "realtime"


async def test_pages_of_other_sites_are_kept_out(start: Start) -> None:
    async with start() as url:
        with pytest.raises(InvalidStatus) as refused:
            await connect(socket_url(url), origin=cast(Any, "http://evil.example"))
        assert refused.value.response.status_code == 403
        async with connect(socket_url(url), origin=cast(Any, url)) as socket:
            await created(socket)


async def test_no_socket_at_other_paths(start: Start) -> None:
    async with start() as url:
        with pytest.raises(InvalidStatus) as refused:
            await connect(url.replace("http", "ws") + "/v1/other")
        assert refused.value.response.status_code == 404


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("?model=llama", "model_not_found"),
        ("?call_id=rtc_1", "unsupported_value"),
        ("?intent=transcription", "unsupported_value"),
    ],
)
async def test_what_cannot_be_connected_to(start: Start, query: str, code: str) -> None:
    async with start() as url, connect(socket_url(url, query)) as socket:
        assert await refusal(socket) == (code, 1008)


async def test_one_session_too_many_is_told_why(start: Start) -> None:
    async with start(max_sessions=1) as url:
        async with connect(socket_url(url)) as first:
            await created(first)
            async with connect(socket_url(url)) as second:
                assert await refusal(second) == ("overloaded", 1013)
            await first.send('{"type": "input_audio_buffer.commit"}')
        # The place is free once the first session has ended, a moment after its socket has.
        for _ in range(100):
            async with connect(socket_url(url)) as third:
                if json.loads(await third.recv())["type"] == "session.created":
                    return
        pytest.fail("the place was never freed")


# --- WebSocket: limits ---


async def test_a_20_mb_frame_is_answered_and_a_larger_one_closes(start: Start) -> None:
    async with start() as url:
        async with connect(socket_url(url)) as socket:
            await created(socket)
            audio = "A" * 20_000_000
            await socket.send('{"type":"input_audio_buffer.append","audio":"' + audio + '"}')
            error = json.loads(await socket.recv())["error"]
            assert error["code"] == "string_above_max_length"
            await socket.send('{"type":"conversation.item.retrieve","item_id":"i"}')
            assert json.loads(await socket.recv())["type"] == "conversation.item.retrieved"
        async with connect(socket_url(url), close_timeout=5) as socket:
            await created(socket)
            with pytest.raises(ConnectionClosed) as closed:
                await socket.send("A" * (33 * 1024 * 1024))
                await socket.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1009


async def test_a_stopping_server_says_so(start: Start) -> None:
    async with start() as url:
        socket = await connect(socket_url(url))
        await created(socket)
    with pytest.raises(ConnectionClosed) as closed:
        await socket.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1001


# --- the channel by itself ---


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
