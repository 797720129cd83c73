"""The body of ``POST /v1/audio/speech``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from app.api.model_names import Names
from app.api.models import UnknownModelError
from app.api.validation import VoiceName, WireModel, null_is, only, parse_body
from app.errors import ClientError
from audio.files import FileFormat
from audio.tts import MAX_SPEED, MIN_SPEED

MAX_CHARS = 4096


class SpeechRequest(WireModel):
    """A text to read aloud. ``speed``: a factor on the speaking rate."""

    model: str
    input: Annotated[str, StringConstraints(min_length=1, max_length=MAX_CHARS)]
    voice: VoiceName
    response_format: Annotated[FileFormat, null_is("mp3")] = "mp3"
    speed: Annotated[float, Field(ge=MIN_SPEED, le=MAX_SPEED), null_is(1.0)] = 1.0
    instructions: Annotated[
        str | None, only(None, "", what="The voice cannot be told how to speak.")
    ] = None
    stream_format: Annotated[
        str | None, only(None, "audio", what="Only 'audio': the file is sent while it is made.")
    ] = None


def parse_speech(body: bytes, names: Names) -> SpeechRequest:
    """Raises ClientError, naming the parameter."""
    request = parse_body(body, SpeechRequest)
    if not names.is_speech_model(request.model):
        raise UnknownModelError(
            f"The model {request.model[:100]!r} does not speak here. This server has "
            f"{names.voice!r}, for which OpenAI's names ('tts-1') stand as well.",
            param="model",
        )
    if not names.is_reader(request.voice):
        raise ClientError(
            f"Invalid value for 'voice': {request.voice[:100]!r}. This server has "
            f"{names.voice!r}, for which OpenAI's names ('alloy') stand as well.",
            code="invalid_value",
            param="voice",
        )
    return request
