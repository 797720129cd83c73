"""uvicorn's HTTP protocol, with an end to connections that never ask for anything."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

# A request's head comes in one or two packets; this is for slow lines.
FIRST_REQUEST_S = 20.0


class ImpatientProtocol(H11Protocol):
    """Closes a connection whose first request is not there in time."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waiting = self.loop.call_later(FIRST_REQUEST_S, self._close_if_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.scope is not None:
            self._stop_waiting()

    def handle_websocket_upgrade(self, event: Any) -> None:
        self._stop_waiting()
        super().handle_websocket_upgrade(event)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _close_if_silent(self) -> None:
        self._waiting = None
        self.transport.close()
