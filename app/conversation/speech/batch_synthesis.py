"""Batch synthesis: a text read aloud, with a lower priority than any turn."""

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


async def synthesize_text(
    services: Services, clock: Clock, text: str, *, speed: float
) -> AsyncGenerator[Samples, None]:
    """Synthesize ``text`` as responses are: Markdown stripped, numbers and symbols normalised.

    Yields float32 [n] at the session's default rate (24 kHz): at least one array, all empty if
    there is nothing to say. Raises SynthesisError.
    """
    config = SessionConfig(instructions="", speed=speed)
    stream = TtsStream(services, config, clock, None)
    rate = config.output_format.rate
    made_len, begun_ns = 0, clock.now_ns()
    for clause in await asyncio.to_thread(_clauses, text):
        heard_s = (clock.now_ns() - begun_ns) / 1e9
        async with aclosing(
            stream.synthesize_clause(clause, max(0.0, made_len / rate - heard_s))
        ) as sounds:
            async for sound in sounds:
                if not made_len:
                    begun_ns = clock.now_ns()
                made_len += len(sound.samples)
                if len(sound.samples):
                    yield sound.samples
    yield stream.flush()


def _clauses(text: str) -> list[str]:
    spoken, chunker = SpokenText(), ClauseChunker()
    return [*chunker.feed(spoken.feed(text)), *chunker.feed(spoken.flush()), *chunker.flush()]
