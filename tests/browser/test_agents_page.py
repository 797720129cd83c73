"""The OpenAI Agents SDK's realtime client over WebRTC in Chromium, with only the base URL changed.

Its page comes from another origin, as the page of whoever builds on us would, and the key is a
client secret that an API key has made.
"""

from __future__ import annotations

import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile as sf

from tests.browser.conftest import OpenPage
from tests.browser.page_state import until
from tests.browser.test_calls import is_empty, serving
from tests.support.agents_js import agents_folder
from tests.support.rtc_server import STORY

pytestmark = pytest.mark.browser

KEY = "a-key-for-this-test"
SCRIPT = Path(__file__).with_name("agents_page.js")
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
REPLIES = ("Hello to you, too.", CALL, "It is sunny in Paris.", STORY)


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the tests' output is for the tests."""


@contextmanager
def site(folder: Path) -> Iterator[str]:
    """Another server with a page of its own; its origin."""
    handler = functools.partial(_QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, name="site of the agents' page")
        thread.start()
        try:
            yield f"http://localhost:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def agents_site(tmp_path: Path) -> Iterator[str]:
    """Origin of a site with the client's own bundle and our script."""
    package = agents_folder() / "node_modules/@openai/agents-realtime"
    (tmp_path / "bundle").symlink_to(package / "dist/bundle")
    shutil.copy(SCRIPT, tmp_path)
    (tmp_path / "index.html").write_text("<!doctype html><title>Agent</title><button>Call</button>")
    with site(tmp_path) as origin:
        yield origin


@pytest.fixture
def one_question(tmp_path: Path) -> Path:
    """A steady buzz of a second after two of silence, as the microphone's recording."""
    rate = 48_000
    buzz = 0.4 * np.sign(np.sin(2 * np.pi * 150 * np.arange(rate) / rate))
    path = tmp_path / "question.wav"
    sf.write(path, np.concatenate((np.zeros(2 * rate), buzz, np.zeros(rate))), rate)
    return path


async def test_the_stock_client_talks_and_calls_its_function(
    open_page: OpenPage, agents_site: str, one_question: Path
) -> None:
    settings: dict[str, Any] = {"api_keys": (KEY,), "allowed_origins": (agents_site,)}
    async with serving(*REPLIES, **settings) as server:
        server.engine.by_turn = False
        async with httpx.AsyncClient(base_url=server.url) as http:
            path, headers = "/v1/realtime/client_secrets", {"authorization": f"Bearer {KEY}"}
            secret = (await http.post(path, json={}, headers=headers)).json()["value"]
        page = await open_page(agents_site, microphone=one_question)
        await page.get_by_role("button", name="Call").click()  # so that sound may be played
        seen = await page.evaluate(
            "async ([url, key]) => (await import('/agents_page.js')).converse(url, key)",
            [f"{server.url}/v1/realtime/calls", secret],
        )
        await until(lambda: is_empty(server))
    assert seen["errors"] == []
    assert "error" not in seen["kinds"]
    assert seen["callId"].startswith("rtc_")

    # Spoken: heard, and answered aloud over the media track.
    assert seen["transcripts"] == ["Hello there."]
    assert seen["heardAloud"] > 0.1
    assert "response.output_audio.delta" not in seen["kinds"]

    # Written: the function was called once, by the client, and its result was answered.
    statuses = [turn["status"] for turn in seen["turns"]]
    assert statuses == ["completed", "completed", "completed", "cancelled"]
    items = [turn["items"] for turn in seen["turns"]]
    assert items == [["message"], ["function_call"], ["message"], ["message"]]
    assert seen["calls"] == ["Paris"]
    called = [item for item in seen["history"] if item["type"] == "function_call"]
    assert [item["output"] for item in called] == ["sunny in Paris, 21 degrees"]
    assert server.engine.requests[2][-1].content == "sunny in Paris, 21 degrees"

    # The client's own record of the conversation has all that was said.
    said = [(item["role"], item["text"]) for item in seen["history"] if item["type"] == "message"]
    assert said[:4] == [
        ("user", "Hello there."),
        ("assistant", "Hello to you, too."),
        ("user", "What is the weather in Paris?"),
        ("assistant", "It is sunny in Paris."),
    ]
    assert said[4] == ("user", "Tell me a story.")
    assert STORY.startswith(said[5][1]) and len(said[5][1]) < len(STORY)
