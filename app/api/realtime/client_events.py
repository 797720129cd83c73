"""Client events of the Realtime API: from a message on the wire to a checked object.

Every failure is a ClientError whose code and param a client made for OpenAI's API knows.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from app.api.http.json_input import InputTooLargeError, json_object, num_found
from app.api.realtime.session_params import SessionParams
from app.api.realtime.tools import Choice, ToolName, Tools
from app.api.validation import (
    AtMost,
    EventId,
    Id,
    MaxOutputTokens,
    Modalities,
    Text,
    WireModel,
    checked,
    invalid,
    only,
    shorten,
    unsupported,
)
from app.errors import ClientError

# Of the base64 text, before decoding.
MAX_AUDIO_CHARS = 15 * 1024 * 1024
# A message of this length or more can only be an append, which has no more commas than fields.
_BIG_MESSAGE_CHARS = 1024 * 1024
_MAX_COMMAS = 16
_TOO_LARGE = "message_too_large"
# Of all events but those that carry texts, tools or audio.
MAX_SMALL_EVENT_CHARS = 64 * 1024
MAX_INPUT_ITEMS = 256


class ClientEvent(WireModel):
    """``event_id`` is the client's own name for the event; errors mention it."""

    type: str
    event_id: EventId | None = None


class SessionUpdate(ClientEvent):
    """``session.update``"""

    session: SessionParams


class AudioAppend(ClientEvent):
    """``input_audio_buffer.append``: ``audio`` is base64, checked when it is decoded."""

    audio: str


class AudioCommit(ClientEvent):
    """``input_audio_buffer.commit``"""


class AudioClear(ClientEvent):
    """``input_audio_buffer.clear``"""


class ContentPart(WireModel):
    """A content part that a client gives. Audio parts carry their transcript."""

    type: Literal["input_text", "input_audio", "output_text", "output_audio"]
    text: Text | None = None
    transcript: Text | None = None
    audio: Annotated[
        str | None,
        only(None, what="Send audio with input_audio_buffer.append; items carry its transcript."),
    ] = None

    @model_validator(mode="before")
    @classmethod
    def _no_images(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") == "input_image":
            raise unsupported("Images are not supported by this server.")
        return value

    @property
    def words(self) -> str | None:
        """The text, or the transcript of an audio part."""
        return self.text if self.type.endswith("_text") else self.transcript


_PART_TYPES = {
    "system": ("input_text",),
    "user": ("input_text", "input_audio"),
    "assistant": ("output_text", "output_audio"),
}


class ItemBase(WireModel):
    """What all items that a client gives have in common."""

    id: Id | None = None
    object: Literal["realtime.item"] | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class MessageItem(ItemBase):
    """Something that was said."""

    type: Literal["message"]
    role: Literal["system", "user", "assistant"]
    content: Annotated[list[ContentPart], AtMost(64, least=1)]


class FunctionCallItem(ItemBase):
    """A call of the past, from a conversation that is restored."""

    type: Literal["function_call"]
    name: ToolName
    arguments: Text
    call_id: Id | None = None


class FunctionOutputItem(ItemBase):
    """What a function that the model called gave back."""

    type: Literal["function_call_output"]
    call_id: Id
    output: Text


class ItemReference(WireModel):
    """An item of the conversation, in the input of a response."""

    type: Literal["item_reference"]
    id: Id


ClientItem = Annotated[
    MessageItem | FunctionCallItem | FunctionOutputItem, Field(discriminator="type")
]
InputItem = Annotated[
    MessageItem | FunctionCallItem | FunctionOutputItem | ItemReference,
    Field(discriminator="type"),
]


class ItemCreate(ClientEvent):
    """``conversation.item.create``. ``previous_item_id``: null appends, "root" puts it first."""

    item: ClientItem
    previous_item_id: Id | None = None


class ItemRetrieve(ClientEvent):
    """``conversation.item.retrieve``"""

    item_id: Id


class ItemDelete(ClientEvent):
    """``conversation.item.delete``"""

    item_id: Id


class ItemTruncate(ClientEvent):
    """``conversation.item.truncate``"""

    item_id: Id
    content_index: Annotated[int, Field(ge=0)]
    audio_end_ms: Annotated[int, Field(ge=0)]


class ResponseAudioOutput(WireModel):
    """``response.audio.output``: only what the session has already."""

    voice: str | None = None
    format: Annotated[
        None, only(None, what="Set the format for the session, with session.update.")
    ] = None


class ResponseAudio(WireModel):
    """``response.audio``"""

    output: ResponseAudioOutput | None = None


_MetadataValue = Annotated[str, StringConstraints(max_length=512)]


def _metadata_keys(value: Any) -> Any:
    if isinstance(value, dict) and any(len(key) > 64 for key in value):
        raise invalid("metadata keys have at most 64 characters")
    return value


class ResponseParams(WireModel):
    """``response`` of ``response.create``: null or missing means as in the session."""

    output_modalities: Modalities | None = None
    instructions: Text | None = None
    max_output_tokens: MaxOutputTokens = None
    metadata: Annotated[
        Annotated[dict[str, _MetadataValue], AtMost(16)] | None, BeforeValidator(_metadata_keys)
    ] = None
    audio: ResponseAudio | None = None
    conversation: Annotated[
        str | None,
        only(None, "auto", "none", what="'auto' is the conversation, 'none' is out of band."),
    ] = None
    input: Annotated[list[InputItem], AtMost(MAX_INPUT_ITEMS)] | None = None
    tools: Tools = None
    tool_choice: Choice = None
    parallel_tool_calls: bool | None = None
    prompt: Annotated[
        None, only(None, what="Stored prompts are not supported; use instructions.")
    ] = None
    reasoning: Annotated[
        None, only(None, what="The model does not reason apart from its answer.")
    ] = None


class ResponseCreate(ClientEvent):
    """``response.create``"""

    response: ResponseParams | None = None


class ResponseCancel(ClientEvent):
    """``response.cancel``"""

    response_id: Id | None = None


class OutputClear(ClientEvent):
    """``output_audio_buffer.clear``: only where the server owns the player (WebRTC)."""


EVENT_TYPES: dict[str, type[ClientEvent]] = {
    "session.update": SessionUpdate,
    "input_audio_buffer.append": AudioAppend,
    "input_audio_buffer.commit": AudioCommit,
    "input_audio_buffer.clear": AudioClear,
    "conversation.item.create": ItemCreate,
    "conversation.item.retrieve": ItemRetrieve,
    "conversation.item.delete": ItemDelete,
    "conversation.item.truncate": ItemTruncate,
    "response.create": ResponseCreate,
    "response.cancel": ResponseCancel,
    "output_audio_buffer.clear": OutputClear,
}


# These carry texts, tools or audio.
_LARGE_EVENTS = (SessionUpdate, AudioAppend, ItemCreate, ResponseCreate)


def read_event(message: str | bytes) -> tuple[ClientEvent | ClientError, str | None]:
    """The event in a message, or why there is none; and the client's name for the event, for the
    error that answers it."""
    event_id = None
    try:
        data = parse_message(message)
        event_id = event_id_of(data)
        event = parse_event(data)
        if len(message) > MAX_SMALL_EVENT_CHARS and not isinstance(event, _LARGE_EVENTS):
            raise InputTooLargeError(
                f"The event is too large: {len(message)} characters. {event.type} may have at "
                f"most {MAX_SMALL_EVENT_CHARS}.",
                code=_TOO_LARGE,
            )
    except ClientError as error:
        return error, event_id
    return event, event_id


def parse_message(message: str | bytes) -> dict[str, Any]:
    """The JSON object in a message. Raises ClientError (invalid_json, message_too_large)."""
    if isinstance(message, bytes):
        raise ClientError(
            "Binary messages are not understood: send each event as JSON in a text message, audio "
            "as base64.",
            code="invalid_message",
        )
    if len(message) >= _BIG_MESSAGE_CHARS and (
        num_found(",", message, _MAX_COMMAS + 1) > _MAX_COMMAS
    ):
        raise InputTooLargeError(
            f"The event is too large: {len(message)} characters. Only the audio of "
            f"input_audio_buffer.append may exceed {_BIG_MESSAGE_CHARS}.",
            code=_TOO_LARGE,
        )
    return json_object(message, "The message", too_large=_TOO_LARGE)


def event_id_of(data: dict[str, Any]) -> str | None:
    """The client's name for the event, for the error that answers it."""
    event_id = data.get("event_id")
    return event_id if isinstance(event_id, str) and len(event_id) <= 512 else None


def parse_event(data: dict[str, Any]) -> ClientEvent:
    """The checked event. Raises ClientError."""
    if "type" not in data:
        raise ClientError(
            "Missing required parameter: 'type'.", code="missing_required_parameter", param="type"
        )
    name = data["type"]
    model = EVENT_TYPES.get(name) if isinstance(name, str) else None
    if model is None:
        raise ClientError(
            f"Invalid value for 'type': {shorten(name)}. Supported values are: "
            + ", ".join(f"'{known}'" for known in EVENT_TYPES)
            + ".",
            code="invalid_value",
            param="type",
        )
    if model is AudioAppend and isinstance(audio := data.get("audio"), str):
        _check_audio_len(audio)
    event = checked(data, model)
    if isinstance(event, ItemCreate) and isinstance(event.item, MessageItem):
        _check_parts(event.item, "item")
    if isinstance(event, ResponseCreate) and event.response is not None:
        for index, item in enumerate(event.response.input or ()):
            if isinstance(item, MessageItem):
                _check_parts(item, f"response.input[{index}]")
    return event


def _check_audio_len(audio: str) -> None:
    if len(audio) > MAX_AUDIO_CHARS:
        raise ClientError(
            f"Invalid 'audio': {len(audio)} characters of base64 exceed the limit of 15 MiB "
            f"({MAX_AUDIO_CHARS}) for one event.",
            code="string_above_max_length",
            param="audio",
        )


def _check_parts(item: MessageItem, where: str) -> None:
    allowed = _PART_TYPES[item.role]
    for index, part in enumerate(item.content):
        path = f"{where}.content[{index}]"
        if part.type not in allowed:
            raise ClientError(
                f"Invalid value for '{path}.type': {part.type!r}. Supported values for role "
                f"{item.role!r} are: {', '.join(map(repr, allowed))}.",
                code="invalid_value",
                param=f"{path}.type",
            )
        if part.words is None:
            name = "text" if part.type.endswith("_text") else "transcript"
            raise ClientError(
                f"Missing required parameter: '{path}.{name}'.",
                code="missing_required_parameter",
                param=f"{path}.{name}",
            )
