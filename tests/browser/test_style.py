"""How the page looks in a real browser: what can be read, and what has room."""

from __future__ import annotations

from typing import Literal

import pytest
from playwright.async_api import expect

from tests.browser.conftest import PAGES, OpenPage
from tests.browser.test_page import answer_typed
from tests.support.scripted_realtime import scripted_server

pytestmark = pytest.mark.browser

CONTRAST = """(button) => {
  const luminance = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map((part) => {
      const level = part / 255;
      return level <= 0.04045 ? level / 12.92 : ((level + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const style = getComputedStyle(button);
  const [dark, light] = [luminance(style.color), luminance(style.backgroundColor)]
    .sort((a, b) => a - b);
  return (light + 0.05) / (dark + 0.05);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_strong_buttons_can_be_read_under_the_mouse(
    open_page: OpenPage, scheme: Literal["light", "dark"]
) -> None:
    async with scripted_server(pages=PAGES) as server:
        page = await open_page(server.url, microphone=None)
        await page.emulate_media(color_scheme=scheme)
        # The form for the key too, which is hidden until a server asks for one.
        await page.evaluate(
            "for (const id of ['notice', 'key-form', 'push'])"
            " document.getElementById(id).hidden = false"
        )
        for button in await page.locator("main .button-strong").all():
            await button.hover()
            assert await button.evaluate(CONTRAST) >= 4.5


@pytest.mark.parametrize("size", [(1280, 800), (1100, 750), (1024, 700), (1280, 640)])
async def test_the_last_turn_is_not_clipped(open_page: OpenPage, size: tuple[int, int]) -> None:
    async with scripted_server(answer_typed, pages=PAGES) as server:
        page = await open_page(server.url, microphone=None, size=size)
        await page.fill("#message", "Hello")
        await page.keyboard.press("Enter")
        await expect(page.locator("#turn-facts")).to_contain_text("answer tokens")
        hidden_px = await page.locator(".turn").evaluate(
            "(card) => Math.max(card.scrollHeight - card.clientHeight,"
            " card.getBoundingClientRect().bottom - innerHeight)"
        )
        assert hidden_px <= 0
