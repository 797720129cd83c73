"""The session object of the Realtime API: validation, merging of updates, and what we make of it.

One set of models serves both ways. As an update, ``model_fields_set`` tells what the client gave;
merged onto the current state, it is the state, every field filled.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from app.api.model_names import (
    Names,
    check_transcription,
    check_voice,
    model_not_found,
)
from app.api.realtime.tools import Choice, Tools, check_tools, choice_to_wire, tools_of
from app.api.validation import (
    AtMost,
    MaxOutputTokens,
    Modalities,
    ShortText,
    Text,
    VoiceName,
    WireModel,
    invalid,
    null_is,
    only,
    unsupported,
)
from app.config import Settings
from app.conversation import (
    DetectionKind,
    Eagerness,
    NoiseReduction,
    SessionConfig,
    ToolChoice,
    TurnDetection,
)
from app.errors import ClientError
from audio.codecs import PCM16_24K, PCMA_8K, PCMU_8K, AudioFormat
from audio.language import language_code

_FORMATS = {"audio/pcm": PCM16_24K, "audio/pcmu": PCMU_8K, "audio/pcma": PCMA_8K}
_Nothing = Annotated[list[str], AtMost(0)]


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
        _Nothing | None, only(None, [], what="Keywords are not supported; use the prompt.")
    ] = None
    languages: Annotated[
        _Nothing | None, only(None, [], what="Give one language in 'language'.")
    ] = None


class TurnDetectionParams(WireModel):
    """Both kinds in one; ``_DETECTION_FIELDS`` says which fields belong to which.

    Without a ``type`` an update is for the kind that the session has, or, when its fields are those
    of the other kind, for that one: ``{"threshold": 0.7}`` means "server_vad".
    """

    type: DetectionKind = "server_vad"
    threshold: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    prefix_padding_ms: Annotated[int, Field(ge=0, le=5_000)] = 300
    silence_duration_ms: Annotated[int, Field(ge=100, le=10_000)] = 500
    eagerness: Eagerness = "auto"
    create_response: bool = True
    interrupt_response: bool = True
    idle_timeout_ms: Annotated[int | None, Field(ge=5_000, le=30_000)] = None


_COMMON_DETECTION = ("type", "create_response", "interrupt_response")
_DETECTION_FIELDS: dict[DetectionKind, tuple[str, ...]] = {
    "server_vad": (
        *_COMMON_DETECTION,
        "threshold",
        "prefix_padding_ms",
        "silence_duration_ms",
        "idle_timeout_ms",
    ),
    "semantic_vad": (*_COMMON_DETECTION, "eagerness"),
}


class NoiseReductionParams(WireModel):
    """``{"type": "near_field"}`` (headset) or ``far_field`` (speakerphone)."""

    type: NoiseReduction


class AudioInputParams(WireModel):
    """``session.audio.input``."""

    format: Annotated[Format, null_is(Format(type="audio/pcm"))] = Format(type="audio/pcm")
    noise_reduction: NoiseReductionParams | None = None
    transcription: Transcription | None = None
    turn_detection: TurnDetectionParams | None = None


class AudioOutputParams(WireModel):
    """``session.audio.output``."""

    format: Annotated[Format, null_is(Format(type="audio/pcm"))] = Format(type="audio/pcm")
    voice: VoiceName = ""
    speed: Annotated[float, null_is(1.0), Field(ge=0.25, le=1.5)] = 1.0


class AudioParams(WireModel):
    """``session.audio``."""

    input: AudioInputParams = AudioInputParams()
    output: AudioOutputParams = AudioOutputParams()


class ParleyParams(WireModel):
    """Our own extension: ``trace`` asks for a ``parley.turn.trace`` event after each turn.

    ``word_timestamps`` asks for ``parley.transcript.words`` after each transcript.
    ``tools``: which of the server's own tools the model may call; null: all of them.
    ``budget_ms``: the time from the caller's last word to the first sound of the answer that this
    conversation aims at; null: the server's.
    """

    trace: bool = False
    word_timestamps: bool = False
    tools: Annotated[list[ShortText], AtMost(128)] | None = None
    budget_ms: Annotated[int | None, Field(ge=50, le=60_000)] = None


def _session_type(value: Any) -> Any:
    if value == "transcription":
        raise unsupported("Only sessions of type 'realtime' are offered.")
    return value


def _tracing(value: Any) -> None:
    """Asks OpenAI to keep a trace. Every turn is traced here, and nothing is sent elsewhere."""
    names = ("workflow_name", "group_id", "metadata")
    if value in (None, "auto") or (isinstance(value, dict) and not set(value).difference(names)):
        return
    raise invalid(f'expected "auto", null, or an object with {", ".join(names)}')


def _truncation(value: Any) -> float | None:
    """Of a prompt that is too long this share is kept; 0: none, it is an error."""
    if value in (None, "auto"):
        return None
    if value == "disabled":
        return 0.0
    if isinstance(value, dict) and value.get("type") == "retention_ratio":
        if set(value) != {"type", "retention_ratio"}:
            raise unsupported("Only 'retention_ratio' can be chosen, no limits in tokens.")
        ratio = value["retention_ratio"]
        if isinstance(ratio, int | float) and 0.0 < ratio <= 1.0:
            return float(ratio)
        raise invalid("expected a retention_ratio above 0 and at most 1")
    raise invalid('expected "auto", "disabled", or {"type": "retention_ratio", ...}')


def _truncation_to_wire(ratio: float | None) -> str | dict[str, Any]:
    if ratio is None:
        return "auto"
    return {"type": "retention_ratio", "retention_ratio": ratio} if ratio else "disabled"


class SessionParams(WireModel):
    """``session`` of ``session.update``, and the state that the updates add up to."""

    type: Annotated[Literal["realtime"], BeforeValidator(_session_type)] = "realtime"
    model: ShortText | None = None
    instructions: Annotated[Text, null_is("")] = ""
    output_modalities: Annotated[Modalities, null_is(["audio"])] = ["audio"]
    max_output_tokens: MaxOutputTokens = None
    tools: Tools = None
    tool_choice: Choice = None
    parallel_tool_calls: bool | None = None
    truncation: Annotated[float | None, BeforeValidator(_truncation)] = None
    tracing: Annotated[None, BeforeValidator(_tracing)] = None
    prompt: Annotated[
        None, only(None, what="Stored prompts are not supported; use instructions.")
    ] = None
    reasoning: Annotated[
        None, only(None, what="The model does not reason apart from its answer.")
    ] = None
    include: Annotated[
        _Nothing | None, only(None, [], what="Nothing more can be included yet.")
    ] = None
    audio: AudioParams = AudioParams()
    parley: Annotated[ParleyParams, null_is(ParleyParams())] = ParleyParams()


_Model = TypeVar("_Model", bound=WireModel)
# Replaced, not merged: their fields belong together.
_WHOLE = (Format, TurnDetectionParams, NoiseReductionParams)


def _merged(current: _Model, update: _Model, defaults: _Model) -> _Model:
    """``current`` with the fields that ``update`` gives; what was null starts from ``defaults``."""
    changes: dict[str, Any] = {}
    for name in update.model_fields_set:
        value, base = getattr(update, name), getattr(current, name)
        if isinstance(value, WireModel) and not isinstance(value, _WHOLE):
            start = base if base is not None else getattr(defaults, name)
            value = _merged(start, value, getattr(defaults, name))
        changes[name] = value
    return current.model_copy(update=changes)


class SessionState:
    """The session object of one connection. ``model``: the name that the client asked for.

    ``server_tools``: names of the server's own tools.
    """

    def __init__(
        self, settings: Settings, names: Names, model: str, server_tools: tuple[str, ...] = ()
    ) -> None:
        self._names = names
        self._server_tools = server_tools
        self._defaults = SessionParams(
            model=model,
            instructions=settings.instructions,
            audio=AudioParams(
                input=AudioInputParams(
                    transcription=Transcription(model=names.transcriber),
                    turn_detection=TurnDetectionParams(
                        type=settings.turn_detection,
                        threshold=settings.vad_threshold,
                        prefix_padding_ms=settings.vad_prefix_padding_ms,
                        silence_duration_ms=settings.vad_silence_ms,
                    ),
                ),
                output=AudioOutputParams(voice=names.voice),
            ),
        )
        self.params = self._defaults

    def merged(self, update: SessionParams, *, voice_locked: bool) -> SessionParams:
        """The state after ``update``, which is not taken over yet. Raises ClientError.

        ``voice_locked``: the client has heard the voice; it cannot change any more.
        """
        self._check_names(update)
        update = self._with_detection(update)
        merged = _merged(self.params, update, self._defaults)
        # The session keeps the name by which it was opened; every accepted name means the same.
        merged = merged.model_copy(update={"model": self.params.model})
        self._check_tools(merged)
        if voice_locked and merged.audio.output.voice != self.params.audio.output.voice:
            raise ClientError(
                "Cannot update a conversation's voice if assistant audio is present.",
                code="cannot_update_voice",
                param="session.audio.output.voice",
            )
        return merged

    def _check_names(self, update: SessionParams) -> None:
        given, heard = update.audio.output, update.audio.input.transcription
        if update.model is not None and not self._names.is_model(update.model):
            raise model_not_found(self._names, update.model, "session.model")
        if "voice" in given.model_fields_set:
            check_voice(self._names, given.voice, "session.audio.output.voice")
        if heard is not None:
            check_transcription(self._names, heard.model, heard.language)

    def _check_tools(self, params: SessionParams) -> None:
        chosen = params.parley.tools
        for index, name in enumerate(chosen or ()):
            if name not in self._server_tools:
                raise ClientError(
                    f"Invalid value for 'session.parley.tools[{index}]': {name!r}. This server has "
                    f"{', '.join(self._server_tools) or 'no tools of its own'}.",
                    code="invalid_value",
                    param=f"session.parley.tools[{index}]",
                )
        offered = self._server_tools if chosen is None else tuple(chosen)
        check_tools(tools_of(params.tools), params.tool_choice, offered, "session")

    def _with_detection(self, update: SessionParams) -> SessionParams:
        """``update`` with its turn detection as a whole, for the kind that it is about.

        A change of the kind starts from the defaults. Raises ClientError for a field of the other
        kind.
        """
        given = update.audio.input.turn_detection
        if given is None:
            return update
        default = self._defaults.audio.input.turn_detection
        assert default is not None
        current = self.params.audio.input.turn_detection or default
        kind = _kind_of(given, current.type)
        allowed = _DETECTION_FIELDS[kind]
        if foreign := sorted(given.model_fields_set.difference(allowed)):
            param = f"session.audio.input.turn_detection.{foreign[0]}"
            raise ClientError(
                f"Unknown parameter: '{param}': turn detection of type {kind!r} has "
                f"{', '.join(allowed)}.",
                code="unknown_parameter",
                param=param,
            )
        start = current if kind == current.type else default
        whole = _merged(start, given, default).model_copy(update={"type": kind})
        heard = update.audio.input.model_copy(update={"turn_detection": whole})
        audio = update.audio.model_copy(update={"input": heard})
        return update.model_copy(update={"audio": audio})


def _kind_of(given: TurnDetectionParams, current: DetectionKind) -> DetectionKind:
    fields = given.model_fields_set
    if "type" in fields or fields.issubset(_DETECTION_FIELDS[current]):
        return given.type if "type" in fields else current
    fitting = (kind for kind, known in _DETECTION_FIELDS.items() if fields.issubset(known))
    return next(fitting, current)


def to_config(params: SessionParams) -> SessionConfig:
    """The state in the conversation's terms."""
    heard, spoken = params.audio.input, params.audio.output
    vad, transcription = heard.turn_detection, heard.transcription
    language = transcription.language if transcription else None
    return SessionConfig(
        instructions=params.instructions,
        modality=params.output_modalities[0],
        max_output_tokens=params.max_output_tokens,
        noise_reduction=heard.noise_reduction.type if heard.noise_reduction else None,
        turn_detection=_turn_detection(vad) if vad is not None else None,
        input_format=heard.format.audio_format,
        output_format=spoken.format.audio_format,
        speed=spoken.speed,
        tools=tools_of(params.tools),
        tool_choice=params.tool_choice or ToolChoice(),
        parallel_tool_calls=bool(params.parallel_tool_calls),
        server_tools=tuple(params.parley.tools) if params.parley.tools is not None else None,
        retention_ratio=params.truncation,
        transcribe=transcription is not None,
        language=language_code(language) if language else None,
        transcription_prompt=transcription.prompt if transcription else None,
        send_traces=params.parley.trace,
        word_timestamps=params.parley.word_timestamps,
        budget_ms=params.parley.budget_ms,
    )


def _turn_detection(vad: TurnDetectionParams) -> TurnDetection:
    return TurnDetection(
        kind=vad.type,
        threshold=vad.threshold,
        prefix_padding_ms=vad.prefix_padding_ms,
        silence_duration_ms=vad.silence_duration_ms,
        eagerness=vad.eagerness,
        create_response=vad.create_response,
        interrupt_response=vad.interrupt_response,
        idle_timeout_ms=vad.idle_timeout_ms,
    )


def to_wire(
    session_id: str, params: SessionParams, expires_at_s: int | None = None
) -> dict[str, Any]:
    """The session object as the server shows it. ``expires_at_s``: None when it has not begun."""
    heard, spoken = params.audio.input, params.audio.output
    transcription, vad = heard.transcription, heard.turn_detection
    return {
        "type": "realtime",
        "object": "realtime.session",
        "id": session_id,
        "model": params.model,
        "expires_at": expires_at_s,
        "instructions": params.instructions,
        "output_modalities": params.output_modalities,
        "max_output_tokens": params.max_output_tokens or "inf",
        "tools": [tool.to_wire() for tool in params.tools or ()],
        "tool_choice": choice_to_wire(params.tool_choice),
        "truncation": _truncation_to_wire(params.truncation),
        "tracing": None,
        "prompt": None,
        "include": None,
        "audio": {
            "input": {
                "format": heard.format.to_wire(),
                "noise_reduction": heard.noise_reduction and heard.noise_reduction.model_dump(),
                "transcription": transcription
                and transcription.model_dump(include={"model", "language", "prompt"}),
                "turn_detection": vad and vad.model_dump(include=set(_DETECTION_FIELDS[vad.type])),
            },
            "output": {
                "format": spoken.format.to_wire(),
                "voice": spoken.voice,
                "speed": spoken.speed,
            },
        },
        "parley": params.parley.model_dump(),
    }
