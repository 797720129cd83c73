"""Conversations of three turns with the real models, over both lines, and what came out of them."""

from __future__ import annotations

import asyncio
import base64
import io
import re
from pathlib import Path
from typing import Any, cast

import av
import numpy as np
import pytest
import soundfile as sf
from playwright.async_api import Page, expect

from audio.asr.recognizer import Recognizer
from audio.frame import SPEECH_RATE, Samples, silence
from tests.browser.conftest import OpenPage
from tests.support.speech import DOG_OR_CAT, WEATHER, Voice

pytestmark = [pytest.mark.browser, pytest.mark.integration, pytest.mark.timeout(150)]

RATE = 48_000
# An answer of 48 tokens takes 10 s at most; one that is longer is interrupted, which is no harm.
PAUSE_S = 7.0
QUESTIONS = (WEATHER, DOG_OR_CAT, "Where can I buy a train ticket?")
HEARD = ("weather", "dog", "train")

# Both players at once: only one of them has anything to play.
RECORD = """async () => {
  const {page} = await import('/app.js');
  const into = page.context.createMediaStreamDestination();
  page.player.node.connect(into);
  page.remote.source?.connect(into);
  const recorder = new MediaRecorder(into.stream, {mimeType: 'audio/webm;codecs=opus'});
  const pieces = [];
  recorder.ondataavailable = ({data}) => pieces.push(data);
  const ended = new Promise((resolve) => { recorder.onstop = resolve; });
  recorder.start();
  window.finishRecording = async () => {
    recorder.stop();
    await ended;
    const bytes = new Uint8Array(await new Blob(pieces).arrayBuffer());
    let binary = '';
    for (let at = 0; at < bytes.length; at += 8192) {
      binary += String.fromCharCode(...bytes.subarray(at, at + 8192));
    }
    return btoa(binary);
  };
}"""


@pytest.fixture(scope="module")
def conversation(voice: Voice, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three questions with pauses for the answers, as the microphone's recording."""
    parts = [silence(2 * RATE)]
    for text in QUESTIONS:
        parts += [voice.say(text).samples(RATE), silence(int(PAUSE_S * RATE))]
    path = tmp_path_factory.mktemp("microphone") / "conversation.wav"
    sf.write(path, np.concatenate(parts), RATE, subtype="PCM_16")
    return path


@pytest.fixture(scope="module")
def recognizer(asr_model_dir: Path) -> Recognizer:
    return Recognizer(asr_model_dir, num_threads=1)


def samples_of(webm: bytes) -> Samples:
    """Mono at 16 kHz."""
    with av.open(io.BytesIO(webm)) as container:
        to_mono = av.AudioResampler(format="flt", layout="mono", rate=SPEECH_RATE)
        frames = [part for frame in container.decode(audio=0) for part in to_mono.resample(frame)]
        frames += to_mono.resample(None)
    return np.concatenate([frame.to_ndarray().reshape(-1) for frame in frames])


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


@pytest.mark.parametrize("line", ["webrtc", "websocket"])
async def test_three_turns(
    server_url: str, open_page: OpenPage, conversation: Path, recognizer: Recognizer, line: str
) -> None:
    page = await open_page(server_url, microphone=conversation)
    await page.evaluate(
        f"localStorage.setItem('parley.settings', JSON.stringify({{transport: '{line}'}}))"
    )
    await page.reload()
    await page.click("#start")
    shown = "over WebRTC" if line == "webrtc" else "over a WebSocket"
    await expect(page.locator("#line")).to_have_text(shown)
    await page.evaluate(RECORD)
    asked = page.locator(".message-you .message-text")
    answered = page.locator(".message-parley .message-text")
    for turn, word in enumerate(HEARD):
        await expect(asked.nth(turn)).to_contain_text(
            re.compile(word, re.IGNORECASE), timeout=25_000
        )
        await expect(answered.nth(turn)).to_contain_text(re.compile(r"\w+ \w+"), timeout=15_000)
    await expect(page.locator("#status")).to_have_text("Speaking")
    await expect(page.locator("#status")).to_have_text("Listening", timeout=25_000)
    turns = [await spoken(page, turn) for turn in range(3)]
    latencies_ms = [await latency_ms(page, turn) for turn in range(3)]
    recording = samples_of(base64.b64decode(await page.evaluate("window.finishRecording()")))
    await page.click("#start")

    # Sound, and the words that the page shows as heard.
    active = np.abs(recording[: len(recording) // 320 * 320]).reshape(-1, 320).max(axis=1) > 0.02
    assert active.sum() * 0.02 > 3.0
    transcript = await asyncio.to_thread(recognizer.transcribe, recording)
    expected = [word for turn in turns for word in words(turn)]
    found = set(words(transcript.text))
    recall = sum(word in found for word in expected) / len(expected)
    print(f"{line}: v2v {latencies_ms} ms, {len(expected)} words, {recall:.0%} heard back")
    assert recall > 0.7, (turns, transcript.text)
    assert all(100 < ms < 20_000 for ms in latencies_ms)  # on a machine with other work


async def spoken(page: Page, turn: int) -> str:
    """What of an answer was heard."""
    script = """(message) => [...message.querySelector('.message-text').childNodes]
      .filter((node) => node.nodeName !== 'S').map((node) => node.textContent).join('')"""
    text: Any = await page.locator(".message-parley").nth(turn).evaluate(script)
    return cast(str, text)


async def latency_ms(page: Page, turn: int) -> int:
    tag = page.locator(".message-parley").nth(turn).locator("button.tag")
    return int((await tag.inner_text()).removesuffix(" ms").replace(",", ""))
