"""Requests that no route takes: files, wrong methods, missing upgrades, pages of other origins."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from app.server.lifecycle import create_app
from tests.support.fakes import ScriptedEngine, fake_services


@asynccontextmanager
async def opened(web_root: Path, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    """A client, and the application behind it."""
    (web_root / "index.html").write_text("<!doctype html><title>Parley</title>")
    services = fake_services(ScriptedEngine(), port=0, **settings)
    app = create_app(services.settings, services, web_root=web_root)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        yield http, app


def code_of(reply: httpx.Response) -> str:
    return str(reply.json()["error"]["code"])


async def test_every_route_says_which_methods_it_takes(tmp_path: Path) -> None:
    async with opened(tmp_path) as (http, app):
        paths = {re.sub(r"\{[^}]*\}", "x", path) for path in app.openapi()["paths"]}
        assert {"/v1/chat/completions", "/v1/realtime/calls", "/phone/twilio/voice"} <= paths
        assert {"/v1/models", "/v1/traces", "/metrics", "/healthz", "/readyz"} <= paths
        for path in sorted(paths):
            reply = await http.request("DELETE", path)
            assert (reply.status_code, code_of(reply)) == (405, "method_not_allowed"), path
            allowed = reply.headers["allow"].split(", ")
            assert allowed and "DELETE" not in allowed
            for method in allowed:
                assert (await http.request(method, path)).status_code != 405, (method, path)


async def test_a_path_that_speaks_websocket_asks_for_an_upgrade(tmp_path: Path) -> None:
    async with opened(tmp_path) as (http, _):
        for path in ("/v1/realtime", "/phone/stream", "/phone/stream/token"):
            for method in ("GET", "POST"):
                reply = await http.request(method, path)
                assert (reply.status_code, code_of(reply)) == (426, "upgrade_required"), path
                assert reply.headers["upgrade"] == "websocket"


async def test_files_are_read_and_nothing_else(tmp_path: Path) -> None:
    async with opened(tmp_path) as (http, _):
        assert "Parley" in (await http.get("/")).text
        assert (await http.head("/index.html")).status_code == 200
        for path in ("/", "/index.html"):
            reply = await http.post(path, json={})
            assert (reply.status_code, code_of(reply)) == (405, "method_not_allowed")
            assert reply.headers["allow"] == "GET, HEAD"
        for method in ("GET", "POST", "DELETE"):
            reply = await http.request(method, "/v1/no-such-thing")
            assert (reply.status_code, code_of(reply)) == (404, "not_found")
        assert (await http.get("/a%00b")).status_code == 404
        assert (await http.post("/" + "x" * 5_000)).status_code == 404


PAGE = "https://app.example"


async def preflight(http: httpx.AsyncClient, origin: str) -> httpx.Response:
    asked = "authorization,content-type,x-openai-agents-sdk"
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": asked,
    }
    return await http.options("/v1/realtime/calls", headers=headers)


async def test_pages_of_allowed_origins_may_send_requests(tmp_path: Path) -> None:
    async with opened(tmp_path, allowed_origins=(PAGE + "/",)) as (http, _):
        reply = await preflight(http, PAGE)
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == PAGE
        assert "x-openai-agents-sdk" in reply.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in reply.headers
        # An error must be readable as well, and so must the address of a new call.
        reply = await http.post("/v1/realtime/calls", headers={"origin": PAGE})
        assert reply.status_code == 415
        assert reply.headers["access-control-allow-origin"] == PAGE
        assert "Location" in reply.headers["access-control-expose-headers"]
        reply = await preflight(http, "https://evil.example")
        assert reply.status_code == 400
        assert "access-control-allow-origin" not in reply.headers
        reply = await http.post("/v1/realtime/calls", headers={"origin": "https://evil.example"})
        assert (reply.status_code, code_of(reply)) == (403, "origin_not_allowed")


async def test_without_allowed_origins_no_other_page_may_read_an_answer(tmp_path: Path) -> None:
    async with opened(tmp_path) as (http, _):
        assert (await preflight(http, PAGE)).status_code == 405
        reply = await http.get("/v1/models", headers={"origin": PAGE})
        assert "access-control-allow-origin" not in reply.headers
