"""A session with stand-ins for the models, and the hands to drive it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from app.conversation.events import SessionEvent, Sink
from app.conversation.session import Session
from app.conversation.session_config import SessionConfig
from llm_core import ChatMessage
from tests.support.fakes import (
    ManualClock,
    PacedEngine,
    PacedExecutor,
    Recorder,
    ScriptedEngine,
    ScriptedRecognizer,
    ToneSynthesizer,
    fake_services,
    settle,
    silence,
    voice,
)


class Call:
    """A session and the hands to drive it."""

    def __init__(self, engine: ScriptedEngine, *texts: str, **changes: Any) -> None:
        settings = changes.pop("settings", {})
        tools = changes.pop("server", None)
        clock = changes.pop("clock", None)
        self.engine = engine
        self.recognizer = ScriptedRecognizer(*texts)
        self.synthesizer = ToneSynthesizer()
        self.clock = engine.clock if isinstance(engine, PacedEngine) else clock or ManualClock()
        self.paced = PacedExecutor(self.clock) if isinstance(engine, PacedEngine) else None
        self.services = fake_services(
            engine, self.recognizer, self.synthesizer, tools, self.paced, **settings
        )
        self.out = Recorder()
        self.sink: Sink = self.out
        """Where the events go; a test may put something of its own in between, or in its place."""
        config = SessionConfig(**{"instructions": "Be brief.", "send_traces": True, **changes})
        self.session = Session(self.services, config, self._take, self.clock)

    async def _take(self, event: SessionEvent) -> None:
        await self.sink(event)

    async def hear(self, payload: bytes) -> None:
        """Audio at speaking pace, in chunks of 20 ms."""
        for start in range(0, len(payload), 960):
            await self.clock.advance(0.02)
            await self.session.append_audio(payload[start : start + 960], self.clock.now_ns())
            await settle(5)

    async def ask(self, speech_s: float = 0.6, pause_s: float = 0.7) -> None:
        await self.hear(voice(speech_s) + silence(pause_s))

    def messages(self) -> list[ChatMessage]:
        return self.session._history.messages("")


@asynccontextmanager
async def call(engine: ScriptedEngine, *texts: str, **changes: Any) -> AsyncIterator[Call]:
    before = asyncio.all_tasks()
    conversation = Call(engine, *texts, **changes)
    watch = asyncio.create_task(conversation.session.run())
    try:
        yield conversation
    finally:
        watch.cancel()
        await conversation.session.close()
        if conversation.paced is not None:
            await conversation.paced.close()
        await settle()
        assert asyncio.all_tasks() - before - {watch} == set(), "tasks are left over"
        assert engine.num_running == 0, "a generation is left over"
