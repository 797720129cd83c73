"""A connection's bytes in small portions, so that no peer holds up the others.

A protocol that takes messages apart takes microseconds for each, and a read may bring tens of
thousands of them: 200,000 one-byte fragments held up the event loop for 0.9 s. So each turn of the
loop gets one portion, and a connection whose portions are costly rests in between.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

# 340 frames without content: 2 to 3 ms of parsing (2-core EPYC, Zen 5). A message of 15 MB takes
# 7,500 portions, which cost 0.05 s together.
PORTION_BYTES = 2048
# A connection may have a quarter of the loop: behind a portion it rests three times as long as that
# took. What is cheap (speech, large messages) does not rest.
_CHEAP_S = 0.001
_REST = 3.0
_LONGEST_REST_S = 0.1
# A peer that sends and never reads (pings: each is answered) is not read either while so much waits
# for it. Far more than an answer in speech leaves unread.
MAX_UNSENT_BYTES = 1024 * 1024


class Portions(asyncio.Protocol):
    """Stands between a socket and the protocol that ``make_inner`` returns.

    The inner protocol sees a transport like any other, and may put another one in its own place
    (``set_protocol``). At most one read of the socket is kept here; the rest stays with the kernel,
    so that the peer is held up.
    """

    def __init__(
        self,
        make_inner: Callable[[], asyncio.Protocol],
        clock_s: Callable[[], float] = time.thread_time,
    ) -> None:
        """``clock_s``: what a portion costs is read off it, in seconds. By default the CPU time of
        the loop's thread: nobody is to rest because the machine was busy with something else."""
        self.inner = make_inner()
        self._clock_s = clock_s
        self._transport: asyncio.Transport | None = None
        self._waiting = bytearray()
        self._is_wanted = True  # the inner protocol has not paused reading
        self._is_writable = True
        self._next: asyncio.Handle | None = None
        self._has_ended = False  # the peer sends no more

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.inner.connection_made(cast(asyncio.Transport, _Inside(self, self._transport)))

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.clear()
        if self._next is not None:
            self._next.cancel()
        self.inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._is_writable = False
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self._is_writable = True
        self.inner.resume_writing()
        self.go_on()

    def eof_received(self) -> bool | None:
        if not self._waiting:
            return self.inner.eof_received()
        self._has_ended = True
        return True  # it is told when it has read the rest

    def data_received(self, data: bytes) -> None:
        self._waiting += data
        if self._next is None and self._may_feed():
            self._feed()
        self._read_or_not()

    def want(self, is_wanted: bool) -> None:
        """The inner protocol pauses and resumes reading."""
        self._is_wanted = is_wanted
        self.go_on()

    def go_on(self) -> None:
        """Something has changed: see whether the next portion may go, and whether to read more."""
        if self._next is None and self._waiting and self._may_feed():
            self._next = asyncio.get_running_loop().call_soon(self._on_turn)
        self._read_or_not()

    def _may_feed(self) -> bool:
        assert self._transport is not None
        if not self._is_wanted or self._transport.is_closing():
            return False
        return self._is_writable or self._transport.get_write_buffer_size() < MAX_UNSENT_BYTES

    def _on_turn(self) -> None:
        self._next = None
        if self._waiting and self._may_feed():
            self._feed()
        self._read_or_not()

    def _feed(self) -> None:
        """One portion, and when the next one comes."""
        began_s = self._clock_s()
        portion = bytes(self._waiting[:PORTION_BYTES])
        del self._waiting[:PORTION_BYTES]
        self.inner.data_received(portion)
        took_s = self._clock_s() - began_s
        if self._next is not None:
            self._next.cancel()  # the inner protocol has resumed reading meanwhile
            self._next = None
        loop = asyncio.get_running_loop()
        if took_s > _CHEAP_S:
            self._next = loop.call_later(min(took_s * _REST, _LONGEST_REST_S), self._on_turn)
        elif self._waiting and self._may_feed():
            self._next = loop.call_soon(self._on_turn)

    def _read_or_not(self) -> None:
        assert self._transport is not None
        if self._transport.is_closing():
            return
        if self._has_ended and not self._waiting:
            self._has_ended = False
            if not self.inner.eof_received():
                self._transport.close()
        elif self._is_wanted and self._next is None and not self._waiting:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()


class _Inside:
    """The transport that the inner protocol sees."""

    def __init__(self, portions: Portions, transport: asyncio.Transport) -> None:
        self._portions = portions
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def pause_reading(self) -> None:
        self._portions.want(False)

    def resume_reading(self) -> None:
        self._portions.want(True)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._portions.inner = cast(asyncio.Protocol, protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._portions.inner
