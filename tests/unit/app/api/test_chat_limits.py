"""Limits on chat requests: at once, a minute, and of one key."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from tests.support.fakes import ScriptedEngine
from tests.unit.app.api.test_chat_api import HI, ask, connect, error_of, eventually, head, serving


async def test_one_key_has_half_of_the_places(tmp_path: Path) -> None:
    engine = ScriptedEngine("Yes.")
    engine.gate.clear()
    settings = {"api_keys": ("k1", "k2", "k3"), "max_chat_requests": 3}
    async with serving(tmp_path, engine, **settings) as client:

        def by(key: str) -> asyncio.Task[httpx.Response]:
            headers = {"authorization": f"Bearer {key}"}
            return asyncio.create_task(
                client.post("/v1/chat/completions", json=HI, headers=headers)
            )

        running = [by("k1"), by("k1")]
        await eventually(lambda: engine.num_running == 2, "both are worked on")
        refused = await by("k1")
        assert (refused.status_code, error_of(refused)["code"]) == (429, "rate_limit_exceeded")
        assert error_of(refused)["message"] == (
            "You have 2 chat requests at work already; try again when one is done."
        )
        running.append(by("k2"))
        await eventually(lambda: engine.num_running == 3, "the third is worked on")
        refused = await by("k3")
        assert (refused.status_code, error_of(refused)["code"]) == (503, "overloaded")
        assert refused.headers["retry-after"] == "2"
        engine.gate.set()
        assert {(await task).status_code for task in running} == {200}
        assert (await by("k3")).status_code == 200


async def test_a_place_is_free_again_however_a_request_ends(tmp_path: Path) -> None:
    engine = ScriptedEngine("Yes.")
    async with serving(tmp_path, engine, max_chat_requests=1) as client:
        for _ in range(3):
            assert (await ask(client, top_p=0)).status_code == 400
            assert (await ask(client, model="llama")).status_code == 404
        await eventually_answered(client)
        await eventually_answered(client)
        engine.gate.clear()
        _, writer = await connect(client)
        writer.write(head(1000) + b'{"model": ')  # and no more
        await writer.drain()
        await eventually_refused(client)
        writer.transport.abort()
        engine.gate.set()
        await eventually_answered(client)


async def eventually_refused(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(10):
        while (await ask(client, top_p=0)).status_code != 429:
            pass


async def eventually_answered(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(10):
        while (await ask(client)).status_code != 200:
            pass


async def test_requests_a_minute(tmp_path: Path) -> None:
    engine = ScriptedEngine("Yes.")
    settings = {"max_chat_requests_per_minute": 3, "max_sessions_per_minute": 1}
    async with serving(tmp_path, engine, api_keys=("k1", "k2"), **settings) as client:
        client.headers["authorization"] = "Bearer k1"
        assert [(await ask(client)).status_code for _ in range(3)] == [200] * 3
        refused = await ask(client)
        assert (refused.status_code, error_of(refused)["code"]) == (429, "rate_limit_exceeded")
        assert error_of(refused)["message"].startswith("More than 3 chat requests a minute: try")
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        client.headers["authorization"] = "Bearer k2"
        assert (await ask(client)).status_code == 200
