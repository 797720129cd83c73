"""Asterisk AudioSocket: frames of one byte type, two bytes length (big-endian), and the content.

It has no marks and no clear: Asterisk plays what comes, as it comes. So audio is sent at the pace
of its playout, 20 ms a frame, and what was sent is what was heard.
"""

from __future__ import annotations

import uuid

from app.transports.telephony.protocol import (
    AudioReceived,
    HungUp,
    KeyPressed,
    Message,
    PhoneEvent,
    PhoneProtocolError,
    Started,
)
from app.transports.telephony.providers.fields import KEYS
from audio.codecs import AudioFormat

HANG_UP, UUID, DTMF, ERROR = 0x00, 0x01, 0x03, 0xFF
HEADER_LEN = 3
_RATES = {0x10: 8_000, 0x12: 16_000, 0x13: 24_000, 0x16: 48_000}


def frame(kind: int, content: bytes = b"") -> bytes:
    """The bytes of one frame; ``content`` holds at most 65,535."""
    return bytes([kind]) + len(content).to_bytes(2, "big") + content


class AudioSocket:
    """See ``PhoneProtocol``. Answers go out at 8 kHz, which every Asterisk takes."""

    provider = "audiosocket"
    frame_ms = 20
    lead_ms: int | None = 20
    has_marks = False
    input_format = output_format = AudioFormat("pcm16", 8_000)

    @classmethod
    def begin(cls, message: bytes) -> tuple[AudioSocket, Started]:
        """From the first frame, which holds the call's UUID. Raises PhoneProtocolError."""
        if message[0] != UUID or len(message) != HEADER_LEN + 16:
            raise PhoneProtocolError("the first frame is not a UUID")
        return cls(), Started(str(uuid.UUID(bytes=message[HEADER_LEN:])))

    def parse(self, message: Message) -> PhoneEvent | None:
        """See ``PhoneProtocol``. ``message``: one whole frame."""
        assert isinstance(message, bytes), "TCP carries bytes"
        kind, content = message[0], message[HEADER_LEN:]
        if kind == HANG_UP:
            return HungUp("the peer hung up")
        if kind == ERROR:
            return HungUp(f"the peer reports error {content[:8].hex() or 'without a code'}")
        if kind == DTMF:
            key = content.decode("ascii", "replace").upper()
            if key not in KEYS:
                raise PhoneProtocolError("a DTMF frame without a key of a phone")
            return KeyPressed(key)
        if kind not in _RATES:
            return None
        if len(content) % 2:
            raise PhoneProtocolError("audio that ends in the middle of a sample")
        if _RATES[kind] != self.input_format.rate:
            raise PhoneProtocolError("audio of another rate than 8 kHz (slin)")
        return AudioReceived(content)

    def media(self, payload: bytes) -> Message:
        """See ``PhoneProtocol``."""
        return frame(0x10, payload)

    def mark(self, name: str) -> Message | None:
        """See ``PhoneProtocol``."""
        return None

    def clear(self) -> Message | None:
        """See ``PhoneProtocol``."""
        return None

    def hang_up(self) -> Message | None:
        """See ``PhoneProtocol``."""
        return frame(HANG_UP)
