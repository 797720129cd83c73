"""The page in a real browser with a real server behind it: nothing is scripted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from tests.browser.conftest import OpenPage
from tests.browser.page_state import sound, until

pytestmark = [pytest.mark.browser, pytest.mark.integration]

REPLY_MS = 30_000


async def stages_ms(page: Page) -> list[int]:
    """The numbers of the waterfall."""
    cells = await page.locator("#stages .ms").all_inner_texts()
    return [int(cell.replace(",", "")) for cell in cells]


async def test_a_spoken_question_gets_a_spoken_answer(
    server_url: str, open_page: OpenPage, question: Path
) -> None:
    page = await open_page(server_url, microphone=question)
    await page.get_by_role("button", name="Start talking").click()
    await expect(page.locator(".message-you .message-text").first).to_contain_text(
        re.compile("weather", re.IGNORECASE), timeout=REPLY_MS
    )
    await expect(page.locator(".message-parley .message-text").first).to_contain_text(
        re.compile(r"\w+ \w+"), timeout=REPLY_MS
    )

    async def was_heard() -> bool:
        heard = await sound(page)
        return bool(heard["played"] > 0.5 * heard["rate"] and heard["loudest"] > 0.05)

    await until(was_heard, timeout_s=30)
    # The answer may be long: stopping it ends the turn as well, and shows its trace.
    await page.keyboard.press("Escape")
    await expect(page.locator("#turn-number")).to_have_text(re.compile(r"^[\d,]+$"))
    # First what the page itself sees of the turn, then the server's record of it.
    await expect(page.locator("#turn-note")).to_have_text(
        "From your last word to the first sound", timeout=REPLY_MS
    )
    stages = await stages_ms(page)
    total = int((await page.locator("#turn-number").inner_text()).replace(",", ""))
    assert len(stages) == 7
    assert sum(stages) == pytest.approx(total, abs=4)  # each is rounded
    assert total > 100

    async def is_silent() -> bool:
        return not (await sound(page))["playing"]

    await until(is_silent)


async def test_a_typed_question_gets_a_spoken_answer(server_url: str, open_page: OpenPage) -> None:
    page = await open_page(server_url, microphone=None)
    await page.get_by_label("Message to Parley").fill("What is the capital of France?")
    await page.keyboard.press("Enter")
    await expect(page.locator(".message-parley .message-text")).to_contain_text(
        "Paris", timeout=REPLY_MS
    )

    async def was_heard() -> bool:
        return bool((await sound(page))["loudest"] > 0.05)

    await until(was_heard, timeout_s=30)
    await expect(page.locator("#notice")).to_be_hidden()
