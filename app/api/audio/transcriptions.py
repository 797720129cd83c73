"""``POST /v1/audio/transcriptions``: whole, or piece by piece as server-sent events."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, replace

import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send

from app.api.audio.transcription_output import rendered, text_of, usage_of
from app.api.audio.transcription_request import TranscriptionRequest
from app.api.http.cancel_on_disconnect import Answer
from app.api.http.errors import error_body, error_response
from app.api.http.sse import sse_event, sse_start
from app.conversation import Services, TranscribedPiece, transcribe_recording
from app.errors import AudioInputError, ParleyError, RecognitionError
from audio.errors import AudioFormatError
from audio.files import read_speech
from audio.frame import SPEECH_RATE, Samples

logger = logging.getLogger(__name__)


class TranscriptionAnswer(Answer):
    """Decodes the file, has it transcribed and sends what was said."""

    @dataclass(slots=True)
    class Done:
        """What was done since the start."""

        num_files: int = 0
        audio_s: float = 0.0

    def __init__(
        self, services: Services, asked: TranscriptionRequest, done: Done, place: ExitStack
    ) -> None:
        super().__init__(place)
        self._services = services
        self._asked = asked
        self._done = done

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            samples = await self._decoded()
            self._asked = replace(self._asked, content=b"")
            async with aclosing(self._pieces(samples)) as pieces:
                if self._asked.stream:
                    await self._stream(pieces, send)
                else:
                    body, media_type = rendered(self._asked, [piece async for piece in pieces])
                    await Response(body, media_type=media_type)(scope, receive, send)
        except (AudioInputError, RecognitionError) as error:
            _log(error)
            await error_response(error)(scope, receive, send)
            return
        self._done.num_files += 1
        self._done.audio_s += len(samples) / SPEECH_RATE

    async def _decoded(self) -> Samples:
        """Raises AudioInputError."""
        is_left = threading.Event()
        try:
            return await asyncio.to_thread(
                read_speech,
                self._asked.content,
                max_s=self._services.settings.max_file_s,
                is_wanted=lambda: not is_left.is_set(),
            )
        except AudioFormatError as error:
            raise AudioInputError(
                f"Invalid 'file': {error.message}.", code="invalid_file", param="file"
            ) from error
        finally:
            is_left.set()

    def _pieces(self, samples: Samples) -> AsyncGenerator[TranscribedPiece, None]:
        asked, services = self._asked, self._services
        return transcribe_recording(
            services.recognition,
            services.vad,
            samples,
            prompt=asked.prompt,
            language=asked.language,
            wants_words=asked.wants_words or asked.wants_lines,
        )

    async def _stream(self, pieces: AsyncIterator[TranscribedPiece], send: Send) -> None:
        await send(sse_start())
        told: list[TranscribedPiece] = []
        text = ""
        try:
            async for piece in pieces:
                told.append(piece)
                whole = text_of(told)
                new, text = whole[len(text) :], whole
                if new:
                    delta = {"type": "transcript.text.delta", "delta": new}
                    await send(sse_event(msgspec.json.encode(delta)))
        except RecognitionError as error:
            _log(error)
            await send(sse_event(msgspec.json.encode(error_body(error)), is_last=True))
            return
        done = {"type": "transcript.text.done", "text": text}
        done["usage"] = usage_of(told[-1].end_s if told else 0.0)  # type: ignore[assignment]
        await send(sse_event(msgspec.json.encode(done), is_last=True))


def _log(error: ParleyError) -> None:
    logger.info("a file was not transcribed", extra={"code": error.code})
