"""Whatever a client sends: a clear error, the same session still answers, and nothing is left."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from fastapi import FastAPI
from websockets.asyncio.client import ClientConnection, connect

from app.config import Settings, load_settings
from app.conversation.services import Services
from app.server.lifecycle import build_services, create_app, listening
from tests.integration.openai_caller import pause
from tests.support.openai_events import check_server_event

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("llm_model_path", "asr_model_dir", "tts_voice_path"),
]


@dataclass
class Running:
    """A server in this process, so that what is left behind can be counted."""

    url: str
    app: FastAPI
    services: Services

    async def counts(self) -> dict[str, int]:
        """Tasks, threads, and the engine's sequences, with nobody connected."""
        await eventually(lambda: not len(self.app.state.connections), "sessions end")
        # What serves a socket ends a moment after the socket has.
        await eventually(lambda: len(_serving_tasks()) == 0, "the tasks of the sockets end")
        stats = await self.services.engine.stats()
        return {
            "tasks": len(asyncio.all_tasks()),
            "threads": _num_threads(),
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "free_blocks": stats.num_free_blocks,
        }


def _serving_tasks() -> list[asyncio.Task[Any]]:
    """uvicorn's task of each connection, and the client's own."""
    names = ("run_asgi", "keepalive")
    return [t for t in asyncio.all_tasks() if any(name in repr(t.get_coro()) for name in names)]


def _num_threads() -> int:
    return sum(not thread.name.startswith("AnyIO") for thread in threading.enumerate())


async def eventually(condition: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(15):
        while not condition():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.02)
    assert condition(), what


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[Running]:
    chosen: Settings = load_settings(port=0, host="127.0.0.1", trace_db=False, **settings)
    async with build_services(chosen) as services:
        app = create_app(chosen, services)
        async with listening(app, chosen) as url:
            yield Running(url.replace("http", "ws") + "/v1/realtime", app, services)


@asynccontextmanager
async def client(url: str) -> AsyncIterator[ClientConnection]:
    async with connect(url, max_size=None) as socket:
        assert (await received(socket))["type"] == "session.created"
        yield socket


async def received(socket: ClientConnection) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(await socket.recv())
    check_server_event(event)
    return event


async def until(socket: ClientConnection, kind: str) -> dict[str, Any]:
    while (event := await received(socket))["type"] != kind:
        assert event["type"] != "error", event
    return event


async def answers(socket: ClientConnection) -> None:
    """The session still does its work."""
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    await socket.send(json.dumps({"type": "conversation.item.create", "item": item}))
    response = {"output_modalities": ["text"], "max_output_tokens": 4}
    await socket.send(json.dumps({"type": "response.create", "response": response}))
    done = await until(socket, "response.done")
    assert done["response"]["status"] in ("completed", "incomplete")
    assert done["response"]["output"][0]["content"][0]["text"]


def append(audio: str, **more: Any) -> str:
    return json.dumps({"type": "input_audio_buffer.append", "audio": audio, **more})


def event(kind: str, **fields: Any) -> str:
    return json.dumps({"type": kind, **fields})


BAD: dict[str, tuple[str | bytes, str, str | None]] = {
    "malformed JSON": ('{"type": "response.create"', "invalid_json", None),
    "not an object": ('["response.create"]', "invalid_json", None),
    "nothing": ("", "invalid_json", None),
    "binary": (b"\x00\x01\x02\x03", "invalid_message", None),
    "no type": ('{"audio": "AAAA"}', "missing_required_parameter", "type"),
    "unknown event": (event("conversation.paint"), "invalid_value", "type"),
    "missing field": (event("conversation.item.delete"), "missing_required_parameter", "item_id"),
    "wrong type": (append(7), "invalid_type", "audio"),  # type: ignore[arg-type]
    "unknown field": (append("AAAA", pace=2), "unknown_parameter", "pace"),
    "too much audio": (append("A" * 15_728_644), "string_above_max_length", "audio"),
    "15 MB of something else": (
        event("session.update", session={"tools": [0] * 5_000_000}),
        "message_too_large",
        None,
    ),
    "bad base64": (append("not base64!!"), "invalid_value", "audio"),
    "base64 cut short": (append("AAA"), "invalid_value", "audio"),
    "no audio": (append(""), "invalid_value", "audio"),
    "odd number of bytes": (
        append(base64.b64encode(bytes(4801)).decode()),
        "invalid_audio",
        "audio",
    ),
    "empty commit": (event("input_audio_buffer.commit"), "input_audio_buffer_commit_empty", None),
    "nothing to cancel": (event("response.cancel"), "response_cancel_not_active", None),
    "unknown item": (
        event("conversation.item.retrieve", item_id="item_x"),
        "item_retrieve_invalid_item_id",
        "item_id",
    ),
    "tools": (
        event("session.update", session={"tools": [{"type": "mcp", "server_label": "s"}]}),
        "unsupported_value",
        "session.tools[0].type",
    ),
    "wrong rate": (
        event(
            "session.update",
            session={"audio": {"input": {"format": {"type": "audio/pcm", "rate": 44100}}}},
        ),
        "unsupported_value",
        "session.audio.input.format.rate",
    ),
    "deep nesting": ("[" * 500_000, "invalid_json", None),
}


@pytest.mark.timeout(240)
async def test_bad_input_is_answered_and_leaves_nothing() -> None:
    async with running() as server:
        async with client(server.url) as socket:
            await answers(socket)
        before = await server.counts()

        async with client(server.url) as socket:
            for name, (message, code, param) in BAD.items():
                await socket.send(message)
                error = (await received(socket))["error"]
                assert (error["code"], error["param"]) == (code, param), name
                assert error["type"] == "invalid_request_error", name
                assert 10 < len(error["message"]) < 1000, name
                await answers(socket)
        assert await server.counts() == before

        # Ten minutes of silence: no speech, no turn, and a buffer that does not grow.
        async with client(server.url) as socket:
            for _ in range(10):
                await socket.send(append(base64.b64encode(pause(60)).decode()))
            await answers(socket)
        assert await server.counts() == before

        # A client that vanishes in the middle of an answer, with speech in the buffer.
        socket = await connect(server.url)
        await until(socket, "session.created")
        await socket.send(append(base64.b64encode(pause(1)).decode()))
        item = {"type": "message", "role": "user", "content": []}
        item["content"] = [{"type": "input_text", "text": "Tell me a very long story."}]
        await socket.send(event("conversation.item.create", item=item))
        await socket.send(event("response.create"))
        await until(socket, "response.output_audio.delta")
        socket.transport.abort()
        await socket.wait_closed()
        assert await server.counts() == before


@pytest.mark.timeout(120)
async def test_a_frame_above_the_limit_closes_only_its_own_connection(server_url: str) -> None:
    url = server_url.replace("http", "ws") + "/v1/realtime"
    async with client(url) as bystander:
        async with connect(url, close_timeout=5) as socket:
            await until(socket, "session.created")
            with pytest.raises(Exception, match="1009"):
                await socket.send("A" * (33 * 1024 * 1024))
                await until(socket, "never")
        await answers(bystander)
