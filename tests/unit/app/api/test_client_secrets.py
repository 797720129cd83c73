"""Keys for browsers: what they open, what they do not, and how many there may be."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import pytest
from starlette.datastructures import Headers
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from app.access.auth import AuthenticationError, Authenticator
from app.access.client_secrets import ClientSecretStore, TooManySecretsError
from app.config import Settings
from app.errors import ClientError
from app.server.lifecycle import listening
from app.server.routes import create_app
from llm_core import InvalidRequestError
from tests.support.fake_realtime import FakeSession
from tests.support.fakes import ScriptedEngine, fake_services

KEY = {"authorization": "Bearer k1"}


@asynccontextmanager
async def server(
    engine: ScriptedEngine | None = None, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    services = fake_services(engine or ScriptedEngine(), port=0, api_keys=("k1", "k2"), **settings)
    cast(Any, services.engine).is_alive = True
    app = create_app(services.settings, services, make_session=cast(Any, FakeSession))
    async with (
        listening(app, services.settings) as url,
        httpx.AsyncClient(base_url=url, headers=KEY) as http,
    ):
        yield http


async def test_tools_that_cannot_be_followed_get_no_secret() -> None:
    engine = ScriptedEngine()
    engine.guide_error = InvalidRequestError("tools: f: parameters: too hard")
    async with server(engine) as http:
        body = {"session": {"type": "realtime", "tools": [{"type": "function", "name": "f"}]}}
        refused = await http.post("/v1/realtime/client_secrets", json=body)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("invalid_value", "session.tools")
        assert "too hard" in error["message"]
        engine.guide_error = None
        assert (await http.post("/v1/realtime/client_secrets", json=body)).is_success


def socket_url(http: httpx.AsyncClient) -> str:
    return str(http.base_url).replace("http", "ws").rstrip("/") + "/v1/realtime"


async def test_a_secret_opens_a_session_as_it_was_configured() -> None:
    async with server() as http:
        body = {
            "expires_after": {"anchor": "created_at", "seconds": 60},
            "session": {
                "type": "realtime",
                "model": "gpt-realtime",
                "instructions": "Sing.",
                "audio": {"input": {"turn_detection": {"type": "semantic_vad"}}},
            },
        }
        made = (await http.post("/v1/realtime/client_secrets", json=body)).json()
        assert made["value"].startswith("ek_")
        assert made["session"]["instructions"] == "Sing."
        headers = {"authorization": f"Bearer {made['value']}"}
        async with connect(socket_url(http), additional_headers=headers) as socket:
            session = json.loads(await socket.recv())["session"]
        assert session["model"] == "gpt-realtime"
        assert session["instructions"] == "Sing."
        assert session["audio"]["input"]["turn_detection"]["type"] == "semantic_vad"
        offered = cast(Any, ["realtime", f"openai-insecure-api-key.{made['value']}"])
        async with connect(socket_url(http), subprotocols=offered) as socket:
            assert json.loads(await socket.recv())["session"]["instructions"] == "Sing."
        for method, path in (("GET", "/v1/traces"), ("POST", "/v1/realtime/client_secrets")):
            refused = await http.request(method, path, headers=headers)
            assert refused.status_code == 401, path


async def test_the_body_may_be_empty_and_is_checked() -> None:
    async with server() as http:
        assert (await http.post("/v1/realtime/client_secrets")).status_code == 200
        for body, code, param in (
            (b"{", "invalid_json", None),
            (b"[]", "invalid_json", None),
            (
                b'{"expires_after":{"seconds":5}}',
                "integer_below_min_value",
                "expires_after.seconds",
            ),
            (b'{"session":{"type":"transcription"}}', "unsupported_value", "session.type"),
            (b'{"session":{"model":"llama"}}', "model_not_found", "session.model"),
            (b'{"session":{"voice":"x"}}', "unknown_parameter", "session.voice"),
        ):
            refused = await http.post("/v1/realtime/client_secrets", content=body)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"], error["param"]) == (400, code, param)
        large = await http.post("/v1/realtime/client_secrets", content=b" " * 200_000)
        assert large.status_code == 413
        http.headers["authorization"] = "Bearer wrong"
        assert (await http.post("/v1/realtime/client_secrets")).status_code == 401


async def test_a_made_up_secret_opens_nothing() -> None:
    async with server() as http:
        with pytest.raises(InvalidStatus) as refused:
            headers = {"authorization": "Bearer ek_guess"}
            await connect(socket_url(http), additional_headers=headers)
        assert refused.value.response.status_code == 401


def test_a_secret_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.5
    store = ClientSecretStore(now_s=lambda: now_s)
    monkeypatch.setattr(time, "time", lambda: 1_790_000_000.0)
    value, record = store.create("owner", {"instructions": "Hi"}, 60)
    assert record.expires_at_s == 1_790_000_060
    for clock_s in (1_780_000_000.0, 1_800_000_000.0):  # set back and forth: a minute is a minute
        monkeypatch.setattr(time, "time", lambda at_s=clock_s: at_s)
        now_s = 1060.4
        assert store.find(value) is record
    monkeypatch.setattr(time, "time", lambda: 1_780_000_000.0)
    now_s = 1060.5
    assert store.find(value) is None
    assert len(store) == 0
    gatekeeper = Authenticator(Settings(), store)
    with pytest.raises(AuthenticationError, match="expired"):
        gatekeeper.check_caller(httpx_headers(value))


def httpx_headers(key: str) -> Headers:
    return Headers({"authorization": f"Bearer {key}"})


def test_the_store_is_bounded_and_makes_room_by_time_only() -> None:
    now_s = 0.0
    store = ClientSecretStore(max_secrets=3, now_s=lambda: now_s)
    first = [store.create(f"o{i}", {}, 10 + i)[0] for i in range(3)]
    with pytest.raises(TooManySecretsError) as refused:
        store.create("o", {}, 10)
    assert refused.value.retry_after_s == 10.0
    assert all(store.find(value) for value in first)
    now_s = 11.0
    store.create("o", {}, 10)
    store.create("p", {}, 10)
    assert [store.find(value) is None for value in first] == [True, True, False]


def test_an_owner_has_a_quarter_of_the_store() -> None:
    now_s = 100.0
    store = ClientSecretStore(max_secrets=8, now_s=lambda: now_s)
    for lifetime_s in (30, 20):
        store.create("anyone", {}, lifetime_s, "address 192.0.2.1")
    with pytest.raises(TooManySecretsError, match="You have 2 client secrets") as refused:
        store.create("anyone", {}, 10, "address 192.0.2.1")
    assert refused.value.retry_after_s == 20.0
    store.create("anyone", {}, 10, "address 192.0.2.2")
    store.create("k1", {}, 10)
    now_s = 120.0
    store.create("anyone", {}, 10, "address 192.0.2.1")


def test_the_session_that_is_kept_is_bounded_and_comes_back_as_it_was() -> None:
    store = ClientSecretStore()
    session = {"instructions": "é" * 32_000, "tools": [{"parameters": {"maximum": 10**30}}]}
    value, _ = store.create("o", session, 10)
    record = store.find(value)
    assert record is not None and record.session == session
    with pytest.raises(ClientError, match="65536 bytes") as refused:
        store.create("o", {"instructions": "é" * 33_000}, 10)
    assert (refused.value.code, refused.value.param) == ("invalid_value", "session")


async def test_too_many_secrets_or_too_fast_are_refused_with_retry_after() -> None:
    path = "/v1/realtime/client_secrets"
    async with server(max_sessions_per_minute=300) as http:
        for _ in range(250):
            assert (await http.post(path, json={"session": {}})).status_code == 200
        refused = await http.post(path)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "too_many_client_secrets"
        assert 590 <= int(refused.headers["retry-after"]) <= 600
        http.headers["authorization"] = "Bearer k2"
        assert (await http.post(path)).status_code == 200
    async with server(max_sessions_per_minute=2) as http:
        assert [(await http.post(path)).status_code for _ in range(3)] == [200, 200, 429]


def test_owners_are_told_apart_and_never_shown() -> None:
    gatekeeper = Authenticator(Settings(api_keys=("k1", "k2")))
    one, two = (gatekeeper.check(httpx_headers(key)).owner for key in ("k1", "k2"))
    assert one != two
    assert "k1" not in one
    value, _ = gatekeeper.client_secrets.create(one, {"instructions": "Hi"}, 60)
    grant = gatekeeper.check_caller(httpx_headers(value))
    assert (grant.owner, grant.session) == (one, {"instructions": "Hi"})
