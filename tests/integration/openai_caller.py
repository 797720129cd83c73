"""A caller who uses the stock `openai` client, and checks every event it gets."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from openai import AsyncOpenAI
from openai.resources.realtime.realtime import AsyncRealtimeConnection
from websockets.exceptions import ConnectionClosed

from tests.support.openai_events import check_server_event

RATE = 24_000
CHUNK_MS = 40
Event = dict[str, Any]


def pause(seconds: float) -> bytes:
    """Digital silence."""
    return bytes(2 * int(seconds * RATE))


def words(text: str) -> str:
    """For comparing transcripts."""
    return " ".join(re.sub(r"[^a-z0-9' ]", " ", text.lower()).split())


class Caller:
    """Reads all the time, as a real client does. Events are looked for in order of arrival."""

    def __init__(self, connection: AsyncRealtimeConnection) -> None:
        self.connection = connection
        self.events: list[Event] = []
        self._num_seen = 0
        self._arrived = asyncio.Condition()

    async def read(self) -> None:
        try:
            while True:
                event: Event = json.loads(await self.connection.recv_bytes())
                check_server_event(event)
                async with self._arrived:
                    self.events.append(event)
                    self._arrived.notify_all()
        except ConnectionClosed:
            return

    async def until(self, kind: str, *, allow_errors: bool = False) -> Event:
        """The next event of type ``kind`` after the last one that was waited for."""
        async with self._arrived:
            while True:
                while self._num_seen < len(self.events):
                    event = self.events[self._num_seen]
                    self._num_seen += 1
                    if event["type"] == kind:
                        return event
                    assert allow_errors or event["type"] != "error", event
                await self._arrived.wait()

    def of(self, kind: str, **fields: Any) -> list[Event]:
        """All events so far of type ``kind`` with these fields."""
        return [
            event
            for event in self.events
            if event["type"] == kind and all(event.get(k) == v for k, v in fields.items())
        ]

    async def say(self, pcm: bytes, *, pace: float = 1.0) -> None:
        """Send audio ``pace`` times as fast as it is spoken."""
        chunk_len = 2 * RATE * CHUNK_MS // 1000
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        for number, start in enumerate(range(0, len(pcm), chunk_len)):
            due_s = started_s + number * CHUNK_MS / 1000 / pace
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            audio = base64.b64encode(pcm[start : start + chunk_len]).decode()
            await self.connection.input_audio_buffer.append(audio=audio)

    async def type(self, text: str) -> None:
        """Add a typed message and wait until it is in the conversation."""
        await self.connection.conversation.item.create(
            item={
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": text}],
            }
        )
        await self.until("conversation.item.done")


@asynccontextmanager
async def calling(base_url: str, model: str = "gpt-realtime") -> AsyncIterator[Caller]:
    """A connected caller, past session.created."""
    async with (
        AsyncOpenAI(api_key="any", base_url=f"{base_url}/v1") as client,
        client.realtime.connect(model=model) as connection,
    ):
        caller = Caller(connection)
        reading = asyncio.create_task(caller.read())
        try:
            await caller.until("session.created")
            yield caller
        finally:
            await connection.close()
            await reading
