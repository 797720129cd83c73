"""The page in a real browser with real calls over WebRTC; the models are scripted, nothing else."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import soundfile as sf
from playwright.async_api import Route, expect

from app.server.lifecycle import create_app, listening
from tests.browser.conftest import OpenPage
from tests.browser.page_state import sound, until
from tests.support.fakes import ScriptedEngine, ScriptedRecognizer, fake_services, recent
from tests.support.rtc_server import STORY, Server, Singer

pytestmark = pytest.mark.browser


# What the note under the waterfall says is soon replaced: every text of it is kept.
KEEP_NOTES = """() => {
    const note = document.getElementById("turn-note");
    window.notes = [];
    new MutationObserver(() => window.notes.push(note.textContent))
        .observe(note, {childList: true, characterData: true, subtree: true});
}"""


@asynccontextmanager
async def serving(
    *replies: str, heard: str = "Hello there.", **settings: Any
) -> AsyncIterator[Server]:
    """A server with the real page, real calls, and models that follow a script."""
    services = fake_services(
        ScriptedEngine(*replies), ScriptedRecognizer(*[heard] * 20), Singer(), port=0, **settings
    )
    engine = cast(Any, services.engine)
    # A short pause within a sound makes the session begin an answer that nobody gets.
    engine.is_alive = engine.by_turn = True
    app = create_app(services.settings, services)
    async with listening(app, services.settings) as url:
        yield Server(url, app, services)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A buzz of one second after two of silence, and another eight seconds later."""
    rate = 48_000
    at = np.arange(rate) / rate
    buzz = 0.4 * np.sign(np.sin(2 * np.pi * 150 * at)) * np.sin(2 * np.pi * 3 * at) ** 2
    parts = [np.zeros(2 * rate), buzz, np.zeros(5 * rate), buzz, np.zeros(rate)]
    path = tmp_path_factory.mktemp("microphone") / "words.wav"
    sf.write(path, np.concatenate(parts), rate, subtype="PCM_16")
    return path


async def test_a_call_with_an_interruption(open_page: OpenPage, words: Path) -> None:
    async with serving(STORY, "Sure.") as server:
        page = await open_page(server.url, microphone=words)
        await page.evaluate(KEEP_NOTES)
        await page.get_by_role("button", name="Start talking").click()
        await expect(page.locator("#line")).to_have_text("over WebRTC")
        await expect(page.locator(".message-you .message-text").first).to_have_text("Hello there.")
        await expect(page.locator("#status")).to_have_text("Speaking")

        async def sounds() -> bool:
            state = await sound(page)
            enough = state["played"] > 0.3 * state["rate"]
            return bool(state["playing"] and state["loudest"] > 0.1 and enough)

        await until(sounds)
        # The second buzz speaks over the story: what was not heard is shown as such.
        first = page.locator(".message-parley").first
        await expect(first.locator(".tag").first).to_have_text("interrupted", timeout=15_000)
        await expect(first.locator(".unheard")).to_be_visible()
        shown = await first.locator(".message-text").inner_text()
        assert shown.startswith("Once upon a time")
        await expect(page.locator(".message-parley .message-text").nth(1)).to_have_text("Sure.")
        await expect(page.locator("#turn-note")).to_have_text(
            "From your last word to the first sound"
        )
        # The waterfall has grown while the turns ran.
        notes = await page.evaluate("window.notes")
        assert any("as it happens" in note for note in notes)
        # Each answer's figure shows its own turn again.
        await first.get_by_role("button", name="show where the time went").click()
        await page.get_by_role("button", name="Stop talking").click()
        await until(lambda: is_empty(server))


async def is_empty(server: Server) -> bool:
    return server.num_sessions == 0


async def is_reported(server: Server) -> bool:
    """A turn knows how its answer was played."""
    turns = recent(server.services.traces.store, 10)
    reports = [turn["client"] for turn in turns if "client" in turn]
    for report in reports:
        assert report["played_ms"] > 100 and 0 <= report["gap_ms"] <= report["played_ms"]
        assert 0 < report["first_audio_delay_ms"] < 2000
    return bool(reports)


async def test_typing_needs_no_microphone(open_page: OpenPage) -> None:
    async with serving("It is sunny all day long.") as server:
        page = await open_page(server.url, microphone=None)
        await page.fill("#message", "What is the weather?")
        await page.keyboard.press("Enter")
        await expect(page.locator("#line")).to_have_text("over WebRTC")
        await expect(page.locator(".message-parley .message-text")).to_have_text(
            "It is sunny all day long."
        )

        async def was_heard() -> bool:
            state = await sound(page)
            return bool(state["loudest"] > 0.1 and not state["playing"])

        await until(was_heard)
        # The browser tells what it made of the sound on its track.
        await until(lambda: is_reported(server))
        # Stopping an answer goes to whoever plays it.
        server.engine.replies[:] = [STORY]
        await page.fill("#message", "Tell me a story.")
        await page.keyboard.press("Enter")
        await expect(page.locator("#status")).to_have_text("Speaking")
        await page.keyboard.press("Escape")
        await expect(page.locator("#status")).to_have_text("Connected")
        await expect(page.locator(".message-parley").nth(1)).to_contain_text("interrupted")
        await expect(page.locator(".unheard")).to_be_visible()


async def test_a_server_without_webrtc_is_reached_by_websocket(
    open_page: OpenPage, words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.api.realtime.webrtc_calls.HAS_WEBRTC", False)
    async with serving("Sure.") as server:
        page = await open_page(server.url, microphone=words)
        await page.click("#start")
        await expect(page.locator("#line")).to_have_text("over a WebSocket")
        await expect(page.locator(".message-parley .message-text")).to_have_text(["Sure."])


async def test_a_broken_line_is_mended(open_page: OpenPage, words: Path) -> None:
    async with serving("Sure.", "And more.") as server:
        page = await open_page(server.url, microphone=words)
        await page.click("#start")
        await expect(page.locator(".message-parley .message-text")).to_have_text(["Sure."])
        # The network goes away under the call, as far as the page can tell.
        await page.evaluate(
            "import('/app.js').then(({page}) => page.connection.mend(page.connection.peer))"
        )
        await expect(page.locator("#log")).to_contain_text("Parley remembers what was said")
        await expect(page.locator("#status")).to_have_text("Listening")
        assert server.num_sessions == 1
        # The second buzz is heard over the new line, in the same conversation.
        await expect(page.locator(".message-parley .message-text")).to_have_text(
            ["Sure.", "And more."], timeout=15_000
        )
        assert len(server.engine.requests[-1]) > len(server.engine.requests[0])


async def test_a_line_that_cannot_be_mended_says_how_long_it_is_tried(
    open_page: OpenPage, words: Path
) -> None:
    async with serving("Sure.") as server:
        page = await open_page(server.url, microphone=words)
        await page.click("#start")
        await expect(page.locator(".message-parley .message-text")).to_have_text(["Sure."])
        await page.route("**/v1/realtime/calls*", lambda route: route.abort())
        await page.evaluate(
            "import('/app.js').then(({page}) => void page.connection.mend(page.connection.peer))"
        )
        countdown = page.locator("#notice-countdown")
        await expect(page.locator("#notice-title")).to_have_text("The line broke")
        await expect(countdown).to_have_text(re.compile(r"For 1\d s more"))
        first = await countdown.text_content()
        await expect(countdown).not_to_have_text(first or "")


async def test_a_server_that_is_gone_is_noticed_before_the_browser_does(
    open_page: OpenPage, words: Path
) -> None:
    async with serving(STORY) as server:
        page = await open_page(server.url, microphone=words)
        await page.click("#start")
        await expect(page.locator("#status")).to_have_text("Speaking")
        # As when the server's process was killed: no packet comes, and nobody answers.
        await page.route(re.compile("/healthz|/v1/realtime/calls"), lambda route: route.abort())
        await asyncio.sleep(2.5)
        await expect(page.locator("#notice-title")).to_be_hidden()  # as long as packets come
        await page.evaluate(
            "import('/app.js').then(({page}) => { page.connection.counts = async () => null; })"
        )
        await expect(page.locator("#notice-title")).to_have_text("The line broke", timeout=3_400)


@pytest.mark.parametrize("is_behind_proxy", [False, True])
async def test_a_spell_without_packets_is_not_the_end_of_a_call(
    open_page: OpenPage, words: Path, is_behind_proxy: bool
) -> None:
    async def sign_in(route: Route) -> None:
        await route.fulfill(status=302, headers={"Location": "https://sign-in.invalid/"})

    async with serving(STORY) as server:
        page = await open_page(server.url, microphone=words)
        if is_behind_proxy:  # which would have the page sign in again
            await page.route("**/healthz", sign_in)
        await page.click("#start")
        await expect(page.locator("#status")).to_have_text("Speaking")
        asked = asyncio.Event()
        page.on("request", lambda request: "healthz" in request.url and asked.set())
        freeze = """async (isFrozen) => {
            const { page } = await import("/app.js");
            const line = page.connection;
            line.found ??= line.counts;
            const last = await line.found();
            line.counts = isFrozen ? async () => last : line.found;
            line.mend = async () => { window.isMended = true; };
        }"""
        await page.evaluate(freeze, True)
        await asyncio.wait_for(asked.wait(), 10)
        await page.evaluate(freeze, False)
        await asyncio.sleep(1.5)
        await expect(page.locator("#notice-title")).to_be_hidden()
        assert not await page.evaluate("window.isMended") and server.num_sessions == 1


async def test_settings_that_are_taken_back_are_the_servers_again(open_page: OpenPage) -> None:
    async with serving("Sure.", instructions="Be brief.", vad_silence_ms=700) as server:
        page = await open_page(server.url, microphone=None)
        updates: list[dict[str, Any]] = []

        def note(frame: str | bytes) -> None:
            event = json.loads(frame)
            if event["type"] == "session.update":
                updates.append(event["session"])

        page.on("websocket", lambda socket: socket.on("framesent", note))

        async def choose(turns: str, instructions: str) -> None:
            await page.get_by_role("button", name="Settings").click()
            dialog = page.get_by_role("dialog", name="Settings")
            await dialog.get_by_label("Connection").select_option("websocket")
            await dialog.get_by_label("Your turn ends").select_option(turns)
            await dialog.get_by_label("Instructions").fill(instructions)
            await page.get_by_role("button", name="Done").click()

        async def is_told(instructions: str) -> bool:
            count = len(server.engine.requests)
            await page.fill("#message", "Hello")
            await page.keyboard.press("Enter")
            await until(lambda: has_more_than(count))
            return bool(server.engine.requests[-1][0].content == instructions)

        async def has_more_than(count: int) -> bool:
            return len(server.engine.requests) > count

        await choose("server_vad", "You are a pirate.")
        assert await is_told("You are a pirate.")
        await choose("server", "")
        assert await is_told("Be brief.")
        heard = [update["audio"]["input"] for update in updates if "audio" in update]
        kinds = [one["turn_detection"]["type"] for one in heard]
        assert kinds == ["server_vad", "semantic_vad"]
        assert await page.locator(".message-you").count() == 2, "it is the same conversation"


async def test_push_to_talk(open_page: OpenPage, words: Path) -> None:
    async with serving("Sure.", heard="Hold the line.") as server:
        page = await open_page(server.url, microphone=words)
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_label("Your turn ends").select_option("push")
        await page.get_by_role("button", name="Done").click()
        await page.get_by_role("button", name="Start talking").click()
        await expect(page.locator("#status")).to_have_text("Waiting")
        button = page.get_by_role("button", name="Hold to talk")
        await button.focus()
        await page.keyboard.down("Space")
        await expect(page.locator("#status")).to_have_text("Hearing you")
        await asyncio.sleep(3)  # speaking takes its time
        await page.keyboard.up("Space")
        await expect(page.locator(".message-you .message-text")).to_have_text("Hold the line.")
        await expect(page.locator(".message-parley .message-text")).to_have_text("Sure.")


async def test_settings_are_kept_and_told(open_page: OpenPage) -> None:
    async with serving("Sure.") as server:
        page = await open_page(server.url, microphone=None)
        await page.get_by_role("button", name="Settings").click()
        dialog = page.get_by_role("dialog", name="Settings")
        await expect(dialog).to_be_visible()
        await dialog.get_by_label("Connection").select_option("websocket")
        await dialog.get_by_label("Voice speed").fill("1.25")
        await expect(dialog.locator("#speed-shown")).to_have_text("1.25 times")
        await dialog.get_by_label("Instructions").fill("You are a pirate.")
        await page.keyboard.press("Escape")
        await expect(dialog).to_be_hidden()
        await page.reload()
        await page.fill("#message", "Hello")
        await page.keyboard.press("Enter")
        await expect(page.locator("#line")).to_have_text("over a WebSocket")
        await expect(page.locator(".message-parley .message-text")).to_have_text("Sure.")
        assert server.engine.requests[0][0].content == "You are a pirate."
