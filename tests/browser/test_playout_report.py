"""The page tells the server what its loudspeaker made of an answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from playwright.async_api import Route

from tests.browser.conftest import PAGES, OpenPage
from tests.support.scripted_realtime import Call, scripted_server, tone, trace

pytestmark = pytest.mark.browser


async def gapped(call: Call, event: dict[str, Any]) -> None:
    """An answer whose second half comes too late."""
    if event["type"] != "response.create":
        return
    await call.begin_reply("resp_1", "item_1")
    await call.say("One,", tone(0.4), "resp_1", "item_1")
    await asyncio.sleep(1.2)
    await call.say(" two.", tone(0.4), "resp_1", "item_1")
    await call.end_reply("resp_1")
    await call.send_event(trace("resp_1", turn_id="turn_7", voice_to_voice_ms=None))


async def test_a_gap_is_reported_with_its_turn(open_page: OpenPage) -> None:
    reports: asyncio.Queue[tuple[str, dict[str, float]]] = asyncio.Queue()

    async def take(route: Route) -> None:
        reports.put_nowait((route.request.url, json.loads(route.request.post_data or "")))
        await route.fulfill(status=200, body="{}")

    async with scripted_server(gapped, pages=PAGES) as server:
        page = await open_page(server.url, microphone=None)
        await page.route("**/v1/traces/**", take)
        await page.fill("#message", "Hello")
        await page.press("#message", "Enter")
        async with asyncio.timeout(15):
            url, report = await reports.get()
        assert url == f"{server.url}/v1/traces/turn_7/playout"
        assert set(report) == {"first_audio_delay_ms", "gap_ms", "num_gaps", "played_ms"}
        assert 0 <= report["first_audio_delay_ms"] < 2000
        assert report["num_gaps"] == 1
        assert 200 < report["gap_ms"] < 1200
        assert report["played_ms"] == pytest.approx(800, abs=60)
        assert reports.empty(), "once a turn"
