"""The realtime client of the OpenAI Agents SDK for JavaScript, with only the URL changed."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import jiwer
import pytest

from tests.integration.openai_caller import RATE, pause, words
from tests.integration.test_bad_input import Running, running
from tests.support.agents_js import agents_folder
from tests.support.speech import Voice

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("llm_model_path", "asr_model_dir", "tts_voice_path"),
]

SCRIPT = Path(__file__).with_name("agents_client.mjs")
KEY = "a-key-for-this-test"


@pytest.fixture(scope="session")
def client_folder() -> Path:
    """Where the package is installed, with our script beside it."""
    if shutil.which("node") is None:
        pytest.skip(
            "node is needed for the JavaScript client; tests/support/install_system.sh gets it"
        )
    folder = agents_folder()
    shutil.copy(SCRIPT, folder / SCRIPT.name)
    return folder


async def converse(folder: Path, server: Running, speech: Path) -> dict[str, Any]:
    """Run the client; what it saw."""
    url = f"{server.url}?model=gpt-realtime"
    process = await asyncio.create_subprocess_exec(
        *("node", SCRIPT.name, url, KEY, str(speech)),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(60):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()[-2000:]
    seen: dict[str, Any] = json.loads(out.decode().splitlines()[-1])
    return seen


@pytest.mark.timeout(420)
async def test_the_stock_javascript_client_talks_and_calls_its_function(
    client_folder: Path, tmp_path: Path, voice: Voice
) -> None:
    speech = tmp_path / "speech.pcm"
    said = voice.say("Sunday is the best part of the week.")
    speech.write_bytes(said.pcm16(RATE) + pause(1.5))
    async with running(api_keys=(KEY,), max_reply_tokens=48, temperature=0.0) as server:
        seen = await converse(client_folder, server, speech)
        await server.counts()  # the client has left, and so has its session
    assert seen["errors"] == []
    assert "error" not in seen["kinds"]

    # Spoken: heard, and answered aloud.
    heard = words(seen["transcripts"][0])
    assert jiwer.wer(words(said.text), heard) <= 0.25
    assert seen["turns"][0]["items"][-1] == "message"
    assert seen["audioBytes"] > 24_000

    # Written: the function was called once, by the client, and its result was answered.
    assert [turn["items"] for turn in seen["turns"][1:]] == [["function_call"], ["message"]]
    assert all(turn["status"] in ("completed", "incomplete") for turn in seen["turns"])
    (city,) = seen["calls"]
    assert "paris" in city.lower()
    called = [item for item in seen["history"] if item["type"] == "function_call"]
    assert [item["output"] for item in called] == [f"sunny in {city}, 21 degrees"]
    assert seen["history"][-1]["role"] == "assistant"
    assert seen["history"][-1]["text"].strip()
