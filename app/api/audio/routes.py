"""``POST /v1/audio/transcriptions`` and ``POST /v1/audio/speech``: files beside the conversations.

Both use the recogniser and the voice that callers speak with, and come behind them.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from fastapi import APIRouter, Request, Response

from app.access import peer_of
from app.api.audio.speech import SpeechAnswer
from app.api.audio.speech_request import parse_speech
from app.api.audio.transcription_request import parse_transcription
from app.api.audio.transcriptions import TranscriptionAnswer
from app.api.http.body import read_file_body, read_parsed
from app.api.http.concurrency import ConcurrencyLimiter
from app.api.model_names import Names
from app.conversation import Services

# The other fields of the form.
_FORM_BYTES = 64 * 1024
# A file comes over a line that may be slow.
_FILE_TIMEOUT_S = 60.0
_MAX_SPEECH_BYTES = 128 * 1024


def audio_router(services: Services) -> APIRouter:
    """The routes. Raise (to the app's handlers) ClientError for a bad request and UnavailableError
    when all places are taken; answers that have begun are finished."""
    settings, metrics = services.settings, services.metrics
    names = Names.of(settings, services.recognition.languages)
    places = ConcurrencyLimiter(settings.max_audio_requests, "audio")
    max_file_bytes = int(settings.max_file_mb * 1024 * 1024)
    transcribed, spoken = TranscriptionAnswer.Done(), SpeechAnswer.Done()
    metrics.gauge("audio_requests", "Files and texts that are worked on.", partial(len, places))
    for name, about, of, field in (
        ("files_transcribed", "Files that were transcribed.", transcribed, "num_files"),
        ("file_audio_seconds", "Their sound.", transcribed, "audio_s"),
        ("texts_spoken", "Texts that were read aloud.", spoken, "num_texts"),
        ("text_audio_seconds", "Their sound.", spoken, "audio_s"),
    ):
        metrics.counter(name, about, partial(getattr, of, field))
    router = APIRouter()

    def admit(request: Request) -> ExitStack:
        """A place for ``request``, if it may have one; before any of its body is read."""
        state = request.app.state
        grant = state.gatekeeper.check(request.headers)
        state.connections.check_open()
        owner = grant.limited_as(peer_of(request))
        state.rate_limits.check_session(owner)
        return places.take(owner)

    @router.post("/v1/audio/transcriptions", response_model=None)
    async def transcribe(request: Request) -> Response:
        with admit(request) as place:
            body = await read_file_body(request, max_file_bytes + _FORM_BYTES, _FILE_TIMEOUT_S)
            kind = request.headers.get("content-type", "")
            asked = parse_transcription(kind, body, names, max_file_bytes)
            return TranscriptionAnswer(services, asked, transcribed, place.pop_all())

    @router.post("/v1/audio/speech", response_model=None)
    async def speak(request: Request) -> Response:
        with admit(request) as place:
            parse = partial(parse_speech, names=names)
            asked = await read_parsed(request, _MAX_SPEECH_BYTES, parse)
            return SpeechAnswer(services, asked, spoken, place.pop_all())

    return router
