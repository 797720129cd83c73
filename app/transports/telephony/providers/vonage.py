"""Vonage Voice API WebSockets: PCM16 in binary messages of 20 ms, JSON for everything else."""

from __future__ import annotations

from app.transports.telephony.protocol import (
    AudioReceived,
    MarkReached,
    Message,
    PhoneEvent,
    PhoneProtocolError,
    Started,
)
from app.transports.telephony.providers import fields
from audio.codecs import AudioFormat

_FORMATS = {f"audio/l16;rate={rate}": AudioFormat("pcm16", rate) for rate in (8000, 16000, 24000)}


class Vonage:
    """See ``PhoneProtocol``. A mark is a ``notify`` here: it comes back when its turn has come."""

    provider = "vonage"
    frame_ms = 20
    lead_ms: int | None = None
    has_marks = True

    def __init__(self, audio_format: AudioFormat) -> None:
        self.input_format = self.output_format = audio_format

    @classmethod
    def begin(cls, message: fields.Object) -> tuple[Vonage, Started]:
        """From ``websocket:connected``, which holds the headers of the NCCO as further fields.

        Raises PhoneProtocolError.
        """
        content_type = fields.text(message, "content-type").replace(" ", "")
        if content_type not in _FORMATS:
            raise PhoneProtocolError(
                f"'content-type' is {fields.shown(content_type)}, expected {' or '.join(_FORMATS)}"
            )
        started = Started(
            fields.text(message, "uuid", fields.text(message, "call_uuid", "")),
            fields.text(message, "application_id", ""),
            fields.parameters({"it": message}, "it"),
        )
        return cls(_FORMATS[content_type]), started

    def parse(self, message: Message) -> PhoneEvent | None:
        """See ``PhoneProtocol``."""
        if isinstance(message, bytes):
            if len(message) % 2 or len(message) > fields.MAX_MESSAGE_CHARS:
                raise PhoneProtocolError("audio that is no PCM16, or too long")
            return AudioReceived(message)
        data = fields.parse_object(message)
        match data.get("event"):
            case "websocket:dtmf":
                return fields.key(data)
            case "websocket:notify":
                return MarkReached(fields.text(fields.inner(data, "payload"), "name"))
        return None

    def media(self, payload: bytes) -> Message:
        """See ``PhoneProtocol``."""
        return payload

    def mark(self, name: str) -> Message | None:
        """See ``PhoneProtocol``."""
        return fields.encoded(action="notify", payload={"name": name})

    def clear(self) -> Message | None:
        """See ``PhoneProtocol``."""
        return fields.encoded(action="clear")

    def hang_up(self) -> Message | None:
        """See ``PhoneProtocol``."""
        return None
