"""AudioSocket frames over a TCP connection."""

from __future__ import annotations

import asyncio
import contextlib

from app.transports.base import ChannelClosed
from app.transports.telephony.protocol import Message
from app.transports.telephony.providers.audiosocket import HEADER_LEN

# Ten seconds of audio that the peer has not read. Overflow rule: the connection is closed.
MAX_UNREAD_BYTES = 160_000
# A frame of 20 ms at 48 kHz has 1,920 bytes.
MAX_FRAME_BYTES = 16 * 1024
_CLOSE_TIMEOUT_S = 2.0


class TcpWire:
    """See ``Wire``. Whoever makes one closes it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._closed: ChannelClosed | None = None

    async def receive(self) -> Message:
        """One whole frame, with its header. Raises ChannelClosed."""
        try:
            header = await self._reader.readexactly(HEADER_LEN)
            length = int.from_bytes(header[1:], "big")
            if length > MAX_FRAME_BYTES:
                raise ChannelClosed(1009, f"a frame of more than {MAX_FRAME_BYTES} bytes")
            return header + await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise self._closed or ChannelClosed(1006, "the connection was lost") from error

    async def send(self, message: Message) -> None:
        """See ``Wire``."""
        assert isinstance(message, bytes), "TCP carries bytes"
        if self._closed is not None or self._writer.is_closing():
            raise self._closed or ChannelClosed(1006, "the connection was lost")
        if self._writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self._closed = ChannelClosed(1013, "the peer does not read what it is sent")
            raise self._closed
        self._writer.write(message)

    async def close(self, code: int, reason: str) -> None:
        """See ``Wire``."""
        if self._closed is None:
            self._closed = ChannelClosed(code, reason)
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._writer.wait_closed()
                return
        self._writer.transport.abort()  # a peer that does not read
