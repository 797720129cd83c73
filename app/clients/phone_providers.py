"""Phone providers as a server meets them: what each sends for a call, and what it makes of answers.

The other side of ``app.transports.telephony``, for ``parley call``: written from the providers'
documentation, not from our reading of it, so that a misreading does not cancel out.
"""

from __future__ import annotations

import base64
import json
import uuid
from dataclasses import dataclass
from typing import Any

from audio.codecs import PCMU_8K, AudioFormat

Message = str | bytes


@dataclass(frozen=True, slots=True)
class Play:
    """The server has sent audio, in the peer's format."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class Mark:
    """To be given back (``reply``) when all audio before it was played, or thrown away."""

    reply: Message


@dataclass(frozen=True, slots=True)
class Clear:
    """Throw away what was not played."""


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The server hangs up."""


Order = Play | Mark | Clear | Goodbye


class PeerError(Exception):
    """The server sent something that this provider would not understand."""


class Peer:
    """One call at Twilio, and the base of the others. ``token``: what the stream brings along."""

    frame_ms = 20
    format: AudioFormat = PCMU_8K

    def __init__(self, call_id: str, token: str = "") -> None:
        self.call_id = call_id
        self.stream_id = f"MZ{uuid.uuid4().hex}"
        self.token = token
        self._sequence = 0

    def hello(self) -> list[Message]:
        """The messages with which a stream begins."""
        start = {
            "streamSid": self.stream_id,
            "accountSid": "AC00000000000000000000000000000000",
            "callSid": self.call_id,
            "tracks": ["inbound"],
            "customParameters": {"token": self.token} if self.token else {},
            "mediaFormat": {"encoding": "audio/x-mulaw", "sampleRate": 8000, "channels": 1},
        }
        return [
            json.dumps({"event": "connected", "protocol": "Call", "version": "1.0.0"}),
            self._json(event="start", start=start),
        ]

    def audio(self, payload: bytes, number: int) -> Message:
        """The ``number``-th frame (from 0) of the caller's voice."""
        media = {
            "track": "inbound",
            "chunk": str(number + 1),
            "timestamp": str(number * self.frame_ms),
            "payload": base64.b64encode(payload).decode(),
        }
        return self._json(event="media", media=media)

    def key(self, key: str) -> Message:
        """The caller presses a key."""
        return self._json(event="dtmf", dtmf={"track": "inbound_track", "digit": key})

    def goodbye(self) -> Message | None:
        """The caller hangs up; afterwards the connection is closed."""
        return self._json(event="stop", stop={"callSid": self.call_id})

    def read(self, message: Message) -> Order:
        """What the server wants. Raises PeerError."""
        data = _object(message)
        try:
            self._check_stream(data)
            match data["event"]:
                case "media":
                    return Play(base64.b64decode(data["media"]["payload"], validate=True))
                case "mark":
                    return Mark(self._json(event="mark", mark={"name": data["mark"]["name"]}))
                case "clear":
                    return Clear()
        except (KeyError, TypeError, ValueError) as error:
            raise PeerError(f"a malformed message: {error!r}") from error
        raise PeerError(f"no event of this name: {data['event']!r}")

    def _check_stream(self, data: dict[str, Any]) -> None:
        if data["streamSid"] != self.stream_id:
            raise PeerError("a message for another stream")

    def _json(self, **fields: Any) -> str:
        self._sequence += 1
        names = {"sequenceNumber": str(self._sequence), "streamSid": self.stream_id}
        return json.dumps(fields | names)


class TelnyxPeer(Peer):
    """Snake case, and a stream that messages to it do not name."""

    def hello(self) -> list[Message]:
        """See ``Peer``."""
        start = {
            "call_control_id": self.call_id,
            "user_id": "00000000-0000-0000-0000-000000000000",
            "custom_parameters": {"token": self.token} if self.token else {},
            "media_format": {"encoding": "PCMU", "sample_rate": 8000, "channels": 1},
        }
        connected = json.dumps({"event": "connected", "version": "1.0.0"})
        return [connected, self._json(event="start", start=start)]

    def _check_stream(self, data: dict[str, Any]) -> None:
        pass

    def _json(self, **fields: Any) -> str:
        self._sequence += 1
        names = {"sequence_number": str(self._sequence), "stream_id": self.stream_id}
        return json.dumps(fields | names)


class PlivoPeer(Peer):
    """Audio comes as ``playAudio``, marks as ``checkpoint``."""

    def hello(self) -> list[Message]:
        """See ``Peer``."""
        start = {
            "callId": self.call_id,
            "streamId": self.stream_id,
            "accountId": "MA0000000000000000000",
            "tracks": ["inbound"],
            "mediaFormat": {"encoding": "audio/x-mulaw", "sampleRate": 8000},
        }
        headers = f"{{X-PH-token: {self.token}}}" if self.token else "{}"
        return [self._json(event="start", start=start, extra_headers=headers)]

    def read(self, message: Message) -> Order:
        """See ``Peer``."""
        data = _object(message)
        try:
            match data["event"]:
                case "playAudio":
                    media = data["media"]
                    if (media["contentType"], media["sampleRate"]) != ("audio/x-mulaw", 8000):
                        raise PeerError("audio of another format")
                    return Play(base64.b64decode(media["payload"], validate=True))
                case "checkpoint":
                    return Mark(self._json(event="playedStream", name=data["name"]))
                case "clearAudio":
                    return Clear()
        except (KeyError, TypeError, ValueError) as error:
            raise PeerError(f"a malformed message: {error!r}") from error
        raise PeerError(f"no event of this name: {data['event']!r}")

    def _json(self, **fields: Any) -> str:
        self._sequence += 1
        return json.dumps(fields | {"sequenceNumber": self._sequence, "streamId": self.stream_id})


class ExotelPeer(Peer):
    """PCM16 in frames of 100 ms."""

    frame_ms = 100
    format = AudioFormat("pcm16", 8_000)

    def hello(self) -> list[Message]:
        """See ``Peer``."""
        start = {
            "stream_sid": self.stream_id,
            "call_sid": self.call_id,
            "account_sid": "parley",
            "custom_parameters": {"token": self.token} if self.token else {},
            "media_format": {"encoding": "base64", "sample_rate": "8000", "bit_rate": "128kbps"},
        }
        return [json.dumps({"event": "connected"}), self._json(event="start", start=start)]

    def read(self, message: Message) -> Order:
        """See ``Peer``."""
        order = super().read(message)
        if isinstance(order, Play) and len(order.payload) % 320:
            raise PeerError("audio that is no multiple of 320 bytes")
        return order

    def _check_stream(self, data: dict[str, Any]) -> None:
        if data["stream_sid"] != self.stream_id:
            raise PeerError("a message for another stream")

    def _json(self, **fields: Any) -> str:
        self._sequence += 1
        names = {"sequence_number": str(self._sequence), "stream_sid": self.stream_id}
        return json.dumps(fields | names)


class VonagePeer(Peer):
    """Binary PCM16 at 16 kHz; the headers of the call lie in the first message."""

    format = AudioFormat("pcm16", 16_000)

    def hello(self) -> list[Message]:
        """See ``Peer``."""
        first = {"event": "websocket:connected", "content-type": "audio/l16;rate=16000"}
        return [json.dumps(first | {"uuid": self.call_id, "token": self.token})]

    def audio(self, payload: bytes, number: int) -> Message:
        """See ``Peer``."""
        return payload

    def key(self, key: str) -> Message:
        """See ``Peer``."""
        return json.dumps({"event": "websocket:dtmf", "digit": key, "duration": 260})

    def goodbye(self) -> Message | None:
        """See ``Peer``."""
        return None

    def read(self, message: Message) -> Order:
        """See ``Peer``."""
        if isinstance(message, bytes):
            if len(message) != 640:
                raise PeerError(f"audio of {len(message)} bytes: 20 ms have 640")
            return Play(message)
        data = _object(message)
        match data.get("action"):
            case "clear":
                return Clear()
            case "notify":
                back = {"event": "websocket:notify", "payload": data.get("payload")}
                return Mark(json.dumps(back))
        raise PeerError(f"no action of this name: {data.get('action')!r}")


class AudioSocketPeer(Peer):
    """An Asterisk: frames over TCP, signed linear at 8 kHz."""

    format = AudioFormat("pcm16", 8_000)

    def hello(self) -> list[Message]:
        """See ``Peer``."""
        return [_frame(0x01, uuid.UUID(self.call_id).bytes)]

    def audio(self, payload: bytes, number: int) -> Message:
        """See ``Peer``."""
        return _frame(0x10, payload)

    def key(self, key: str) -> Message:
        """See ``Peer``."""
        return _frame(0x03, key.encode())

    def goodbye(self) -> Message | None:
        """See ``Peer``."""
        return _frame(0x00)

    def read(self, message: Message) -> Order:
        """See ``Peer``."""
        if not isinstance(message, bytes) or len(message) < 3:
            raise PeerError("no frame")
        kind, content = message[0], message[3:]
        if kind == 0x00:
            return Goodbye()
        if kind != 0x10 or len(content) != 320:
            raise PeerError(f"a frame of type {kind:#x} with {len(content)} bytes")
        return Play(content)


PEERS: dict[str, type[Peer]] = {
    "twilio": Peer,
    "telnyx": TelnyxPeer,
    "plivo": PlivoPeer,
    "exotel": ExotelPeer,
    "vonage": VonagePeer,
    "audiosocket": AudioSocketPeer,
}


def new_call_id(provider: str) -> str:
    """As the provider would name a call."""
    return f"CA{uuid.uuid4().hex}" if provider == "twilio" else str(uuid.uuid4())


def _frame(kind: int, content: bytes = b"") -> bytes:
    return bytes([kind, len(content) >> 8, len(content) & 0xFF]) + content


def _object(message: Message) -> dict[str, Any]:
    if isinstance(message, bytes):
        raise PeerError("a binary message")
    try:
        data = json.loads(message)
    except ValueError as error:
        raise PeerError("a message that is not JSON") from error
    if not isinstance(data, dict):
        raise PeerError("a message that is not a JSON object")
    return data
