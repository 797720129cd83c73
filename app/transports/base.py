"""What the protocol handlers ask of a transport."""

from __future__ import annotations

from typing import Protocol

from app.conversation import OutputAudio


class ChannelClosed(Exception):
    """The channel is gone: closed by the peer, by us, or by a broken connection.

    ``code`` is a WebSocket close code (RFC 6455, 7.4); 1006 when there was no closing handshake.
    """

    def __init__(self, code: int, reason: str = "") -> None:
        super().__init__(f"{code} {reason}".rstrip())
        self.code = code
        self.reason = reason


class EventChannel(Protocol):
    """Ordered messages in both directions: a WebSocket, or the data channel of a WebRTC call."""

    async def receive(self) -> str | bytes:
        """The next message; ``bytes`` if it is a binary one. Raises ChannelClosed."""
        ...

    async def send(self, text: str) -> None:
        """Queue a message; does not wait for the peer to read it. Raises ChannelClosed."""
        ...

    async def close(self, code: int, reason: str) -> None:
        """Send what is queued, then close. Closing again does nothing."""
        ...


class AudioOut(Protocol):
    """Where the answers' audio goes when the transport carries audio apart from the events."""

    async def play(self, audio: OutputAudio) -> None:
        """Queue a piece of an answer behind what is queued already."""
        ...

    async def clear(self) -> None:
        """Throw away what has not been played, at the client's wish."""
        ...
