"""What a session tells the outside: domain events, one step away from any wire protocol.

``app.api.realtime.connection`` turns each of them into events of the Realtime API
(docs/realtime.md). Times are milliseconds since the start of the session's input audio
(``audio_*_ms``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

ItemStatus = Literal["in_progress", "completed", "incomplete"]
PartType = Literal["input_text", "input_audio", "output_text", "output_audio"]
ResponseStatus = Literal["in_progress", "completed", "cancelled", "failed", "incomplete"]


@dataclass(slots=True)
class Part:
    """One content part. ``text`` is the text, or the transcript of an audio part.

    ``text`` None: an input audio part that is not transcribed yet.
    """

    type: PartType
    text: str | None = None
    audio_ms: float = 0.0


@dataclass(slots=True)
class ToolCall:
    """The model calls a tool; ``arguments`` is JSON text, as the model wrote it.

    ``runs_here``: the tool is the server's own. Then ``output`` or ``error`` say how it went (both
    None: it has not come back); otherwise the client runs it, and gives a ``ToolOutput``.
    """

    call_id: str
    name: str
    arguments: str = ""
    runs_here: bool = False
    output: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """What the client's tool gave back."""

    call_id: str
    output: str


@dataclass(slots=True)
class Item:
    """One entry of the conversation: a message, or a tool's call or output (then no content)."""

    id: str
    role: Literal["system", "user", "assistant", "tool"]
    content: list[Part] = field(default_factory=list)
    status: ItemStatus = "completed"
    call: ToolCall | None = None
    output: ToolOutput | None = None

    @property
    def num_chars(self) -> int:
        """Length of all text in it."""
        num_chars = sum(len(part.text or "") for part in self.content)
        if self.call is not None:
            call = self.call
            num_chars += len(call.arguments) + len(call.output or "") + len(call.error or "")
        return num_chars + (len(self.output.output) if self.output is not None else 0)


@dataclass(frozen=True, slots=True)
class ResponseUsage:
    """Token counts of a response, in the wire protocol's terms."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class Response:
    """One answer of the assistant.

    ``reason``: turn_detected, client_cancelled, max_output_tokens, or an error code (failed).
    ``in_conversation`` False: out of band, its items do not become part of the conversation.
    """

    id: str
    modality: Literal["audio", "text"]
    status: ResponseStatus = "in_progress"
    reason: str | None = None
    error_message: str | None = None
    output: list[Item] = field(default_factory=list)
    usage: ResponseUsage = field(default_factory=ResponseUsage)
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    in_conversation: bool = True
    is_withdrawn: bool = False
    """The caller had not finished: what it answers and the answer are part of nothing any more."""


@dataclass(frozen=True, slots=True)
class SpeechStarted:
    """The caller's voice was detected; ``audio_start_ms`` includes the prefix padding."""

    item_id: str
    audio_start_ms: int


@dataclass(frozen=True, slots=True)
class SpeechStopped:
    """The caller's turn has ended."""

    item_id: str
    audio_end_ms: int


@dataclass(frozen=True, slots=True)
class InputCommitted:
    """The input audio became the user item ``item_id``."""

    item_id: str
    previous_item_id: str | None


@dataclass(frozen=True, slots=True)
class InputCleared:
    """The input audio buffer was emptied at the client's wish."""


@dataclass(frozen=True, slots=True)
class IdleTimedOut:
    """Nobody spoke for ``idle_timeout_ms``; the silence from start to end became ``item_id``."""

    item_id: str
    audio_start_ms: int
    audio_end_ms: int


@dataclass(frozen=True, slots=True)
class DtmfReceived:
    """The caller pressed a key of the phone. ``received_at_s``: seconds since the epoch."""

    key: str
    received_at_s: int


@dataclass(frozen=True, slots=True)
class ItemAdded:
    """An item entered the conversation (user items: together with ItemDone)."""

    item: Item
    previous_item_id: str | None


@dataclass(frozen=True, slots=True)
class ItemDone:
    """An item is complete."""

    item: Item
    previous_item_id: str | None


@dataclass(frozen=True, slots=True)
class ItemDeleted:
    """An item was removed at the client's wish."""

    item_id: str


@dataclass(frozen=True, slots=True)
class ItemTruncated:
    """An assistant item was cut to what the caller heard, at the client's wish."""

    item_id: str
    content_index: int
    audio_end_ms: int


@dataclass(frozen=True, slots=True)
class TranscriptionDelta:
    """Stable words of the caller's transcript; deltas are never retracted."""

    item_id: str
    text: str


@dataclass(frozen=True, slots=True)
class TranscriptionCompleted:
    """The caller's final transcript (may be empty: nothing was said)."""

    item_id: str
    transcript: str
    audio_s: float


@dataclass(frozen=True, slots=True)
class SpokenWord:
    """A word of the caller's, with its marks, and from when to when it was said."""

    word: str
    start_ms: int
    end_ms: int


@dataclass(frozen=True, slots=True)
class TranscriptWords:
    """When each word of the caller's final transcript was said, in order."""

    item_id: str
    words: tuple[SpokenWord, ...]


@dataclass(frozen=True, slots=True)
class TranscriptWordsFailed:
    """The transcript stands, but when its words were said is not known."""

    item_id: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class TranscriptionFailed:
    """The recogniser failed on this item."""

    item_id: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class ResponseStarted:
    """A response begins."""

    response: Response


@dataclass(frozen=True, slots=True)
class OutputStarted:
    """An item of the response exists now: a message with its single content part, or a call."""

    response_id: str
    item: Item
    previous_item_id: str | None


@dataclass(frozen=True, slots=True)
class OutputText:
    """A piece of the answer's text (text modality) or of its transcript (audio modality)."""

    response_id: str
    item_id: str
    text: str


@dataclass(frozen=True, slots=True)
class OutputAudio:
    """A piece of the answer's audio, encoded in the session's output format."""

    response_id: str
    item_id: str
    audio: bytes


@dataclass(frozen=True, slots=True)
class PlaybackCut:
    """Whatever is being played must fall silent now, and what waits to be played is void.

    ``may_go_on``: it is not certain that the caller interrupts; what was not heard may come again.
    Else the response is over, and its own end follows.
    """

    may_go_on: bool = False


@dataclass(frozen=True, slots=True)
class OutputArguments:
    """A piece of a call's arguments."""

    response_id: str
    item_id: str
    text: str


@dataclass(frozen=True, slots=True)
class OutputDone:
    """An item of the response is finished, cut, or abandoned (see ``item.status``)."""

    response_id: str
    item: Item
    previous_item_id: str | None


@dataclass(frozen=True, slots=True)
class ResponseDone:
    """A response has ended, however it ended."""

    response: Response


@dataclass(frozen=True, slots=True)
class TurnTraced:
    """The trace of a finished turn (see app.observe.trace for the fields)."""

    turn: dict[str, Any]


SessionEvent = (
    SpeechStarted
    | SpeechStopped
    | InputCommitted
    | InputCleared
    | IdleTimedOut
    | DtmfReceived
    | ItemAdded
    | ItemDone
    | ItemDeleted
    | ItemTruncated
    | TranscriptionDelta
    | TranscriptionCompleted
    | TranscriptionFailed
    | TranscriptWords
    | TranscriptWordsFailed
    | ResponseStarted
    | OutputStarted
    | OutputText
    | OutputAudio
    | PlaybackCut
    | OutputArguments
    | OutputDone
    | ResponseDone
    | TurnTraced
)

Sink = Callable[[SessionEvent], Awaitable[None]]
