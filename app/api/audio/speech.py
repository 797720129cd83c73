"""``POST /v1/audio/speech``: a file that is sent while it is spoken."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from app.api.audio.speech_request import SpeechRequest
from app.api.http.cancel_on_disconnect import Answer
from app.api.http.errors import error_response
from app.clock import MonotonicClock
from app.conversation import Services, synthesize_text
from app.errors import ClientError, SynthesisError
from audio.codecs import PCM16_24K
from audio.files import MEDIA_TYPES, make_encoder

logger = logging.getLogger(__name__)

# A client that reads nothing for so long has a place that somebody else could have.
_UNREAD_S = 30.0

_NOTHING_TO_SAY = ClientError(
    "Invalid value for 'input': there is nothing in it that the voice could say.",
    code="invalid_value",
    param="input",
)


class SpeechAnswer(Answer):
    """Reads the text aloud and sends the sound. Status and headers wait for the first of it, so
    that an error before it, and a text without any, have a status of their own; after one behind it
    the file has no end."""

    @dataclass(slots=True)
    class Done:
        """What was done since the start."""

        num_texts: int = 0
        audio_s: float = 0.0

    def __init__(
        self, services: Services, asked: SpeechRequest, done: Done, place: ExitStack
    ) -> None:
        super().__init__(place)
        self._services = services
        self._asked = asked
        self._done = done

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = self._asked
        encoder = make_encoder(asked.response_format, PCM16_24K.rate)
        has_begun = False
        sounds = synthesize_text(self._services, MonotonicClock(), asked.input, speed=asked.speed)
        try:
            async with aclosing(sounds):
                async for samples in sounds:
                    if not has_begun and not len(samples):
                        continue
                    data = await asyncio.to_thread(encoder.encode, samples)
                    if not has_begun:
                        has_begun = True
                        await send(self._start())
                    self._done.audio_s += len(samples) / PCM16_24K.rate
                    await _sent(send, data)
            if not has_begun:
                await error_response(_NOTHING_TO_SAY)(scope, receive, send)
                return
            await _sent(send, await asyncio.to_thread(encoder.finish), is_last=True)
            self._done.num_texts += 1
        except SynthesisError as error:
            logger.error("a text could not be read aloud: %s", error.message)
            if not has_begun:
                await error_response(error)(scope, receive, send)
        except TimeoutError:
            logger.info("a client does not read what it asked for")

    def _start(self) -> dict[str, Any]:
        media_type = MEDIA_TYPES[self._asked.response_format].encode()
        headers = [(b"content-type", media_type), (b"cache-control", b"no-store")]
        return {"type": "http.response.start", "status": 200, "headers": headers}


async def _sent(send: Send, data: bytes, *, is_last: bool = False) -> None:
    """Raises TimeoutError when the client does not read."""
    if data or is_last:
        async with asyncio.timeout(_UNREAD_S):
            await send({"type": "http.response.body", "body": data, "more_body": not is_last})
