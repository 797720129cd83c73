"""Who is calling: the provider is told by the first message that says something."""

from __future__ import annotations

from app.transports.telephony.protocol import Message, PhoneProtocol, PhoneProtocolError, Started
from app.transports.telephony.providers import fields
from app.transports.telephony.providers.exotel import Exotel
from app.transports.telephony.providers.plivo import Plivo
from app.transports.telephony.providers.telnyx import Telnyx
from app.transports.telephony.providers.twilio import Twilio
from app.transports.telephony.providers.vonage import Vonage


def detect(message: Message) -> tuple[PhoneProtocol, Started] | None:
    """The protocol of a WebSocket stream; None for ``connected``, which only announces a start.

    Raises PhoneProtocolError for anything that begins none of the streams we know.
    """
    data = fields.parse_object(message)
    event = data.get("event")
    if event == "connected":
        return None
    if event == "websocket:connected":
        return Vonage.begin(data)
    if event != "start":
        raise PhoneProtocolError(
            f"the stream begins with {fields.shown(event)}, expected 'connected' or 'start'"
        )
    start = fields.inner(data, "start")
    if "streamSid" in start:
        return Twilio.begin(data)
    if "streamId" in start:
        return Plivo.begin(data)
    if "stream_id" in data:
        return Telnyx.begin(data)
    if "stream_sid" in data:
        return Exotel.begin(data)
    raise PhoneProtocolError("'start' names its stream as no provider does that is known here")
