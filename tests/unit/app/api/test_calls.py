"""The routes of WebRTC calls: what is answered, what is refused and how. No media."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from aioice import stun

from app.api.realtime import webrtc_calls as calls_module
from app.conversation.session import Session
from app.errors import ConfigError
from app.server.lifecycle import create_app, listening
from tests.support.fake_realtime import FakeSession
from tests.support.fakes import ScriptedEngine, fake_services
from tests.unit.app.transports.test_webrtc_sdp import OFFER

SDP = {"content-type": "application/sdp"}
FORM = {"content-type": "multipart/form-data; boundary=b"}
PATH = "/v1/realtime/calls"
Start = Callable[..., Any]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts a server; checks that nothing of its calls is left at the end."""
    (tmp_path / "index.html").write_text("<!doctype html><title>Parley</title>")

    @asynccontextmanager
    async def started(**settings: Any) -> AsyncIterator[httpx.AsyncClient]:
        tasks = asyncio.all_tasks()
        services = fake_services(ScriptedEngine(), host="127.0.0.1", port=0, **settings)
        cast(Any, services.engine).is_alive = True
        app = create_app(
            services.settings,
            services,
            web_root=tmp_path,
            make_session=lambda *args: cast(Session, FakeSession(*args)),
        )
        async with (
            listening(app, services.settings) as url,
            httpx.AsyncClient(base_url=url) as http,
        ):
            yield http
        async with asyncio.timeout(5):
            while asyncio.all_tasks() - tasks:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    return started


def error_of(reply: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_an_offer_is_answered(start: Start) -> None:
    async with start() as http:
        reply = await http.post(PATH, content=OFFER, headers=SDP)
        assert reply.status_code == 201
        assert reply.headers["content-type"].startswith("application/sdp")
        assert reply.headers["location"].startswith(f"{PATH}/rtc_")
        assert "m=audio 9 UDP/TLS/RTP/SAVPF 111" in reply.text
        assert "typ host" in reply.text
        ready = (await http.get("/readyz")).json()
        assert ready["sessions"] == 1
        end = await http.post(reply.headers["location"] + "/hangup")
        assert end.status_code == 200
        async with asyncio.timeout(5):
            while (await http.get("/readyz")).json()["sessions"]:
                pass
        again = await http.post(reply.headers["location"] + "/hangup")
        assert (again.status_code, error_of(again)["code"]) == (404, "call_not_found")


async def test_an_unreachable_stun_server_delays_nothing_for_long(start: Start) -> None:
    async with start(ice_servers=("stun:192.0.2.1:3478",)) as http:
        async with asyncio.timeout(4):  # the library alone would ask it for 5 s or more
            reply = await http.post(PATH, content=OFFER, headers=SDP)
        assert reply.status_code == 201


class StunServer(asyncio.DatagramProtocol):
    """Tells everybody that they come from an address of the documentation (RFC 8489)."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, address: Any) -> None:
        asked = stun.parse_message(data)
        told = stun.Message(
            stun.Method.BINDING, stun.Class.RESPONSE, transaction_id=asked.transaction_id
        )
        told.attributes["XOR-MAPPED-ADDRESS"] = ("203.0.113.7", 40_404)
        self._transport.sendto(bytes(told), address)


async def test_a_stun_server_tells_the_address_beyond_a_nat(start: Start) -> None:
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(StunServer, local_addr=("127.0.0.1", 0))
    port = transport.get_extra_info("sockname")[1]
    try:
        async with start(ice_servers=(f"stun:127.0.0.1:{port}",)) as http:
            reply = await http.post(PATH, content=OFFER, headers=SDP)
            assert reply.status_code == 201
            assert re.search(r"203\.0\.113\.7 40404 typ srflx", reply.text), reply.text
            assert "typ host" in reply.text
    finally:
        transport.close()


async def test_settings_come_with_the_offer(start: Start) -> None:
    session = '{"type": "realtime", "model": "gpt-realtime", "instructions": "Be brief."}'
    async with start() as http:
        files = {
            "sdp": (None, OFFER.encode(), "application/sdp"),
            "session": (None, session.encode(), "application/json"),
        }
        reply = await http.post(PATH, files=files)
        assert reply.status_code == 201, reply.text
        # Form fields without types of their own, as browsers' FormData makes them.
        files = {"sdp": (None, OFFER.encode()), "session": (None, session.encode())}  # type: ignore[dict-item]
        assert (await http.post(PATH, files=files)).status_code == 201


@pytest.mark.parametrize(
    "session, code, param",
    [
        ("{", "invalid_json", "session"),
        ("[]", "invalid_json", "session"),
        ('{"type": "realtime", "colour": 1}', "unknown_parameter", "session.colour"),
        (
            '{"type": "realtime", "audio": {"output": {"voice": "bob"}}}',
            "invalid_value",
            "session.audio.output.voice",
        ),
        ('{"type": "realtime", "model": "gpt-9"}', "model_not_found", "model"),
    ],
)
async def test_settings_that_are_wrong(start: Start, session: str, code: str, param: str) -> None:
    async with start() as http:
        files = {"sdp": (None, OFFER.encode()), "session": (None, session.encode())}
        reply = await http.post(PATH, files=files)
        assert reply.status_code == 400
        assert (error_of(reply)["code"], error_of(reply)["param"]) == (code, param)
        assert (await http.get("/readyz")).json()["sessions"] == 0


async def test_bodies_that_cannot_be_read(start: Start) -> None:
    async with start() as http:
        cases: list[tuple[dict[str, Any], int, str]] = [
            (
                {"content": OFFER, "headers": {"content-type": "text/html"}},
                415,
                "unsupported_media_type",
            ),
            ({"json": {"sdp": OFFER}}, 415, "unsupported_media_type"),
            ({"content": b"", "headers": SDP}, 400, "invalid_offer"),
            ({"content": b"v=0\r\n\xff", "headers": SDP}, 400, "invalid_value"),
            ({"content": b"v=0\r\n" * 200_000, "headers": SDP}, 413, "request_too_large"),
            ({"content": OFFER + "a=x\r\n" * 20_000, "headers": SDP}, 400, "invalid_offer"),
            ({"files": {"offer": (None, b"v=0")}}, 400, "missing_required_parameter"),
            (
                {"content": b"--x", "headers": {"content-type": "multipart/form-data"}},
                400,
                "missing_required_parameter",
            ),
            *(
                ({"content": form, "headers": FORM}, 400, "invalid_value")
                for form in (
                    b"--b"
                    + b"\r\ncontent-disposition: form-data; name=%d\r\n\r\n\r\n--b"
                    * 17
                    % (*range(17),),
                    b"--b\r\n" + b"a: b\r\n" * 1_000 + b"\r\nv=0\r\n--b--",
                )
            ),
            ({"content": b"--b\r\n\r\n\r\n" * 50_000, "headers": FORM}, 400, "invalid_value"),
        ]
        for request, status, code in cases:
            reply = await http.post(PATH, **request)
            assert (reply.status_code, error_of(reply)["code"]) == (status, code)
        assert (await http.get("/readyz")).json()["sessions"] == 0


async def test_keys_and_origins(start: Start) -> None:
    async with start(api_keys=("sesame",)) as http:
        reply = await http.post(PATH, content=OFFER, headers=SDP)
        assert (reply.status_code, error_of(reply)["code"]) == (401, "invalid_api_key")
        foreign = {**SDP, "authorization": "Bearer sesame", "origin": "https://evil.example"}
        reply = await http.post(PATH, content=OFFER, headers=foreign)
        assert (reply.status_code, error_of(reply)["code"]) == (403, "origin_not_allowed")
        reply = await http.post(f"{PATH}/rtc_1/hangup")
        assert reply.status_code == 401
        reply = await http.post(
            PATH, content=OFFER, headers={**SDP, "authorization": "Bearer sesame"}
        )
        assert reply.status_code == 201


async def test_no_more_calls_than_sessions(start: Start) -> None:
    async with start(max_sessions=2) as http:
        replies = await asyncio.gather(
            *(http.post(PATH, content=OFFER, headers=SDP) for _ in range(5))
        )
        statuses = sorted(reply.status_code for reply in replies)
        assert statuses == [201, 201, 503, 503, 503]
        refused = next(reply for reply in replies if reply.status_code == 503)
        assert error_of(refused)["code"] == "overloaded"
        assert int(refused.headers["retry-after"]) > 0


async def test_resuming_what_is_not_there(start: Start) -> None:
    async with start() as http:
        reply = await http.post(f"{PATH}?resume=rtc_0", content=OFFER, headers=SDP)
        assert (reply.status_code, error_of(reply)["code"]) == (404, "call_not_found")


async def test_a_server_without_the_extra_says_so(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_module, "HAS_WEBRTC", False)
    async with start() as http:
        reply = await http.post(PATH, content=OFFER, headers=SDP)
        assert (reply.status_code, error_of(reply)["code"]) == (501, "webrtc_not_installed")


async def test_ice_servers_are_checked_at_the_start(start: Start) -> None:
    with pytest.raises(ConfigError, match="PARLEY_ICE_SERVERS"):
        async with start(ice_servers=("http://example.com",)):
            pass
