"""What a page knows of itself, and waiting for what has no event."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from playwright.async_api import Page

STATE = """import('/app.js').then(({page}) => {
  const rate = page.context?.sampleRate ?? 0;
  const {totalPlayed = 0, loudest = 0} = page.player ?? {};
  const {playedMs = 0, loudest: remote = 0} = page.remote ?? {};
  return {played: totalPlayed + playedMs * rate / 1000, loudest: Math.max(loudest, remote), rate,
    playing: page.isPlaying};
})"""


async def sound(page: Page) -> dict[str, Any]:
    """What the players have counted: the worklet's samples, or the time of the media track."""
    state: dict[str, Any] = await page.evaluate(STATE)
    return state


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 15.0) -> None:
    """Waits for something that has no event; fails when it does not come."""
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110  the browser cannot set an event of ours
            await asyncio.sleep(0.02)
