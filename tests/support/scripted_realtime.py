"""A small Realtime server that follows a script, for tests of the clients that speak to one.

It speaks the protocol over a real socket and serves the files of the page under a strict content
security policy. What it says is up to the test: this is never on a user's path.
"""

from __future__ import annotations

import base64
import json
import mimetypes
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol

Event = dict[str, Any]
RATE = 24_000
CSP = (
    "default-src 'self'; connect-src 'self' ws: wss:; img-src 'self' data:; object-src 'none'; "
    "base-uri 'none'; frame-ancestors 'none'"
)


def tone(seconds: float, *, hz: float = 440.0, level: float = 0.3) -> bytes:
    """A sine as PCM16 at 24 kHz, from its very first sample on nearly at full level."""
    at = np.arange(round(seconds * RATE)) / RATE
    wave = level * np.cos(2 * np.pi * hz * at)
    return (wave * 32767).astype("<i2").tobytes()


def trace(response_id: str, **fields: Any) -> Event:
    """A turn trace with stages that add up to 600 ms."""
    stages = {
        "endpoint": 310.0,
        "asr": 95.0,
        "queue": 2.0,
        "prefill": 38.0,
        "decode": 84.0,
        "tts": 66.0,
        "send": 5.0,
    }
    turn = {
        "turn_id": "turn_1",
        "session_id": "sess_1",
        "response_id": response_id,
        "outcome": "answered",
        "transcript": "",
        "reply": "",
        "voice_to_voice_ms": sum(stages.values()),
        "stages_ms": stages,
        "instants_ms": {},
        "facts": {"prompt_tokens": 60, "cached_tokens": 40, "completion_tokens": 12},
    }
    return {"type": "parley.turn.trace", "turn": turn | fields}


@dataclass
class Call:
    """One connection as the script sees it. ``received`` has all events but the audio."""

    socket: ServerConnection
    received: list[Event] = field(default_factory=list)
    num_audio_samples: int = 0
    loud_samples: int = 0
    num_items: int = 0
    speaking: dict[str, str] = field(default_factory=dict)

    async def send(self, type_: str, **fields: Any) -> None:
        """Sends an event."""
        await self.send_event({"type": type_, "event_id": "event_x", **fields})

    async def send_event(self, event: Event) -> None:
        """Sends an event that is there already."""
        await self.socket.send(json.dumps(event))

    async def hear(self, transcript: str, item_id: str) -> None:
        """The caller's utterance ends and is transcribed."""
        await self.send("input_audio_buffer.speech_stopped", item_id=item_id, audio_end_ms=0)
        await self.send("input_audio_buffer.committed", item_id=item_id, previous_item_id=None)
        await self.send(
            "conversation.item.input_audio_transcription.completed",
            item_id=item_id,
            content_index=0,
            transcript=transcript,
        )

    async def begin_reply(self, response_id: str, item_id: str) -> None:
        """A response exists now."""
        await self.send("response.created", response={"id": response_id, "status": "in_progress"})
        await self.send(
            "response.output_item.added",
            response_id=response_id,
            output_index=0,
            item={"id": item_id, "type": "message", "role": "assistant", "content": []},
        )

    async def say(self, text: str, audio: bytes, response_id: str, item_id: str) -> None:
        """A piece of the reply."""
        self.speaking[response_id] = item_id
        ids = {
            "response_id": response_id,
            "item_id": item_id,
            "output_index": 0,
            "content_index": 0,
        }
        await self.send("response.output_audio_transcript.delta", delta=text, **ids)
        delta = base64.b64encode(audio).decode()
        await self.send("response.output_audio.delta", delta=delta, **ids)

    async def end_reply(self, response_id: str, status: str = "completed", **fields: Any) -> None:
        """The response is over."""
        if item_id := self.speaking.pop(response_id, None):
            await self.send("response.output_audio.done", response_id=response_id, item_id=item_id)
        await self.send("response.done", response={"id": response_id, "status": status, **fields})

    async def answer(self, transcript: str, reply: str, audio: bytes, number: int = 1) -> None:
        """A whole turn."""
        response_id, item_id = f"resp_{number}", f"item_reply_{number}"
        await self.hear(transcript, f"item_{number}")
        await self.begin_reply(response_id, item_id)
        await self.say(reply, audio, response_id, item_id)
        await self.end_reply(response_id)
        await self.send_event(trace(response_id, transcript=transcript, reply=reply))


Script = Callable[[Call, Event], Awaitable[None]]


async def silent(call: Call, event: Event) -> None:
    """A server that never says anything."""


@dataclass
class ScriptedServer:
    """A running server. ``script`` sees each event after it was noted in its call."""

    server: Server
    calls: list[Call]

    @property
    def url(self) -> str:
        """Its base URL."""
        port = next(iter(self.server.sockets)).getsockname()[1]
        return f"http://127.0.0.1:{port}"


@asynccontextmanager
async def scripted_server(
    script: Script = silent,
    *,
    pages: Path | None = None,
    api_key: str | None = None,
    port: int = 0,
    refuses_updates: bool = False,
) -> AsyncIterator[ScriptedServer]:
    """Serves the script, and the files under ``pages`` at the root."""
    calls: list[Call] = []

    async def talk(socket: ServerConnection) -> None:
        call = Call(socket)
        calls.append(call)
        try:
            await call.send("session.created", session={"id": "sess_1", "type": "realtime"})
            async for message in socket:
                event = json.loads(message)
                if event["type"] == "input_audio_buffer.append":
                    pcm = np.frombuffer(base64.b64decode(event["audio"]), dtype="<i2")
                    call.num_audio_samples += pcm.size
                    call.loud_samples += int(np.count_nonzero(np.abs(pcm.astype(int)) > 300))
                else:
                    call.received.append(event)
                if event["type"] == "session.update" and refuses_updates:
                    await call.send("error", error={"message": "unknown field session.parley"})
                elif event["type"] == "session.update":
                    await call.send("session.updated", session=event["session"])
                await script(call, event)
        except ConnectionClosed:
            pass

    def screen(socket: ServerConnection, request: Request) -> Response | None:
        path = request.path.partition("?")[0]
        if path == "/v1/realtime" and "Upgrade" in request.headers:
            return None if _may_enter(request, api_key) else _plain(HTTPStatus.UNAUTHORIZED)
        if path == "/v1/traces":
            allowed = _may_enter(request, api_key)
            return _plain(HTTPStatus.OK if allowed else HTTPStatus.UNAUTHORIZED)
        return _file(pages, path)

    async with serve(
        talk,
        "127.0.0.1",
        port,
        process_request=screen,
        select_subprotocol=_choose,
        compression=None,
    ) as server:
        yield ScriptedServer(server, calls)


def _choose(socket: ServerConnection, offered: Sequence[Subprotocol]) -> Subprotocol | None:
    """Browsers offer `realtime`, other clients nothing."""
    return Subprotocol("realtime") if "realtime" in offered else None


def _may_enter(request: Request, api_key: str | None) -> bool:
    if api_key is None:
        return True
    offered = request.headers.get("Sec-WebSocket-Protocol", "")
    bearer = request.headers.get("Authorization", "")
    return f"openai-insecure-api-key.{api_key}" in offered or bearer == f"Bearer {api_key}"


def _plain(status: HTTPStatus) -> Response:
    body = status.phrase.encode()
    headers = Headers({"Content-Type": "text/plain", "Content-Length": str(len(body))})
    return Response(status.value, status.phrase, headers, body)


def _file(pages: Path | None, path: str) -> Response:
    file = pages / (path.lstrip("/") or "index.html") if pages else None
    if file is None or not file.is_file():
        return _plain(HTTPStatus.NOT_FOUND)
    body = file.read_bytes()
    kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    headers = Headers(
        {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": CSP,
            "Cache-Control": "no-store",
        }
    )
    return Response(200, "OK", headers, body)
