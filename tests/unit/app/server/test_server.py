"""The server over real sockets: routes, guards, limits, and its end. No models."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import json
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from app.conversation.session import Session
from app.errors import ConfigError
from app.server import http_protocol
from app.server.lifecycle import _url, create_app, listening
from tests.support.fake_realtime import FakeSession
from tests.support.fake_turns import a_turn
from tests.support.fakes import ScriptedEngine, fake_services
from tests.support.openai_events import check_server_event


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
        assert (await http.get("/health")).json() == ready.json()
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
    engine = cast(Any, services.engine)
    engine.is_alive, engine.problem = False, "the engine process was killed by SIGKILL"
    app = create_app(services.settings, services, web_root=web_root)
    async with listening(app, services.settings) as url, httpx.AsyncClient() as http:
        for path, status in (("readyz", 503), ("health", 503), ("healthz", 200)):
            assert (await http.get(f"{url}/{path}")).status_code == status
        assert (await http.get(f"{url}/readyz")).json()["status"] == engine.problem


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
        ("?call_id=rtc_1", "call_not_found"),
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


async def test_too_much_audio_is_answered_and_a_larger_frame_closes(start: Start) -> None:
    async with start() as url:
        async with connect(socket_url(url)) as socket:
            await created(socket)
            audio = "A" * (15 * 1024 * 1024 + 4)
            await socket.send('{"type":"input_audio_buffer.append","audio":"' + audio + '"}')
            error = json.loads(await socket.recv())["error"]
            assert error["code"] == "string_above_max_length"
            await socket.send('{"type":"conversation.item.retrieve","item_id":"i"}')
            assert json.loads(await socket.recv())["type"] == "conversation.item.retrieved"
        async with connect(socket_url(url), close_timeout=5) as socket:
            await created(socket)
            with pytest.raises(ConnectionClosed) as closed:
                await socket.send("A" * (17 * 1024 * 1024))
                await socket.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1009


async def test_sessions_of_one_key_are_limited_in_time(start: Start) -> None:
    async with start(max_sessions_per_minute=2, api_keys=("k1", "k2")) as url:
        for key, outcome in (
            ("k1", None),
            ("k1", None),
            ("k1", "rate_limit_exceeded"),
            ("k2", None),
        ):
            headers = {"authorization": f"Bearer {key}"}
            async with connect(socket_url(url), additional_headers=headers) as socket:
                if outcome is None:
                    await created(socket)
                else:
                    assert await refusal(socket) == (outcome, 1013)


async def test_a_session_ends_after_its_time(start: Start) -> None:
    async with start(max_session_s=1.0) as url, connect(socket_url(url)) as socket:
        session = await created(socket)
        assert isinstance(session["expires_at"], int)
        assert await refusal(socket) == ("session_expired", 1001)


async def test_a_connection_that_asks_for_nothing_is_closed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "FIRST_REQUEST_S", 0.1)
    async with start() as url:
        port = int(url.rsplit(":", 1)[1])
        for first_bytes in (b"", b"GET / HT", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-A: "):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(first_bytes)
            async with asyncio.timeout(10):
                assert await reader.read() == b""
            writer.close()
        # Nor may the next request come in pieces for ever, or a body that nobody reads any more.
        whole = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
        refused = b"POST /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n"
        for request, more in ((whole, b"GET /he"), (refused, b"x")):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            assert await reader.readuntil(b"}")
            async with asyncio.timeout(10):
                writer.write(more)
                while await reader.read(1000):
                    pass
            writer.close()
        # One that has asked stays open for its answer, and for more.
        async with httpx.AsyncClient(base_url=url) as http:
            assert (await http.get("/healthz")).status_code == 200
        async with connect(socket_url(url)) as socket:
            await created(socket)
            await asyncio.sleep(0.2)
            await socket.send('{"type":"conversation.item.retrieve","item_id":"i"}')
            assert json.loads(await socket.recv())["type"] == "conversation.item.retrieved"


# --- the end of a server ---


async def test_turns_are_heard_to_their_end_and_newcomers_are_sent_away(web_root: Path) -> None:
    sessions: list[FakeSession] = []

    def make(*args: Any) -> Session:
        sessions.append(FakeSession(*args))
        sessions[-1].is_idle = len(sessions) > 1
        return cast(Session, sessions[-1])

    services = fake_services(ScriptedEngine(), port=0, drain_timeout_s=30)
    cast(Any, services.engine).is_alive = True
    app = create_app(services.settings, services, web_root=web_root, make_session=make)
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(listening(app, services.settings))
        busy, idle = await connect(socket_url(url)), await connect(socket_url(url))
        await created(busy)
        await created(idle)
        ending = asyncio.create_task(stack.aclose())
        assert await close_code(idle) == 1001
        async with httpx.AsyncClient(base_url=url) as http, connect(socket_url(url)) as late:
            assert await refusal(late) == ("server_shutting_down", 1013)
            ready = await http.get("/readyz")
            assert (ready.status_code, ready.json()["status"]) == (503, "shutting down")
            refused = await http.post("/v1/realtime/client_secrets")
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) > 0
            assert refused.json()["error"]["code"] == "server_shutting_down"
        # The one in a turn is still served.
        await busy.send('{"type":"conversation.item.retrieve","item_id":"i"}')
        assert json.loads(await busy.recv())["type"] == "conversation.item.retrieved"
        assert not ending.done()
        sessions[0].is_idle = True
        assert await close_code(busy) == 1001
        await ending


@pytest.mark.parametrize("hurried", [False, True])
async def test_a_turn_without_end_is_cut_off(web_root: Path, hurried: bool) -> None:
    def make(*args: Any) -> Session:
        session = FakeSession(*args)
        session.is_idle = False
        return cast(Session, session)

    services = fake_services(ScriptedEngine(), port=0, drain_timeout_s=100 if hurried else 0.2)
    app = create_app(services.settings, services, web_root=web_root, make_session=make)
    async with listening(app, services.settings) as url:
        socket = await connect(socket_url(url))
        await created(socket)
        if hurried:  # a second signal
            app.state.connections.hurry.set()
    assert await close_code(socket) == 1001


async def close_code(socket: ClientConnection) -> int:
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            await socket.recv()
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code


# --- TLS ---


def certificate(folder: Path) -> tuple[Path, Path]:
    """A key, and a certificate for this machine that it has signed itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    cert_path, key_path = folder / "cert.pem", folder / "key.pem"
    cert_path.write_bytes(made.public_bytes(Encoding.PEM))
    key_path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return cert_path, key_path


async def test_tls_by_configuration(start: Start, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    trust = ssl.create_default_context(cafile=str(cert))
    async with start(tls_cert=cert, tls_key=key) as url:
        assert url.startswith("https://127.0.0.1:")
        async with httpx.AsyncClient(base_url=url, verify=trust) as http:
            assert (await http.get("/healthz")).status_code == 200
        async with connect(socket_url(url), ssl=trust) as socket:
            await created(socket)


async def test_tls_that_cannot_work_is_told_at_the_start(web_root: Path, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    for settings, why in (
        ({"tls_cert": cert}, "both"),
        ({"tls_cert": cert, "tls_key": tmp_path / "absent.pem"}, "absent.pem"),
        ({"tls_cert": key, "tls_key": cert}, "cannot be used"),
    ):
        services = fake_services(ScriptedEngine(), port=0, **settings)
        app = create_app(services.settings, services, web_root=web_root)
        with pytest.raises(ConfigError, match=why):
            async with listening(app, services.settings):
                pass


async def test_a_stopping_server_says_so(start: Start) -> None:
    async with start() as url:
        socket = await connect(socket_url(url))
        await created(socket)
    with pytest.raises(ConnectionClosed) as closed:
        await socket.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1001


# --- what a response is told besides ---


async def test_limits_are_told_with_each_response_and_beta_clients_hear_of_items_twice(
    web_root: Path,
) -> None:
    services = fake_services(ScriptedEngine("Hi."), port=0, max_messages_per_s=50)
    cast(Any, services.engine).is_alive = True
    app = create_app(services.settings, services, web_root=web_root)
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    async with listening(app, services.settings) as url:
        for headers in ({}, {"OpenAI-Beta": "realtime=v1"}):
            events = []
            async with connect(socket_url(url), additional_headers=headers) as socket:
                await socket.send(json.dumps({"type": "conversation.item.create", "item": item}))
                await socket.send(json.dumps({"type": "response.create"}))
                while not events or events[-1]["type"] != "response.done":
                    events.append(json.loads(await socket.recv()))
                    check_server_event(events[-1])
            kinds = [event["type"] for event in events]
            assert kinds[kinds.index("response.created") + 1] == "rate_limits.updated"
            [told] = next(e for e in events if e["type"] == "rate_limits.updated")["rate_limits"]
            assert (told["name"], told["limit"]) == ("requests", 100)
            # Two messages, and what has come back meanwhile; exactly: test_rate_limits.
            assert 95 <= told["remaining"] <= 100 and told["reset_seconds"] >= 0
            added = [e["item"]["id"] for e in events if e["type"] == "conversation.item.added"]
            made = [e["item"]["id"] for e in events if e["type"] == "conversation.item.created"]
            assert len(added) == 2
            assert made == (added if headers else [])
            assert len({event["event_id"] for event in events}) == len(events)
