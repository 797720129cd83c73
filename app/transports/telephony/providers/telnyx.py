"""Telnyx media streaming in mode ``rtp``: mu-law, A-law or L16. Chunks may come out of order."""

from __future__ import annotations

from app.transports.telephony.protocol import PhoneProtocolError, Started
from app.transports.telephony.providers import fields
from app.transports.telephony.providers.json_stream import JsonStream
from audio.codecs import PCMA_8K, PCMU_8K, AudioFormat

_FORMATS = {
    ("PCMU", 8_000): PCMU_8K,
    ("PCMA", 8_000): PCMA_8K,
    ("L16", 16_000): AudioFormat("pcm16", 16_000),
}


class Telnyx(JsonStream):
    """See ``PhoneProtocol``. Messages to Telnyx do not name the stream."""

    provider = "telnyx"

    @classmethod
    def begin(cls, message: fields.Object) -> tuple[Telnyx, Started]:
        """From the message ``start``. Raises PhoneProtocolError."""
        start = fields.inner(message, "start")
        media_format = fields.inner(start, "media_format")
        encoding = fields.text(media_format, "encoding")
        rate = fields.number(media_format, "sample_rate")
        if (encoding, rate) not in _FORMATS:
            raise PhoneProtocolError(
                f"'media_format' is {fields.shown(encoding)} at {rate}, expected PCMU or PCMA at "
                "8000, or L16 at 16000"
            )
        started = Started(
            fields.text(start, "call_control_id"),
            fields.text(start, "user_id", ""),
            fields.parameters(start, "custom_parameters"),
        )
        return cls({}, _FORMATS[encoding, rate or 0]), started
