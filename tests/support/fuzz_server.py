"""A server for those who send anything at all, and a caller beside them who must not notice.

``PARLEY_FUZZ_S`` sets how long each kind of nonsense goes on (300 for a thorough run),
``PARLEY_FUZZ_SEED`` repeats one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import pytest
from fastapi import FastAPI
from websockets.asyncio.client import ClientConnection, connect

from app.api.telephony.routes import audiosocket
from app.conversation.tools import ToolBox, tool
from app.server.lifecycle import listening
from app.server.routes import create_app
from tests.support.busy import Stopwatch
from tests.support.fakes import ScriptedEngine, ScriptedRecognizer, fake_services

FUZZ_S = float(os.environ.get("PARLEY_FUZZ_S", "1"))
SEED = int(os.environ.get("PARLEY_FUZZ_SEED", "0")) or random.randrange(1, 2**31)
# A bystander's answer takes a few ms, and much longer when the loop is held up.
MAX_BYSTANDER_S = 5.0
TIMEOUT = pytest.mark.timeout(int(FUZZ_S) + 90)

CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


@dataclass(frozen=True)
class Target:
    """A running server. ``port``: AudioSocket's."""

    url: str
    app: FastAPI
    port: int


@tool
async def look() -> str:
    """Look."""
    await asyncio.sleep(0.01)
    return "nothing"


def _num_threads() -> int:
    """Without those that pools keep for some seconds of idleness, and those of aiortc's client."""
    theirs = ("AnyIO", "asyncio", "audio-decoder")
    return sum(not thread.name.startswith(theirs) for thread in threading.enumerate())


def _num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - what is counted is not a folder of files


def _our_tasks() -> set[asyncio.Task[Any]]:
    """All but those of aiortc's peer connection and its streams, which only a client has."""
    theirs = ("RTCPeerConnection", "RTCRtpSender", "RTCRtpReceiver")
    tasks = asyncio.all_tasks()
    return {task for task in tasks if not any(name in repr(task.get_coro()) for name in theirs)}


@asynccontextmanager
async def server(caplog: pytest.LogCaptureFixture, **settings: Any) -> AsyncIterator[Target]:
    """Fails if anything of ours went wrong or was left behind."""
    print(f"PARLEY_FUZZ_SEED={SEED}")
    loop, unhandled = asyncio.get_running_loop(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, context: unhandled.append(context))
    caplog.set_level(logging.WARNING)
    engine = ScriptedEngine(f"Let me see. {CALL}", "It is **this** one, I think.", CALL, "Yes. No.")
    known = {
        "port": 0,
        "audiosocket_port": 0,
        "playout_lead_ms": 60_000,
        "max_sessions": 500,
        "max_sessions_per_minute": 100_000,
        "max_messages_per_s": 100_000,
        "phone_max_calls_per_account": 500,
        "resume_window_s": 0.5,
        **settings,
    }
    words = ScriptedRecognizer(*["Well then."] * 100_000)
    services = fake_services(engine, words, tools=ToolBox([look]), **known)
    cast(Any, services.engine).is_alive = True
    app = create_app(services.settings, services)
    phones = audiosocket(app.state.phone, services.settings)
    async with phones as port, listening(app, services.settings) as url:
        assert port is not None
        await answers_in_time(url, 1)  # what is made once and kept is made now
        before = _our_tasks()
        threads, descriptors = _num_threads(), _num_descriptors()
        yield Target(url, app, port)
        # Waits for what may take a moment, and for the loop's own pool of threads.
        async with asyncio.timeout(20):
            while (  # noqa: ASYNC110 - what is waited for sets no event
                len(app.state.connections)
                or _our_tasks() - before
                or engine.num_running
                or _num_descriptors() > descriptors + 1
            ):
                await asyncio.sleep(0.02)
        assert _num_threads() <= threads
    assert unhandled == []
    # uvicorn calls a handshake that we denied an error.
    errors = [
        record
        for record in caplog.records
        if record.levelno >= logging.ERROR and "completing handshake" not in record.getMessage()
    ]
    assert not errors, errors[0].exc_text or errors[0].getMessage()


async def answers_in_time(url: str, times: int) -> float:
    """A well-behaved caller asks ``times`` and again; the longest that it waited, in seconds."""
    longest_s = 0.0
    async with connect(url.replace("http", "ws") + "/v1/realtime") as socket:
        await _until(socket, "session.created")
        for _ in range(times):
            watch = Stopwatch()
            content = [{"type": "input_text", "text": "Hi"}]
            item = {"type": "message", "role": "user", "content": content}
            await socket.send(json.dumps({"type": "conversation.item.create", "item": item}))
            response = {"output_modalities": ["text"], "tool_choice": "none"}
            await socket.send(json.dumps({"type": "response.create", "response": response}))
            done = await _until(socket, "response.done")
            assert done["response"]["status"] == "completed", done
            longest_s = max(longest_s, watch.took_s())
            await asyncio.sleep(0.05)
    return longest_s


async def _until(socket: ClientConnection, kind: str) -> dict[str, Any]:
    while True:
        event: dict[str, Any] = json.loads(await socket.recv())
        assert event["type"] != "error", event
        if event["type"] == kind:
            return event


async def bystander(url: str, ends_s: float) -> float:
    """Asks until ``ends_s`` of the monotonic clock; the longest wait, in seconds."""
    longest_s = 0.0
    while time.monotonic() < ends_s:
        longest_s = max(longest_s, await answers_in_time(url, 5))
    return longest_s
