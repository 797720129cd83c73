"""The shape that Twilio gave its Media Streams, and that Telnyx and Exotel took over.

Other names for the fields, the same events: media, dtmf, mark, stop.
"""

from __future__ import annotations

from app.transports.telephony.protocol import (
    AudioReceived,
    HungUp,
    MarkReached,
    Message,
    PhoneEvent,
    PhoneProtocolError,
)
from app.transports.telephony.providers import fields
from audio.codecs import PCMU_8K, AudioFormat


class JsonStream:
    """See ``PhoneProtocol``. ``stream``: the field that names the stream in what is sent."""

    provider = ""
    frame_ms = 20
    lead_ms: int | None = None
    has_marks = True

    def __init__(self, stream: dict[str, str], audio_format: AudioFormat = PCMU_8K) -> None:
        self.input_format = self.output_format = audio_format
        self._stream = stream

    def parse(self, message: Message) -> PhoneEvent | None:
        """See ``PhoneProtocol``."""
        data = fields.parse_object(message)
        match data.get("event"):
            case "media":
                media = fields.inner(data, "media")
                if media.get("track") in ("outbound", "outbound_track"):
                    return None  # our own voice
                return AudioReceived(
                    self._checked(fields.payload(media)), fields.number(media, "chunk")
                )
            case "dtmf":
                return fields.key(fields.inner(data, "dtmf"))
            case "mark":
                return MarkReached(fields.text(fields.inner(data, "mark"), "name"))
            case "stop":
                return HungUp("the stream was stopped")
            case "error":
                told = fields.shown(data.get("payload"))
                raise PhoneProtocolError(f"the provider reports an error: {told}")
        return None  # a provider may add events

    def _checked(self, payload: bytes) -> bytes:
        if len(payload) % self.input_format.sample_len:
            raise PhoneProtocolError("audio that ends in the middle of a sample")
        return payload

    def media(self, payload: bytes) -> Message:
        """See ``PhoneProtocol``."""
        return fields.encoded(event="media", **self._stream, media={"payload": payload})

    def mark(self, name: str) -> Message | None:
        """See ``PhoneProtocol``."""
        return fields.encoded(event="mark", **self._stream, mark={"name": name})

    def clear(self) -> Message | None:
        """See ``PhoneProtocol``."""
        return fields.encoded(event="clear", **self._stream)

    def hang_up(self) -> Message | None:
        """See ``PhoneProtocol``. The provider goes on with what comes behind the stream."""
        return None
