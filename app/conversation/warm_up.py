"""One whole turn that nobody hears, so that the first caller meets nothing for the first time.

Loading a model runs it once; what lies between the models (first calls of numpy, of the resampler,
of compiled patterns) costs the event loop some 25 ms on the first turn, and then never again.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np

from app.clock import MonotonicClock
from app.conversation.events import Response, ResponseDone, SessionEvent
from app.conversation.response.spec import ResponseRequest
from app.conversation.services import Services
from app.conversation.session import Session
from app.conversation.session_config import SessionConfig
from app.errors import ServiceError
from app.logging_setup import session_id
from app.observe import TraceStore, TraceWriter
from audio.codecs import PCM16_24K, encode


async def warm_up(services: Services) -> None:
    """Run the turn; it leaves no trace. Raises ServiceError when it fails, for so would all."""
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[Response] = loop.create_future()

    async def sink(event: SessionEvent) -> None:
        if isinstance(event, ResponseDone):
            answered.set_result(event.response)

    # Its queue is never emptied: the turn is forgotten with it.
    unseen = replace(services, traces=TraceWriter(TraceStore.in_memory(1)))
    config = SessionConfig(services.settings.instructions, turn_detection=None)
    session = Session(unseen, config, sink)
    named = session_id.set("warm-up")  # else the first turn in the log looks like a caller's
    noise = np.random.default_rng(0).normal(0.0, 0.01, PCM16_24K.rate // 2).astype(np.float32)
    try:
        await session.append_audio(encode(noise, PCM16_24K), MonotonicClock().now_ns())
        await session.commit_audio()
        await session.create_response(ResponseRequest(max_output_tokens=4))
        response = await answered
    finally:
        await session.close()
        session_id.reset(named)
    if response.status == "failed":
        raise ServiceError(f"the first turn failed: {response.error_message}")
