"""Plivo audio streams, bidirectional: mu-law at 8 kHz, or PCM16 at 8 or 16 kHz."""

from __future__ import annotations

from app.transports.telephony.protocol import (
    MarkReached,
    Message,
    PhoneEvent,
    PhoneProtocolError,
    Started,
)
from app.transports.telephony.providers import fields
from app.transports.telephony.providers.json_stream import JsonStream
from audio.codecs import PCMU_8K, AudioFormat

_FORMATS = {
    ("audio/x-mulaw", 8_000): PCMU_8K,
    ("audio/x-l16", 8_000): AudioFormat("pcm16", 8_000),
    ("audio/x-l16", 16_000): AudioFormat("pcm16", 16_000),
}


class Plivo(JsonStream):
    """See ``PhoneProtocol``. What others call a mark is a checkpoint here."""

    provider = "plivo"

    def __init__(self, stream_id: str, encoding: str, audio_format: AudioFormat) -> None:
        super().__init__({"streamId": stream_id}, audio_format)
        self._encoding = encoding

    @classmethod
    def begin(cls, message: fields.Object) -> tuple[Plivo, Started]:
        """From the message ``start``. Raises PhoneProtocolError."""
        start = fields.inner(message, "start")
        media_format = fields.inner(start, "mediaFormat")
        encoding = fields.text(media_format, "encoding")
        rate = fields.number(media_format, "sampleRate")
        if (encoding, rate) not in _FORMATS:
            raise PhoneProtocolError(
                f"'mediaFormat' is {fields.shown(encoding)} at {rate}, expected mu-law at 8000, or "
                "L16 at 8000 or 16000"
            )
        started = Started(
            fields.text(start, "callId"),
            fields.text(start, "accountId"),
            _headers(message.get("extra_headers")),
        )
        stream_id = fields.text(start, "streamId")
        return cls(stream_id, encoding, _FORMATS[encoding, rate or 0]), started

    def parse(self, message: Message) -> PhoneEvent | None:
        """See ``PhoneProtocol``."""
        data = fields.parse_object(message)
        if data.get("event") == "playedStream":
            return MarkReached(fields.text(data, "name"))
        return super().parse(message)

    def media(self, payload: bytes) -> Message:
        """See ``PhoneProtocol``."""
        media = {
            "contentType": self._encoding,
            "sampleRate": self.output_format.rate,
            "payload": payload,
        }
        return fields.encoded(event="playAudio", media=media)

    def mark(self, name: str) -> Message | None:
        """See ``PhoneProtocol``."""
        return fields.encoded(event="checkpoint", **self._stream, name=name)

    def clear(self) -> Message | None:
        """See ``PhoneProtocol``."""
        return fields.encoded(event="clearAudio", **self._stream)


def _headers(value: object) -> dict[str, str]:
    """``{X-PH-token: t; a: b}`` or a JSON object; names without the prefix that Plivo adds."""
    found: dict[str, str] = {}
    if isinstance(value, dict):
        found = fields.parameters({"it": value}, "it")
    elif isinstance(value, str) and len(value) <= fields.MAX_MESSAGE_CHARS:
        for pair in value.strip("{} ").replace(",", ";").split(";"):
            name, _, content = pair.replace("=", ":").partition(":")
            found[name.strip(" \"'")] = content.strip(" \"'")
    return {name.removeprefix("X-PH-"): content for name, content in found.items()}
