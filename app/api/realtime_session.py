"""The session object of the Realtime API: validation, merging of updates, and what we make of it.

One set of models serves both ways. As an update, ``model_fields_set`` tells what the client gave;
merged onto the current state, it is the state, every field filled.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from app.api.realtime_fields import (
    MaxOutputTokens,
    Modalities,
    NoTools,
    ShortText,
    Text,
    ToolChoice,
    WireModel,
    null_is,
    only,
    unsupported,
)
from app.config import Settings
from app.conversation.session_config import SessionConfig, TurnDetection
from app.errors import ClientError
from audio.codecs import PCM16_24K, PCMA_8K, PCMU_8K, AudioFormat

# Clients send OpenAI's names without being asked, so these stand for whatever is loaded here.
OPENAI_VOICES = frozenset(
    ("alloy", "ash", "ballad", "cedar", "coral", "echo", "marin", "sage", "shimmer", "verse")
)
_OPENAI_TRANSCRIBERS = re.compile(r"whisper-1|gpt-[a-z0-9.-]*(transcribe|whisper)[a-z0-9.-]*")
_OPENAI_REALTIME = re.compile(r"gpt-[a-z0-9.-]*realtime[a-z0-9.-]*")
OWN_NAME = "parley"

_FORMATS = {"audio/pcm": PCM16_24K, "audio/pcmu": PCMU_8K, "audio/pcma": PCMA_8K}


@dataclass(frozen=True, slots=True)
class Names:
    """What is loaded, by the names that clients may use for it."""

    model: str
    transcriber: str
    voice: str

    @classmethod
    def of(cls, settings: Settings) -> Names:
        """The names in ``settings``, without the scheme of the model store."""
        return cls(
            *(
                name.rsplit(":", 1)[-1].rsplit("/", 1)[-1]
                for name in (settings.llm_model, settings.asr_model, settings.tts_model)
            )
        )

    @property
    def english_only(self) -> bool:
        """Whisper's English-only models carry it in their names."""
        return self.transcriber.endswith(".en")

    def is_model(self, name: str) -> bool:
        """``parley``, the loaded model, or an alias of OpenAI (any gpt-*realtime*)."""
        return name in (OWN_NAME, self.model) or bool(_OPENAI_REALTIME.fullmatch(name))

    def is_transcriber(self, name: str) -> bool:
        """``parley``, the loaded recogniser, or an alias of OpenAI (gpt-*transcribe*)."""
        return name in (OWN_NAME, self.transcriber) or bool(_OPENAI_TRANSCRIBERS.fullmatch(name))

    def is_voice(self, name: str) -> bool:
        """``parley``, the loaded voice, or one of OpenAI's voice names."""
        return name in (OWN_NAME, self.voice) or name in OPENAI_VOICES


class Format(WireModel):
    """``{"type": "audio/pcm", "rate": 24000}``, or ``audio/pcmu``, ``audio/pcma``."""

    type: Literal["audio/pcm", "audio/pcmu", "audio/pcma"]
    rate: Annotated[
        Literal[24000, 8000] | None,
        only(None, 24000, 8000, what="audio/pcm has rate 24000; pcmu and pcma have rate 8000."),
    ] = None

    @field_validator("rate")
    @classmethod
    def _rate_fits(cls, rate: int | None, info: ValidationInfo) -> int | None:
        kind = info.data.get("type")
        if kind is not None and rate not in (None, _FORMATS[kind].rate):
            raise unsupported(f"{kind} has rate {_FORMATS[kind].rate}.")
        return rate

    @property
    def audio_format(self) -> AudioFormat:
        """In the terms of the audio package."""
        return _FORMATS[self.type]

    def to_wire(self) -> dict[str, Any]:
        """As the API shows it: a rate only where it can differ."""
        shown: dict[str, Any] = {"type": self.type}
        return shown | {"rate": 24000} if self.type == "audio/pcm" else shown


class Transcription(WireModel):
    """How the caller's words are transcribed for the client to read."""

    model: ShortText | None = None
    language: str | None = Field(default=None, max_length=16)
    prompt: Text | None = None
    delay: Annotated[None, only(None, what="Transcription delay cannot be chosen.")] = None
    keywords: Annotated[
        list[str] | None, only(None, [], what="Keywords are not supported; use the prompt.")
    ] = None
    languages: Annotated[
        list[str] | None, only(None, [], what="Give one language in 'language'.")
    ] = None


def _server_vad(value: Any) -> Any:
    if value == "semantic_vad":
        raise unsupported("Use 'server_vad', or null to commit the audio yourself.")
    return value


class TurnDetectionParams(WireModel):
    """``server_vad``: the end of a turn is found by voice activity."""

    type: Annotated[Literal["server_vad"], BeforeValidator(_server_vad)] = "server_vad"
    threshold: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    prefix_padding_ms: Annotated[int, Field(ge=0, le=5_000)] = 300
    silence_duration_ms: Annotated[int, Field(ge=100, le=10_000)] = 500
    create_response: bool = True
    interrupt_response: bool = True
    idle_timeout_ms: Annotated[
        None, only(None, what="Idle prompts are not supported by this server yet.")
    ] = None


class AudioInput(WireModel):
    """``session.audio.input``."""

    format: Annotated[Format, null_is(Format(type="audio/pcm"))] = Format(type="audio/pcm")
    noise_reduction: Annotated[
        None, only(None, what="Noise reduction is not supported by this server yet.")
    ] = None
    transcription: Transcription | None = None
    turn_detection: TurnDetectionParams | None = None


def _voice_name(value: Any) -> Any:
    """A custom voice is given as an object with an id."""
    if isinstance(value, dict) and set(value) == {"id"}:
        return value["id"]
    return value


class AudioOutput(WireModel):
    """``session.audio.output``."""

    format: Annotated[Format, null_is(Format(type="audio/pcm"))] = Format(type="audio/pcm")
    voice: Annotated[ShortText, BeforeValidator(_voice_name)] = ""
    speed: Annotated[float, null_is(1.0), Field(ge=0.25, le=1.5)] = 1.0


class AudioParams(WireModel):
    """``session.audio``."""

    input: AudioInput = AudioInput()
    output: AudioOutput = AudioOutput()


class ParleyParams(WireModel):
    """Our own extension: ``trace`` asks for a ``parley.turn.trace`` event after each turn.

    ``budget_ms``: the time from the caller's last word to the first sound of the answer that this
    conversation aims at; null: the server's.
    """

    trace: bool = False
    budget_ms: Annotated[int | None, Field(ge=50, le=60_000)] = None


def _session_type(value: Any) -> Any:
    if value == "transcription":
        raise unsupported("Only sessions of type 'realtime' are offered.")
    return value


class SessionParams(WireModel):
    """``session`` of ``session.update``, and the state that the updates add up to."""

    type: Annotated[Literal["realtime"], BeforeValidator(_session_type)] = "realtime"
    model: ShortText | None = None
    instructions: Annotated[Text, null_is("")] = ""
    output_modalities: Annotated[Modalities, null_is(["audio"])] = ["audio"]
    max_output_tokens: MaxOutputTokens = None
    tools: NoTools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    truncation: Annotated[
        str | None,
        only(None, "auto", what="Only 'auto': the oldest messages are left out when needed."),
    ] = None
    tracing: Annotated[None, only(None, what="Use session.parley.trace to receive traces.")] = None
    prompt: Annotated[
        None, only(None, what="Stored prompts are not supported; use instructions.")
    ] = None
    reasoning: Annotated[
        None, only(None, what="The model does not reason apart from its answer.")
    ] = None
    include: Annotated[
        list[str] | None, only(None, [], what="Nothing more can be included yet.")
    ] = None
    audio: AudioParams = AudioParams()
    parley: Annotated[ParleyParams, null_is(ParleyParams())] = ParleyParams()


_Model = TypeVar("_Model", bound=WireModel)


def _merged(current: _Model, update: _Model, defaults: _Model) -> _Model:
    """``current`` with the fields that ``update`` gives; what was null starts from ``defaults``."""
    changes: dict[str, Any] = {}
    for name in update.model_fields_set:
        value, base = getattr(update, name), getattr(current, name)
        if isinstance(value, WireModel) and not isinstance(value, Format):
            start = base if base is not None else getattr(defaults, name)
            value = _merged(start, value, getattr(defaults, name))
        changes[name] = value
    return current.model_copy(update=changes)


class SessionState:
    """The session object of one connection. ``model``: the name that the client asked for."""

    def __init__(self, settings: Settings, names: Names, model: str) -> None:
        self._names = names
        self._defaults = SessionParams(
            model=model,
            instructions=settings.instructions,
            audio=AudioParams(
                input=AudioInput(
                    transcription=Transcription(model=names.transcriber),
                    turn_detection=TurnDetectionParams(
                        threshold=settings.vad_threshold,
                        prefix_padding_ms=settings.vad_prefix_padding_ms,
                        silence_duration_ms=settings.vad_silence_ms,
                    ),
                ),
                output=AudioOutput(voice=names.voice),
            ),
        )
        self.params = self._defaults

    def merged(self, update: SessionParams, *, voice_locked: bool) -> SessionParams:
        """The state after ``update``, which is not taken over yet. Raises ClientError.

        ``voice_locked``: the client has heard the voice; it cannot change any more.
        """
        check_names(self._names, update)
        merged = _merged(self.params, update, self._defaults)
        # The session keeps the name by which it was opened; every accepted name means the same.
        merged = merged.model_copy(update={"model": self.params.model})
        if voice_locked and merged.audio.output.voice != self.params.audio.output.voice:
            raise ClientError(
                "Cannot update a conversation's voice if assistant audio is present.",
                code="cannot_update_voice",
                param="session.audio.output.voice",
            )
        return merged


def check_names(names: Names, update: SessionParams) -> None:
    """Raise ClientError for a model, voice, transcriber or language that is not here."""
    given, heard = update.audio.output, update.audio.input.transcription
    if update.model is not None and not names.is_model(update.model):
        raise model_not_found(update.model, "session.model")
    if "voice" in given.model_fields_set:
        check_voice(names, given.voice, "session.audio.output.voice")
    if heard is None:
        return
    path = "session.audio.input.transcription"
    if heard.model is not None and not names.is_transcriber(heard.model):
        raise ClientError(
            f"Invalid value for '{path}.model': {heard.model!r} is not loaded. Supported values "
            f"are: {names.transcriber!r}, and OpenAI's names, which stand for it.",
            code="invalid_value",
            param=f"{path}.model",
        )
    language = (heard.language or "").lower()
    if language and names.english_only and language.split("-")[0] not in ("en", "english"):
        raise ClientError(
            f"Unsupported value for '{path}.language': {names.transcriber!r} knows English only.",
            code="unsupported_value",
            param=f"{path}.language",
        )


def check_voice(names: Names, voice: str, param: str) -> None:
    """Raise ClientError for a voice that is neither loaded nor an alias."""
    if not names.is_voice(voice):
        raise ClientError(
            f"Invalid value for '{param}': {voice!r}. Supported values are: {names.voice!r}, and "
            f"{', '.join(sorted(OPENAI_VOICES))}, which stand for it.",
            code="invalid_value",
            param=param,
        )


def model_not_found(model: str, param: str) -> ClientError:
    """The error for a model that this server does not have."""
    return ClientError(
        f"The model '{model}' does not exist on this server.", code="model_not_found", param=param
    )


def to_config(params: SessionParams) -> SessionConfig:
    """The state in the conversation's terms."""
    heard, spoken = params.audio.input, params.audio.output
    vad, transcription = heard.turn_detection, heard.transcription
    language = transcription.language if transcription else None
    return SessionConfig(
        instructions=params.instructions,
        modality=params.output_modalities[0],
        max_output_tokens=params.max_output_tokens,
        turn_detection=_turn_detection(vad) if vad is not None else None,
        input_format=heard.format.audio_format,
        output_format=spoken.format.audio_format,
        speed=spoken.speed,
        transcribe=transcription is not None,
        language=language.lower().split("-")[0] if language else None,
        transcription_prompt=transcription.prompt if transcription else None,
        send_traces=params.parley.trace,
        budget_ms=params.parley.budget_ms,
    )


def _turn_detection(vad: TurnDetectionParams) -> TurnDetection:
    return TurnDetection(
        threshold=vad.threshold,
        prefix_padding_ms=vad.prefix_padding_ms,
        silence_duration_ms=vad.silence_duration_ms,
        create_response=vad.create_response,
        interrupt_response=vad.interrupt_response,
    )


def to_wire(session_id: str, params: SessionParams) -> dict[str, Any]:
    """The session object as the server shows it. ``expires_at`` null: sessions do not expire."""
    heard, spoken = params.audio.input, params.audio.output
    transcription, vad = heard.transcription, heard.turn_detection
    return {
        "type": "realtime",
        "object": "realtime.session",
        "id": session_id,
        "model": params.model,
        "expires_at": None,
        "instructions": params.instructions,
        "output_modalities": params.output_modalities,
        "max_output_tokens": params.max_output_tokens or "inf",
        "tools": [],
        "tool_choice": params.tool_choice or "auto",
        "truncation": "auto",
        "tracing": None,
        "prompt": None,
        "include": None,
        "audio": {
            "input": {
                "format": heard.format.to_wire(),
                "noise_reduction": None,
                "transcription": transcription
                and transcription.model_dump(include={"model", "language", "prompt"}),
                "turn_detection": vad and vad.model_dump(),
            },
            "output": {
                "format": spoken.format.to_wire(),
                "voice": spoken.voice,
                "speed": spoken.speed,
            },
        },
        "parley": params.parley.model_dump(),
    }
