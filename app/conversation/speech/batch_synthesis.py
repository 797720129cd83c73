"""A text read aloud, behind everything that callers wait for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from app.clock import Clock
from app.conversation.services import Services
from app.conversation.session_config import SessionConfig
from app.conversation.speech.tts_stream import TtsStream
from audio.frame import Samples
from audio.text import ClauseChunker, SpokenText


async def read_aloud(
    services: Services, clock: Clock, text: str, *, speed: float
) -> AsyncGenerator[Samples, None]:
    """Pieces float32 [n] of the sound of ``text``, at the session's default rate (24 kHz), as they
    are made: without Markdown, figures and signs in words, as answers are spoken.

    At least one piece comes; all are empty if there is nothing to say. Raises SynthesisError.
    """
    config = SessionConfig(instructions="", speed=speed)
    voicing = TtsStream(services, config, clock, None)
    rate = config.output_format.rate
    made_len, begun_ns = 0, clock.now_ns()
    for clause in await asyncio.to_thread(_clauses, text):
        heard_s = (clock.now_ns() - begun_ns) / 1e9
        async with aclosing(voicing.say(clause, max(0.0, made_len / rate - heard_s))) as sounds:
            async for sound in sounds:
                if not made_len:
                    begun_ns = clock.now_ns()
                made_len += len(sound.samples)
                if len(sound.samples):
                    yield sound.samples
    yield voicing.flush()


def _clauses(text: str) -> list[str]:
    spoken, chunker = SpokenText(), ClauseChunker()
    return [*chunker.feed(spoken.feed(text)), *chunker.feed(spoken.flush()), *chunker.flush()]
