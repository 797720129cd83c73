"""The running connections: how many there may be, and how they all end.

At the end of a server its callers are let go one by one: who is idle at once, who is in a turn when
the turn is over, all others at a limit. Nobody new is taken meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from app.errors import UnavailableError
from app.transports.base import EventChannel

logger = logging.getLogger(__name__)

# How long the sessions may take to end when they are told to.
_CLOSE_SESSIONS_S = 5.0
_LOOK_S = 0.05
# Long enough for a restart, or for a caller to hang up.
_RETRY_AFTER_S = 5
GOING_AWAY = 1001


class Connections:
    """Counts connections, and ends them. ``hurry`` cuts the waiting of ``drain`` short."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self.hurry = asyncio.Event()
        self._is_busy: dict[EventChannel, Callable[[], bool]] = {}
        self._is_closing = False
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._is_busy)

    @property
    def is_closing(self) -> bool:
        """The server is about to end."""
        return self._is_closing

    @property
    def is_open(self) -> bool:
        """A further connection would be taken."""
        return not self._is_closing and len(self) < self.max_connections

    def check(self) -> None:
        """Raise UnavailableError when no further connection is taken."""
        self.check_open()
        if len(self) >= self.max_connections:
            raise UnavailableError(
                f"All {self.max_connections} sessions of this server are in use; try again soon.",
                code="overloaded",
                retry_after_s=_RETRY_AFTER_S,
            )

    def check_open(self) -> None:
        """Raise UnavailableError when the server is about to end; for requests that are no
        connections."""
        if self._is_closing:
            raise UnavailableError(
                "The server is shutting down.",
                code="server_shutting_down",
                retry_after_s=_RETRY_AFTER_S,
            )

    @contextmanager
    def entered(
        self, channel: EventChannel, is_busy: Callable[[], bool] = lambda: False
    ) -> Iterator[None]:
        """Counts ``channel`` for as long as the block runs. ``is_busy``: it is in a turn."""
        self._is_busy[channel] = is_busy
        self._empty.clear()
        try:
            yield
        finally:
            del self._is_busy[channel]
            if not self._is_busy:
                self._empty.set()

    async def drain(self, limit_s: float, reason: str) -> None:
        """Take nobody any more, and close each connection with 1001 when its turn is over.

        Returns after ``limit_s`` at the latest; ``close_all`` ends who is left.
        """
        self._is_closing = True
        ends_s = time.monotonic() + limit_s
        if self._is_busy:
            logger.info("draining", extra={"sessions": len(self), "limit_s": limit_s})
        while self._is_busy and time.monotonic() < ends_s and not self.hurry.is_set():
            idle = [channel for channel, is_busy in self._is_busy.items() if not is_busy()]
            await asyncio.gather(*(channel.close(GOING_AWAY, reason) for channel in idle))
            # Whether a turn is over is asked, not told: there are many ways in which one ends.
            await asyncio.sleep(_LOOK_S)

    async def close_all(self, reason: str) -> None:
        """Close all with 1001 (going away) and wait until their sessions have ended."""
        self._is_closing = True
        await asyncio.gather(*(channel.close(GOING_AWAY, reason) for channel in [*self._is_busy]))
        try:
            async with asyncio.timeout(_CLOSE_SESSIONS_S):
                await self._empty.wait()
        except TimeoutError:
            logger.error("%d sessions did not end in %g s", len(self), _CLOSE_SESSIONS_S)
