"""The traces page in a real browser, against the real routes, over ten thousand turns."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.async_api import Page, Route, expect

from app.observe.retention import Retention
from app.observe.store import FILE_NAME, TraceStore
from app.observe.trace import STAGES
from app.observe.turn_audio import AudioFiles, TurnAudio
from app.observe.writer import TraceWriter
from app.server.lifecycle import create_app, listening
from tests.browser.conftest import PHONE, OpenPage
from tests.support.fake_turns import a_turn
from tests.support.fakes import ScriptedEngine, fake_services

pytestmark = pytest.mark.browser

NUM_TURNS = 10_000
LIMITS = {"endpoint": 600.0, "asr": 300.0, "tts": 200.0}


def make_turns(number: int) -> Iterator[dict[str, Any]]:
    """A week of calls: some slow for one reason or another, some stopped, a few failed."""
    rng = random.Random(5)
    now_ms = int(time.time() * 1000)
    base = a_turn()["stages_ms"]
    for n in range(number):
        ended_at_ms = now_ms - (number - n) * 60_000
        stages = {name: ms * rng.lognormvariate(0, 0.25) for name, ms in base.items()}
        if rng.random() < 0.02:
            stages[rng.choice(["asr", "queue", "tts"])] += rng.uniform(300, 1500)
        whole = sum(stages.values())
        misses = {
            name: ms - LIMITS[name] for name, ms in stages.items() if ms > LIMITS.get(name, 9e9)
        }
        changes: dict[str, Any] = {
            "stages_ms": stages,
            "voice_to_voice_ms": whole,
            "outcome": "interrupted" if rng.random() < 0.1 else "answered",
            "budget": {
                "target_ms": 1000.0,
                "stages_ms": LIMITS,
                "misses_ms": misses,
                "actions": [],
            },
        }
        if rng.random() < 0.01:
            changes = {
                "outcome": "failed",
                "reason": "engine_died",
                "voice_to_voice_ms": None,
                "time_to_first_audio_ms": None,
                "stages_ms": {},
                "reply": "",
            }
        yield a_turn(n, ended_at_ms=ended_at_ms, **changes)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / FILE_NAME
    store = TraceStore(path, Retention())
    store.write(list(make_turns(NUM_TURNS)))
    store.close()
    return path


@asynccontextmanager
async def served(
    path: Path | None, recordings: AudioFiles | None = None, **settings: Any
) -> AsyncIterator[str]:
    """The real application with the turns in ``path``."""
    services = fake_services(ScriptedEngine(), port=0, **settings)
    store = TraceStore(path, Retention())
    object.__setattr__(services, "traces", TraceWriter(store, recordings=recordings))
    app = create_app(services.settings, services)
    async with listening(app, services.settings) as url:
        yield f"{url}/traces.html"
    store.close()


async def shown(page: Page) -> None:
    """All tables are filled, after the page was opened or its filter was changed."""
    await expect(page.locator("#main")).to_have_attribute("aria-busy", "false")


async def test_ten_thousand_turns_open_in_under_a_second(
    open_page: OpenPage, database: Path
) -> None:
    async with served(database) as url:
        page = await open_page(url, microphone=None)
        took_ms = [float("inf")]
        while min(took_ms) >= 1000 and len(took_ms) < 10:  # the machine may have other work too
            await page.reload()
            await shown(page)
            # From the start of the navigation to the moment when all tables are filled.
            mark = "performance.getEntriesByName('traces-shown')[0].startTime"
            took_ms.append(await page.evaluate(mark))
        print(f"opened in {min(took_ms):.0f} ms")
        assert min(took_ms) < 1000, took_ms
        await expect(page.locator("#figures")).to_contain_text(f"{NUM_TURNS:,}")
        assert await page.locator("#turns tbody tr").count() == 50


async def test_a_turn_is_shown_against_its_budget(open_page: OpenPage, database: Path) -> None:
    async with served(database) as url:
        page = await open_page(url, microphone=None)
        await shown(page)
        slowest = page.locator("#slowest tbody tr").first
        cause = await slowest.locator("td").nth(1).inner_text()
        whole = await slowest.locator("td").first.inner_text()
        assert cause in ("Transcription", "Queue", "Voice")
        # By keyboard alone: the button is reached, opened and closed without a mouse.
        await slowest.locator("button").focus()
        await page.keyboard.press("Enter")
        dialog = page.locator("#detail")
        await expect(dialog).to_be_visible()
        await expect(dialog).to_contain_text(f"{whole} ms voice to voice against a budget of 1,000")
        assert await dialog.locator(".waterfall tbody tr").count() == len(STAGES)
        assert await dialog.locator(".waterfall .limit").count() == len(LIMITS)
        assert "turn=turn_" in page.url
        await page.keyboard.press("Escape")
        await expect(dialog).not_to_be_visible()
        await expect(slowest.locator("button")).to_be_focused()
        assert "turn=" not in page.url
        # The address leads back to the same turn.
        await slowest.locator("button").click()
        await expect(dialog).to_be_visible()
        address = page.url
        await page.goto("about:blank")
        await page.goto(address)
        await expect(dialog).to_contain_text(f"{whole} ms voice to voice")
        # Also when it is pasted into the page that is open, on another view.
        await page.keyboard.press("Escape")
        await page.select_option("[name=outcome]", "answered")
        await shown(page)
        await page.evaluate("hash => { location.hash = hash; }", address.partition("#")[2])
        await expect(dialog).to_contain_text(f"{whole} ms voice to voice")
        await expect(page.locator("[name=outcome]")).to_have_value("")


async def test_filters_choose_and_more_turns_can_be_had(
    open_page: OpenPage, database: Path
) -> None:
    async with served(database) as url:
        page = await open_page(url, microphone=None)
        await shown(page)
        await page.locator("#more").click()
        await expect(page.locator("#turns tbody tr")).to_have_count(100)
        times = await page.locator("#turns tbody th").all_inner_texts()
        assert len(set(times)) == 100, "no turn twice"
        await page.select_option("[name=outcome]", "failed,timed_out")
        await shown(page)
        outcomes = await page.locator("#turns tbody td:nth-of-type(1)").all_inner_texts()
        assert set(outcomes) == {"failed (engine_died)"}
        await page.locator("#clear").click()
        await page.fill("[name=min_ms]", "1500")
        await shown(page)
        await expect(page.locator("#announcer")).not_to_contain_text(f"{NUM_TURNS:,}")
        waits = await page.locator("#turns tbody td:nth-of-type(2)").all_inner_texts()
        assert waits and all(int(w.split()[0].replace(",", "")) >= 1500 for w in waits)
        # A conversation is chosen by its button, and is ten turns long.
        await page.locator("#clear").click()
        await shown(page)
        await page.locator("#conversations tbody button").nth(1).click()
        await shown(page)
        await expect(page.locator("#turns tbody tr")).to_have_count(10)
        assert "conversation=sess_" in page.url


async def test_more_turns_come_once_and_only_to_the_list_they_belong_to(
    open_page: OpenPage, database: Path
) -> None:
    may_answer = asyncio.Event()
    num_asked = 0

    async def answer_late(route: Route) -> None:
        nonlocal num_asked
        num_asked += 1
        await may_answer.wait()
        await route.continue_()

    async with served(database) as url:
        page = await open_page(url, microphone=None)
        await shown(page)
        await page.route(re.compile(r"/v1/traces\?.*cursor="), answer_late)
        rows = page.locator("#turns tbody tr")
        await page.locator("#more").dblclick()
        may_answer.set()
        await expect(rows).to_have_count(100)
        await page.wait_for_load_state("networkidle")
        assert (num_asked, await rows.count()) == (2, 100)
        may_answer.clear()
        await page.locator("#more").click()
        await page.select_option("[name=outcome]", "failed,timed_out")
        await shown(page)
        async with page.expect_response(lambda response: "cursor=" in response.url) as late:
            may_answer.set()
        await (await late.value).finished()
        await page.evaluate("() => new Promise((resolve) => setTimeout(resolve, 100))")
        outcomes = await page.locator("#turns tbody td:nth-of-type(1)").all_inner_texts()
        assert set(outcomes) == {"failed (engine_died)"}


async def test_two_periods_are_compared(open_page: OpenPage, database: Path) -> None:
    async with served(database) as url:
        page = await open_page(url, microphone=None)
        await page.select_option("[name=period]", "24h")
        await page.check("[name=compare]")
        await expect(page.locator("#figures .change")).to_have_count(7)
        await expect(page.locator("#figures")).to_contain_text("1,440 before")
        await expect(page.locator("#stages thead")).to_contain_text("p95 change")
        changes = await page.locator("#stages .change").all_inner_texts()
        assert len(changes) == 2 * len(STAGES)


async def test_a_phone_has_room_for_it(open_page: OpenPage, database: Path) -> None:
    async with served(database) as url:
        page = await open_page(url, microphone=None, size=PHONE)
        await shown(page)
        wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert await page.evaluate(wide) <= 0
        sizes = await page.locator("#filters input:not([type=checkbox]), #filters select").all()
        for field in sizes:
            box = await field.bounding_box()
            assert box is not None and box["height"] >= 44
        await page.locator("#turns tbody button").first.click()
        await expect(page.locator("#detail")).to_be_visible()
        box = await page.locator("#detail").bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= PHONE[0]


async def test_everything_has_a_name_for_those_who_cannot_see_it(
    open_page: OpenPage, database: Path
) -> None:
    async with served(database) as url:
        page = await open_page(url, microphone=None)
        await shown(page)
        for role, name in (
            ("form", "Which turns"),
            ("region", "Summary"),
            ("table", "The slowest turns"),
            ("table", "Turns, the newest first"),
            ("table", "Conversations, the latest first"),
            ("combobox", "Period"),
            ("spinbutton", "Slower than, ms"),
            ("checkbox", "Over budget"),
        ):
            found = page.get_by_role(role, name=name, exact=False)  # type: ignore[arg-type]
            assert await found.count() >= 1, (role, name)
        here = page.locator("nav [aria-current=page]")
        await expect(here).to_have_text("Traces")
        await expect(page.locator("nav a")).to_have_text(["Talk", "Traces"])
        chart = page.locator("#trend svg")
        assert "highest p95" in (await chart.get_attribute("aria-label") or "")
        await expect(page.locator("#announcer")).to_have_text(
            f"{NUM_TURNS:,} turns in 1,000 conversations"
        )
        await page.locator("details summary").click()
        points = await page.locator("#trend-table tbody tr").count()
        assert 20 <= points <= 60
        unnamed = "[...document.querySelectorAll('button, input, select')].filter((e) =>"
        unnamed += " !(e.textContent.trim() || e.labels?.length)).length"
        assert await page.evaluate(unnamed) == 0


async def test_a_key_is_asked_for_and_then_used(open_page: OpenPage, database: Path) -> None:
    async with served(database, api_keys=("k1",)) as url:
        page = await open_page(url, microphone=None)
        await expect(page.locator("#problem-title")).to_have_text("This server asks for a key")
        await page.fill("#key", "k2")
        await page.keyboard.press("Enter")
        await expect(page.locator("#problem-title")).to_contain_text("does not accept this key")
        await page.fill("#key", "k1")
        await page.keyboard.press("Enter")
        await expect(page.locator("#problem")).not_to_be_visible()
        await expect(page.locator("#figures")).to_contain_text(f"{NUM_TURNS:,}")
        assert "k1" not in page.url


async def test_a_recorded_turn_can_be_played(open_page: OpenPage, tmp_path: Path) -> None:
    files = AudioFiles(tmp_path, max_age_s=1e9, max_bytes=10**9)
    audio = TurnAudio(0)
    audio.add_reply(np.full(24_000, 0.1, np.float32), 24_000, 500_000_000)
    files.write("turn_1", audio.to_wav())
    path = tmp_path / FILE_NAME
    store = TraceStore(path, Retention())
    store.write([a_turn(1, is_recorded=True), a_turn(2), a_turn(3, is_recorded=True)])
    store.close()
    async with served(path, recordings=files, api_keys=("k1",)) as url:
        page = await open_page(url, microphone=None)
        await page.fill("#key", "k1")
        await page.keyboard.press("Enter")
        rows = page.locator("#turns tbody button.link")
        await shown(page)
        await rows.nth(4).click()  # two links a row; the oldest turn comes last
        player = page.get_by_label("Recording of the turn")
        await expect(player).to_be_visible()
        length = "async (a) => { await new Promise((r) => a.readyState ? r() :"
        length += " a.addEventListener('loadedmetadata', r)); return a.duration; }"
        assert abs(await player.evaluate(length) - 1.5) < 0.01
        await page.keyboard.press("Escape")
        for other in (0, 2):  # its recording is gone; it was never recorded
            await rows.nth(other).click()
            await expect(page.locator("#detail")).to_be_visible()
            await expect(player).to_have_count(0)
            await page.keyboard.press("Escape")
            await expect(page.locator("#detail")).not_to_be_visible()


async def test_when_each_word_was_said(open_page: OpenPage, tmp_path: Path) -> None:
    said = [
        {"word": "How", "start_ms": 1100, "end_ms": 1240},
        {"word": "are", "start_ms": 1240, "end_ms": 1400},
        {"word": "you?", "start_ms": 1420, "end_ms": 1900},
    ]
    path = tmp_path / FILE_NAME
    store = TraceStore(path, Retention())
    store.write([a_turn(1), a_turn(2, words=said)])
    store.close()
    async with served(path) as url:
        page = await open_page(url, microphone=None)
        rows = page.locator("#turns tbody button.link")
        await shown(page)
        await rows.nth(0).click()
        await page.locator("#detail summary").click()
        table = page.get_by_role("table", name="When each word was said")
        await expect(table.locator("tbody tr")).to_have_count(3)
        await expect(table.locator("tbody tr").nth(2)).to_have_text("you?1,4201,900")
        await page.keyboard.press("Escape")
        await rows.nth(2).click()  # nobody asked for them
        await expect(page.locator("#detail")).to_be_visible()
        await expect(page.locator("#detail summary")).to_have_count(0)


async def test_no_turns_yet_is_said_in_words(open_page: OpenPage) -> None:
    async with served(None) as url:
        page = await open_page(url, microphone=None)
        await shown(page)
        await expect(page.locator("#trend")).to_have_text("No spoken turns")
        await expect(page.locator("#turns tbody")).to_have_text("Nothing here")
