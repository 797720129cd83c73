"""An EventChannel over Starlette's WebSocket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from starlette.websockets import WebSocket, WebSocketDisconnect

from app.transports.base import ChannelClosed

logger = logging.getLogger(__name__)

# Audio is sent at most `playout_lead_ms` ahead, so a client that reads has far less waiting.
MAX_QUEUED_BYTES = 8 * 1024 * 1024
MAX_QUEUED_S = 15.0
# How long a closing channel waits for a peer to take the rest.
CLOSE_TIMEOUT_S = 2.0
# RFC 6455, 5.5: a control frame carries 125 bytes, two of them the code.
_MAX_REASON_BYTES = 123


class WebSocketChannel:
    """Bounded outgoing queue with one writer task. Use as an async context manager.

    Overflow rule: a peer that leaves more than ``max_queued_bytes`` unread, or anything for longer
    than ``max_queued_s``, is closed with 1013; nothing is dropped from the middle of a stream.
    """

    def __init__(
        self,
        websocket: WebSocket,
        *,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
        max_queued_s: float = MAX_QUEUED_S,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._websocket = websocket
        self._max_queued_bytes = max_queued_bytes
        self._max_queued_s = max_queued_s
        self._clock_s = clock_s
        self._queue: deque[tuple[float, str | bytes]] = deque()
        self._queued_bytes = 0
        self._changed = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._closed: ChannelClosed | None = None
        self._finishing = False
        self._receiving: asyncio.Timeout | None = None

    async def __aenter__(self) -> WebSocketChannel:
        self._writer = asyncio.create_task(self._write(), name="websocket writer")
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close(1011 if exc_type else 1000, "internal error" if exc_type else "")

    async def receive(self) -> str | bytes:
        """See ``EventChannel``."""
        self._raise_if_closed()
        try:
            async with asyncio.timeout(None) as self._receiving:
                message = await self._websocket.receive()
        except TimeoutError:
            self._raise_if_closed()
            raise
        finally:
            self._receiving = None
        if message["type"] == "websocket.disconnect":
            self._fail(ChannelClosed(message.get("code") or 1006, message.get("reason") or ""))
            self._raise_if_closed()
        text: str | None = message.get("text")
        data: bytes | None = message.get("bytes")
        return text if text is not None else data or b""

    async def send(self, text: str | bytes) -> None:
        """See ``EventChannel``; ``bytes`` become a binary message."""
        self._raise_if_closed()
        now_s = self._clock_s()
        waited_s = now_s - self._queue[0][0] if self._queue else 0.0
        # Characters, not bytes: what we send in bulk is base64.
        if self._queued_bytes + len(text) > self._max_queued_bytes or waited_s > self._max_queued_s:
            logger.warning(
                "client does not read: %d bytes queued for %.1f s", self._queued_bytes, waited_s
            )
            self._fail(ChannelClosed(1013, "the client does not read what it is sent"))
            self._raise_if_closed()
        self._queue.append((now_s, text))
        self._queued_bytes += len(text)
        self._changed.set()

    async def close(self, code: int, reason: str) -> None:
        """See ``EventChannel``. Takes at most ``CLOSE_TIMEOUT_S``."""
        self._finishing = True
        self._changed.set()
        writer, self._writer = self._writer, None
        if writer is None:
            return
        if self._closed is None:
            await asyncio.wait({writer}, timeout=CLOSE_TIMEOUT_S)
        writer.cancel()
        await asyncio.wait({writer})
        final = self._closed or ChannelClosed(code, reason)
        if self._closed is not None and self._closed.code != 1013:
            return  # the peer has closed, or is gone
        self._fail(final)
        # A peer that does not read (1013) is too far behind to see the close frame in time.
        with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError, TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._websocket.close(final.code, _short(final.reason))

    def _raise_if_closed(self) -> None:
        if self._closed is not None:
            raise ChannelClosed(self._closed.code, self._closed.reason)

    async def _write(self) -> None:
        try:
            while True:
                while not self._queue:
                    if self._finishing:
                        return
                    self._changed.clear()
                    await self._changed.wait()
                # The message stays first in the queue while it is written: its age counts.
                text = self._queue[0][1]
                if isinstance(text, str):
                    await self._websocket.send_text(text)
                else:
                    await self._websocket.send_bytes(text)
                if self._queue:
                    self._queue.popleft()
                    self._queued_bytes -= len(text)
        except (WebSocketDisconnect, RuntimeError, OSError):
            # Starlette raises RuntimeError when the peer closed between our check and the send.
            self._fail(ChannelClosed(1006, "the connection was lost"))

    def _fail(self, closed: ChannelClosed) -> None:
        """Nothing more is sent or received; wakes a waiting ``receive``."""
        self._queue.clear()
        self._queued_bytes = 0
        if self._closed is not None:
            return
        self._closed = closed
        if self._receiving is not None:
            self._receiving.reschedule(asyncio.get_running_loop().time())


def _short(reason: str) -> str:
    return reason.encode()[:_MAX_REASON_BYTES].decode(errors="ignore")
