"""One phone call's line: a provider's messages on one side, audio and keys on the other.

It is an ``EventChannel``, one without a client: the caller sends no events, and whoever attaches to
the call hears them all. Closing it hangs up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from app.clock import MonotonicClock
from app.transports.base import ChannelClosed
from app.transports.telephony.audio import PhoneAudio
from app.transports.telephony.protocol import (
    AudioReceived,
    HungUp,
    KeyPressed,
    MarkReached,
    Message,
    PhoneProtocol,
    PhoneProtocolError,
)

logger = logging.getLogger(__name__)

# Messages that make no sense are passed over, up to so many.
_MAX_ERRORS = 20
# A line carries the caller's silence as well. One that carries nothing for so long is dead, and
# nobody would tell: a TCP connection to a machine that is gone stays open.
SILENT_LINE_S = 60.0


class Wire(Protocol):
    """What carries a provider's messages: a WebSocket, or a TCP connection."""

    async def receive(self) -> Message:
        """The next message. Raises ChannelClosed."""
        ...

    async def send(self, message: Message) -> None:
        """Queue a message. Raises ChannelClosed."""
        ...

    async def close(self, code: int, reason: str) -> None:
        """Send what is queued, then close. Closing again does nothing."""
        ...


class PhoneLine:
    """See the module's docstring. An async context manager: outside of it nothing runs.

    ``on_key`` hears of each key that the caller presses. ``pace`` is awaited with the length of
    each message.
    """

    def __init__(
        self,
        wire: Wire,
        protocol: PhoneProtocol,
        *,
        lead_ms: int,
        pace: Callable[[int], Any] | None = None,
    ) -> None:
        self.protocol = protocol
        self.on_key: Callable[[str], None] = lambda key: None
        self._clock = MonotonicClock()
        self.audio = PhoneAudio(protocol, self._clock, lead_ms=lead_ms)
        self._wire = wire
        self._pace = pace
        self._num_errors = 0
        self._closed: ChannelClosed | None = None
        self._ended = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> PhoneLine:
        self._tasks = [
            asyncio.create_task(self._read(), name="phone reader"),
            asyncio.create_task(self._write(), name="phone writer"),
        ]
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close(1011 if exc_type else 1000, "internal error" if exc_type else "")
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                logger.error("the phone line failed", exc_info=result)
        quality = {"missing": self.audio.num_missing, "dropped": self.audio.num_dropped}
        logger.info("phone line closed", extra=quality)

    # --- EventChannel ---

    async def receive(self) -> str | bytes:
        """Returns never; raises ChannelClosed when the call has ended."""
        await self._ended.wait()
        assert self._closed is not None
        raise ChannelClosed(self._closed.code, self._closed.reason)

    async def send(self, text: str) -> None:
        """Events are for those who attach; a phone has no use for them."""

    async def close(self, code: int, reason: str) -> None:
        """Hang up. What was not heard by now is not heard any more."""
        if self._closed is None:
            self._fail(ChannelClosed(code, reason))
            if (goodbye := self.protocol.hang_up()) is not None:
                with contextlib.suppress(ChannelClosed):
                    await self._wire.send(goodbye)
        final = self._closed or ChannelClosed(code, reason)
        await self._wire.close(final.code, final.reason)

    # --- the side of the provider ---

    async def _read(self) -> None:
        try:
            while self._closed is None:
                async with asyncio.timeout(SILENT_LINE_S):
                    message = await self._wire.receive()
                if self._pace is not None:
                    await self._pace(len(message))
                self._take(message)
        except ChannelClosed as closed:
            self._fail(closed)
        except TimeoutError:
            logger.warning("nothing came over the phone line for %g s", SILENT_LINE_S)
            self._fail(ChannelClosed(1001, f"nothing came for {SILENT_LINE_S:g} s"))

    def _take(self, message: Message) -> None:
        try:
            event = self.protocol.parse(message)
        except PhoneProtocolError as error:
            self._num_errors += 1
            logger.info("phone message passed over: %s", error)
            if self._num_errors > _MAX_ERRORS:
                self._fail(ChannelClosed(1008, "too many messages that make no sense"))
            return
        match event:
            case AudioReceived():
                self.audio.hear(event)
            case KeyPressed():
                self.on_key(event.key)
            case MarkReached():
                self.audio.reached(event.name)
            case HungUp():
                self._fail(ChannelClosed(1000, event.reason))

    async def _write(self) -> None:
        try:
            while self._closed is None:
                self.audio.changed.clear()
                await self._write_due()
                wait_s = self.audio.wait_s()
                if wait_s != 0 and not self.audio.changed.is_set():
                    await self._wait_for_change(wait_s)
        except ChannelClosed as closed:
            self._fail(closed)

    async def _write_due(self) -> None:
        while True:
            if self.audio.must_clear:
                self.audio.must_clear = False
                await self._send(self.protocol.clear())
            frame = self.audio.next_frame()
            if frame is None:
                return
            if frame.payload:
                await self._send(self.protocol.media(frame.payload))
            if frame.mark is not None:
                await self._send(self.protocol.mark(frame.mark))

    async def _wait_for_change(self, wait_s: float | None) -> None:
        waiting: set[asyncio.Task[Any]] = {
            asyncio.create_task(self.audio.changed.wait(), name="phone change")
        }
        if wait_s is not None:
            waiting.add(asyncio.create_task(self._clock.sleep(wait_s), name="phone pace"))
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()

    async def _send(self, message: Message | None) -> None:
        if message is not None:
            await self._wire.send(message)

    def _fail(self, closed: ChannelClosed) -> None:
        """The call has ended; wakes everybody who waits for it."""
        if self._closed is None:
            self._closed = closed
        self.audio.close()
        self._ended.set()
