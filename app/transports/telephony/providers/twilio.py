"""Twilio Media Streams, bidirectional (``<Connect><Stream>``): mu-law at 8 kHz in 20 ms."""

from __future__ import annotations

from app.transports.telephony.protocol import PhoneProtocolError, Started
from app.transports.telephony.providers import fields
from app.transports.telephony.providers.json_stream import JsonStream


class Twilio(JsonStream):
    """See ``PhoneProtocol``."""

    provider = "twilio"

    @classmethod
    def begin(cls, message: fields.Object) -> tuple[Twilio, Started]:
        """From the message ``start``. Raises PhoneProtocolError."""
        start = fields.inner(message, "start")
        encoding = fields.inner(start, "mediaFormat").get("encoding")
        if encoding != "audio/x-mulaw":
            raise PhoneProtocolError(
                f"'mediaFormat.encoding' is {fields.shown(encoding)}, expected audio/x-mulaw"
            )
        started = Started(
            fields.text(start, "callSid"),
            fields.text(start, "accountSid"),
            fields.parameters(start, "customParameters"),
        )
        return cls({"streamSid": fields.text(start, "streamSid")}), started
