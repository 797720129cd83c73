"""A roll-out in a whole server with real models: a new engine that gets slow is withdrawn by
itself, and every caller has every answer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect

from app.config import load_settings
from tests.integration.test_bad_input import event, running, until
from tests.support.server_env import BRIEF

pytestmark = pytest.mark.integration

QUESTION = event(
    "conversation.item.create",
    item={
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "Why is the sky blue?"}],
    },
)
SHORT = event("response.create", response={"output_modalities": ["text"], "max_output_tokens": 4})
NUM_CALLERS = 6


@asynccontextmanager
async def slowed(pid: int) -> AsyncIterator[None]:
    """The process runs for a twentieth of the time."""

    async def hold_up() -> None:
        while True:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.95)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.05)

    holding = asyncio.create_task(hold_up())
    try:
        yield
    finally:
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        os.kill(pid, signal.SIGCONT)


async def call(url: str) -> list[dict[str, Any]]:
    """A short conversation: two answers."""
    async with connect(url) as socket:
        await until(socket, "session.created")
        found = []
        for _ in range(2):
            await socket.send(QUESTION)
            await socket.send(SHORT)
            found.append((await until(socket, "response.done"))["response"])
        return found


@pytest.mark.timeout(180)
async def test_a_slow_canary_is_withdrawn_from_a_running_server(
    tmp_path: Path, llm_model_path: Path, asr_model_dir: Path, tts_voice_path: Path
) -> None:
    (tmp_path / "native").symlink_to(load_settings().home / "native")  # compiled once
    async with running(
        home=tmp_path,
        llm_model=str(llm_model_path),
        asr_model=str(asr_model_dir),
        tts_model=str(tts_voice_path),
        llm_standby=BRIEF["PARLEY_LLM_STANDBY"],
        canary="num_threads=1",
        canary_share=0.5,
        canary_patience_ms=250,
        max_sessions_per_minute=10_000,
    ) as server:
        rollout = server.services.rollout
        assert rollout is not None and rollout.is_running
        answers: list[dict[str, Any]] = []

        async def keep_calling() -> None:
            while rollout.is_running:
                answers.extend(await call(server.url))

        assert rollout.canary._process is not None
        begun_s = time.monotonic()
        pid = rollout.canary._process.pid
        async with slowed(pid), asyncio.timeout(120), asyncio.TaskGroup() as callers:
            for _ in range(NUM_CALLERS):
                callers.create_task(keep_calling())
        took_s = time.monotonic() - begun_s
        # Whoever calls now is answered by the old engine.
        answers += await call(server.url)
        base = server.url.replace("ws", "http", 1).removesuffix("/v1/realtime")
        async with httpx.AsyncClient(base_url=base) as client:
            turns = (await client.get("/v1/traces?limit=1000")).json()["data"]
            metrics = (await client.get("/metrics")).text
    assert "turns late or failed" in rollout.withdrawn_because
    for answer in answers:
        assert answer["status"] in ("completed", "incomplete"), answer
        assert answer["output"][0]["content"][0]["text"]
    assert "parley_canary_withdrawn 1.0" in metrics
    assert turns[0]["facts"]["engine"] == "stable"
    lanes = Counter(turn["facts"]["engine"] for turn in turns)
    left = Counter(
        turn["facts"].get("engine_fallback")
        for turn in turns
        if turn["facts"]["engine"] == "canary"
    )
    assert left["no_answer"] >= 15, left
    assert {turn["outcome"] for turn in turns} <= {"answered", "incomplete"}
    assert json.loads((tmp_path / "rollout.json").read_text())
    print(
        f"withdrawn after {took_s:.1f} s: {rollout.withdrawn_because}; {len(answers)} answers, "
        f"none lost; turns {dict(lanes)}, of the new engine left {dict(left)}"
    )
