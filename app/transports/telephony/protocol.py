"""What the protocols of phone providers have in common: events in, messages out. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from audio.codecs import AudioFormat

Message = str | bytes


class PhoneProtocolError(Exception):
    """The peer sent something that its protocol does not have. The text is for log and peer."""


@dataclass(frozen=True, slots=True)
class Started:
    """The call is there. ``parameters``: what whoever set the stream up gave it along."""

    call_id: str
    account: str = ""
    parameters: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AudioReceived:
    """Audio of the caller in the protocol's input format. ``chunk``: its number, where it has one.

    Numbers go up by one; the order in which they come is not promised by every provider.
    """

    payload: bytes
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class KeyPressed:
    """One of ``0-9 * # A-D`` (DTMF)."""

    key: str


@dataclass(frozen=True, slots=True)
class MarkReached:
    """What was sent before the mark of this name was played, or thrown away by a clear."""

    name: str


@dataclass(frozen=True, slots=True)
class HungUp:
    """The caller, or the provider, has ended the call."""

    reason: str


PhoneEvent = AudioReceived | KeyPressed | MarkReached | HungUp


class PhoneProtocol(Protocol):
    """One call's protocol. Made from the message that starts the stream.

    ``frame_ms``: how much audio one message to the provider holds. ``lead_ms``: how far ahead of
    its playout audio may be sent, as far as the protocol has a say; None: as the server likes.
    """

    provider: str
    input_format: AudioFormat
    output_format: AudioFormat
    frame_ms: int
    lead_ms: int | None
    has_marks: bool

    def parse(self, message: Message) -> PhoneEvent | None:
        """None for what does not matter to a call. Raises PhoneProtocolError."""
        ...

    def media(self, payload: bytes) -> Message:
        """Audio to be played behind what was sent before, in the output format."""
        ...

    def mark(self, name: str) -> Message | None:
        """To be given back when all before it was played; None where there is no such thing."""
        ...

    def clear(self) -> Message | None:
        """Throw away what was not played; None where there is no such thing."""
        ...

    def hang_up(self) -> Message | None:
        """Goodbye, before the connection is closed; None where closing says it all."""
        ...
