"""Exotel's voicebot stream: PCM16 in messages of 100 ms, always a multiple of 320 bytes."""

from __future__ import annotations

from app.transports.telephony.protocol import PhoneProtocolError, Started
from app.transports.telephony.providers import fields
from app.transports.telephony.providers.json_stream import JsonStream
from audio.codecs import AudioFormat

_RATES = (8_000, 16_000, 24_000)


class Exotel(JsonStream):
    """See ``PhoneProtocol``."""

    provider = "exotel"
    frame_ms = 100

    @classmethod
    def begin(cls, message: fields.Object) -> tuple[Exotel, Started]:
        """From the message ``start``. Raises PhoneProtocolError."""
        start = fields.inner(message, "start")
        rate = fields.number(fields.inner(start, "media_format"), "sample_rate")
        if rate not in _RATES:
            raise PhoneProtocolError(
                f"'media_format.sample_rate' is {rate}, expected 8000, 16000 or 24000"
            )
        started = Started(
            fields.text(start, "call_sid"),
            fields.text(start, "account_sid"),
            fields.parameters(start, "custom_parameters"),
        )
        stream_sid = fields.text(message, "stream_sid")
        return cls({"stream_sid": stream_sid}, AudioFormat("pcm16", rate)), started
