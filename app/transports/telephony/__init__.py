"""Phone calls: the media protocols of providers, and the line that they have in common."""

from app.transports.telephony.detect import detect
from app.transports.telephony.line import PhoneLine, Wire
from app.transports.telephony.protocol import PhoneProtocol, PhoneProtocolError, Started
from app.transports.telephony.providers.audiosocket import AudioSocket
from app.transports.telephony.tcp import TcpWire

__all__ = [
    "AudioSocket",
    "PhoneLine",
    "PhoneProtocol",
    "PhoneProtocolError",
    "Started",
    "TcpWire",
    "Wire",
    "detect",
]
