"""How the engine process and its client talk: msgpack frames over a local stream socket.

A frame is a length (4 bytes, little endian) and that many bytes of msgpack. The client sends one
command a frame; the worker sends a list of events a frame, all that one step brought. Both sides
decode into typed structs, and a frame above the limit ends the connection.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, TypeVar

import msgspec

from llm_core.messages import (
    ChatMessage,
    EngineConfig,
    EngineStats,
    GenerationEvent,
    Guide,
    GuideReady,
    ModelInfo,
    PrefillResult,
    RequestOptions,
    SamplingParams,
)
from llm_core.progress import Doing

MAX_COMMAND_BYTES = 16 * 1024 * 1024
MAX_EVENTS_BYTES = 16 * 1024 * 1024
_HEADER_BYTES = 4


_Message = TypeVar("_Message")


class ProtocolError(Exception):
    """The other side sent a frame that is cut off, too long, or not understood."""


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first command: load this. ``known_guides``: those that an engine of this model has
    followed, as the bytes that they take by their keys; they need not be checked again."""

    config: EngineConfig
    known_guides: dict[bytes, int] = {}


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    request_id: int
    messages: tuple[ChatMessage, ...]
    params: SamplingParams
    options: RequestOptions = RequestOptions()


class Prefill(msgspec.Struct, frozen=True, tag="prefill"):
    request_id: int
    messages: tuple[ChatMessage, ...]
    options: RequestOptions = RequestOptions()


class Pin(msgspec.Struct, frozen=True, tag="pin"):
    """Computes what conversations that begin so share, and keeps it. Answered like a prefill."""

    request_id: int
    messages: tuple[ChatMessage, ...]
    cache_salt: str


class PrepareGuide(msgspec.Struct, frozen=True, tag="prepare_guide"):
    """Compiles a guide ahead of the replies that will have it."""

    request_id: int
    guide: Guide


class OpenDraft(msgspec.Struct, frozen=True, tag="open_draft"):
    """A prompt that may still change; Prefilled follows whenever a revision is computed."""

    request_id: int
    messages: tuple[ChatMessage, ...]
    options: RequestOptions


class UpdateDraft(msgspec.Struct, frozen=True, tag="update_draft"):
    request_id: int
    messages: tuple[ChatMessage, ...]


class TruncateDraft(msgspec.Struct, frozen=True, tag="truncate_draft"):
    request_id: int
    num_tokens: int


class ForkDraft(msgspec.Struct, frozen=True, tag="fork_draft"):
    """``request_id`` is the new draft's."""

    request_id: int
    source_id: int


class CommitDraft(msgspec.Struct, frozen=True, tag="commit_draft"):
    """The draft becomes a generation, under its own id."""

    request_id: int
    params: SamplingParams
    options: RequestOptions


class SetDeadline(msgspec.Struct, frozen=True, tag="set_deadline"):
    """Answered by nothing; unknown ids are ignored."""

    request_id: int
    deadline_ns: int | None


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Ends a request; no event answers it."""

    request_id: int


class GetStats(msgspec.Struct, frozen=True, tag="stats"):
    request_id: int


DraftCommand = UpdateDraft | TruncateDraft | CommitDraft
# Commands that begin a request; their events carry its id.
Request = Generate | Prefill | Pin | PrepareGuide | OpenDraft | ForkDraft | GetStats
Command = Start | Request | DraftCommand | SetDeadline | Abort


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded."""

    info: ModelInfo


class StartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    """The model is not loaded, and the process ends."""

    code: str
    message: str


class Generated(msgspec.Struct, frozen=True, tag="generated"):
    request_id: int
    event: GenerationEvent


class Prefilled(msgspec.Struct, frozen=True, tag="prefilled"):
    request_id: int
    result: PrefillResult


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    request_id: int
    stats: EngineStats


class GuidePrepared(msgspec.Struct, frozen=True, tag="guide_prepared"):
    request_id: int
    result: GuideReady


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Sent all the time, by a thread of its own: what the engine's threads are doing, and for how
    many milliseconds."""

    threads: list[tuple[Doing, int]]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The request is over. ``code`` and ``message`` are those of an error of errors.py."""

    request_id: int
    code: str
    message: str


Event = Ready | StartFailed | Alive | Generated | Prefilled | GuidePrepared | Stats | Failed

_encoder = msgspec.msgpack.Encoder()
_command_decoder = msgspec.msgpack.Decoder(Command)
_events_decoder = msgspec.msgpack.Decoder(list[Event])


def encode_command(command: Command) -> bytes:
    """A whole frame. Raises ProtocolError when it is too long, or holds what msgpack cannot."""
    try:
        return _frame(_encoder.encode(command), MAX_COMMAND_BYTES)
    except (UnicodeEncodeError, OverflowError, TypeError) as error:
        raise ProtocolError(str(error)) from error


def encode_events(events: list[Event]) -> bytes:
    """A whole frame. Raises ProtocolError when it is too long."""
    return _frame(_encoder.encode(events), MAX_EVENTS_BYTES)


def receive_command(connection: socket.socket) -> Command | None:
    """Blocks for the next command; None when the client has closed. Raises ProtocolError."""
    payload = _receive_frame(connection)
    if payload is None:
        return None
    command: Command = _decode(_command_decoder, payload)
    return command


def send(connection: socket.socket, message: msgspec.Struct) -> None:
    """Sends any message as a frame. Raises ProtocolError when it is too long, OSError."""
    connection.sendall(_frame(_encoder.encode(message), MAX_COMMAND_BYTES))


def receive(connection: socket.socket, kind: type[_Message]) -> _Message | None:
    """Blocks for a frame that ``send`` wrote; None when the other side has closed. Raises
    ProtocolError; TimeoutError where the socket has a time limit."""
    payload = _receive_frame(connection)
    if payload is None:
        return None
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a frame is not understood: {error}") from error


async def read_events(reader: asyncio.StreamReader) -> list[Event] | None:
    """The next events; None when the worker has closed. Raises ProtocolError."""
    try:
        header = await reader.readexactly(_HEADER_BYTES)
        payload = await reader.readexactly(_payload_len(header, MAX_EVENTS_BYTES))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    events: list[Event] = _decode(_events_decoder, payload)
    return events


def _frame(payload: bytes, max_bytes: int) -> bytes:
    if len(payload) > max_bytes:
        raise ProtocolError(f"{len(payload)} bytes are more than the {max_bytes} of a frame")
    return len(payload).to_bytes(_HEADER_BYTES, "little") + payload


def _receive_frame(connection: socket.socket) -> bytes | None:
    header = _receive_exactly(connection, _HEADER_BYTES)
    if header is None:
        return None
    return _receive_exactly(connection, _payload_len(header, MAX_COMMAND_BYTES))


def _payload_len(header: bytes, max_bytes: int) -> int:
    length = int.from_bytes(header, "little")
    if length > max_bytes:
        raise ProtocolError(f"a frame of {length} bytes exceeds the limit of {max_bytes}")
    return length


def _decode(decoder: msgspec.msgpack.Decoder[Any], payload: bytes) -> Any:
    try:
        return decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a frame is not understood: {error}") from error


def _receive_exactly(connection: socket.socket, num_bytes: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < num_bytes:
        try:
            part = connection.recv(min(num_bytes - len(parts), 1 << 20))
        except ConnectionError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)
