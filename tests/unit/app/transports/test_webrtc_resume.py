"""A call that is resumed finds what the model has read of it still there (a real engine)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from app.transports.webrtc import call as call_module
from llm_core import EngineClient, EngineConfig
from tests.support.rtc_client import RtcClient, until
from tests.support.rtc_server import serving
from tests.support.tiny_model import write_tiny_gguf
from tests.unit.app.transports.test_webrtc_robust import cut_line

pytestmark = pytest.mark.timeout(90)


async def answer(client: RtcClient, text: str) -> dict[str, Any]:
    """The ``usage`` of a written answer to ``text``."""
    part = {"type": "input_text", "text": text}
    item = {"type": "message", "role": "user", "content": [part]}
    client.send("conversation.item.create", item=item)
    client.send(
        "response.create", response={"output_modalities": ["text"], "max_output_tokens": 16}
    )
    done = await client.until("response.done")
    assert done["response"]["status"] in ("completed", "incomplete"), done
    usage: dict[str, Any] = done["response"]["usage"]
    return usage


async def test_what_was_read_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_module, "LOST_S", 0.4)
    model = write_tiny_gguf(tmp_path / "tiny.gguf", context_len=2_048)
    engine = await EngineClient.start(EngineConfig(model_path=str(model), max_sequences=4))
    try:
        async with (
            serving(tmp_path, engine=engine, resume_window_s=20.0) as server,
            server.client() as first,
            server.client() as other,
            server.client() as second,
        ):
            await first.connect()
            await first.until("session.created")
            before = await answer(first, "hello, tell me of the user")
            cut_line(first)
            audio = server.the_audio()
            await until(lambda: not audio.is_attached)
            # Meanwhile somebody else has a conversation.
            await other.connect()
            await other.until("session.created")
            await answer(other, "something else altogether")

            await second.connect(f"?resume={first.call_id}")
            await second.until("session.created")
            after = await answer(second, "in the user")
            read = before["input_tokens"] + before["output_tokens"]
            cached = after["input_token_details"]["cached_tokens"]
            assert after["input_tokens"] > read
            # Whole blocks are kept: the last one of the old conversation was not full.
            assert cached >= read - 32, (before, after)
            assert cached > 0.7 * after["input_tokens"]
            print(f"{cached} of {after['input_tokens']} tokens cached; {read} were known")
    finally:
        await asyncio.wait_for(engine.close(), 20)
