"""A real Chromium with a fake microphone that plays a recording once, then silence."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile as sf
from playwright.async_api import Page, async_playwright

from audio.frame import SPEECH_RATE, silence
from tests.support.speech import WEATHER, Voice

PAGES = Path(__file__).resolve().parents[2] / "web_demo"
DESKTOP = (1280, 800)
PHONE = (390, 844)
FLAGS = [
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # A name that is not "localhost", for a page that may not have a microphone.
    "--host-resolver-rules=MAP parley.test 127.0.0.1",
]
OpenPage = Callable[..., Awaitable[Page]]


def chromium_path() -> str:
    """Debian's, or what PARLEY_CHROMIUM names."""
    names = (
        "chromium",
        "chromium-browser",
        "google-chrome",
    )  # as in tests/support/install_system.sh
    found = os.environ.get("PARLEY_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if not found:
        pytest.skip("there is no chromium on this machine; tests/support/install_system.sh gets it")
    return found


@asynccontextmanager
async def opened_page(
    url: str,
    *,
    microphone: Path | None,
    has_device: bool = True,
    size: tuple[int, int] = DESKTOP,
) -> AsyncIterator[Page]:
    """The page at ``url``; ``microphone`` None: it is denied, or not even there.

    Fails at the end when the page had an error, or broke its own content security policy.
    """
    flags = [*FLAGS, "--no-sandbox"] if os.geteuid() == 0 else list(FLAGS)
    if has_device:
        flags.append("--use-fake-device-for-media-stream")
    if microphone is None:
        flags.append("--deny-permission-prompts")
    else:
        flags += [
            "--use-fake-ui-for-media-stream",
            f"--use-file-for-fake-audio-capture={microphone}%noloop",
        ]
    width, height = size
    faults: list[str] = []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium_path(), args=flags)
        try:
            context = await browser.new_context(viewport={"width": width, "height": height})
            page = await context.new_page()
            page.set_default_timeout(20_000)
            page.on("pageerror", lambda error: faults.append(str(error)))
            page.on(
                "console",
                lambda message: (
                    faults.append(message.text)
                    if "Content Security Policy" in message.text or "Uncaught" in message.text
                    else None
                ),
            )
            await page.goto(url)
            yield page
        finally:
            await browser.close()
    assert faults == []


@pytest.fixture
async def open_page() -> AsyncIterator[OpenPage]:
    """Opens pages that close at the end of the test; see ``opened_page``."""
    async with AsyncExitStack() as stack:

        async def open_one(url: str, **options: Any) -> Page:
            return await stack.enter_async_context(opened_page(url, **options))

        yield open_one


@pytest.fixture(scope="session")
def question(voice: Voice, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A spoken question as a WAV file that Chromium can play as a microphone."""
    # The fake device begins before the page is connected: silence first, so that nothing is lost.
    samples = np.concatenate((silence(SPEECH_RATE), voice.say(WEATHER).samples()))
    path = tmp_path_factory.mktemp("microphone") / "question.wav"
    sf.write(path, samples, SPEECH_RATE, subtype="PCM_16")
    return path
