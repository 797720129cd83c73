"""uvicorn's HTTP protocol, with an end to connections that never ask for anything."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

# A request's head comes in one or two packets; this is for slow lines.
FIRST_REQUEST_S = 20.0


class ImpatientProtocol(H11Protocol):
    """Closes a connection whose first or next request is not there in time.

    uvicorn's own limit between two requests ends with the first byte of the next one, which may be
    the last that ever comes.
    """

    _waiting: asyncio.TimerHandle | None = None
    _answered: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not self._answered:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        self._answered = self.cycle
        if not self.transport.is_closing():
            self._wait()
        super().on_response_complete()  # a request that is there already is begun in it

    def handle_websocket_upgrade(self, event: Any) -> None:
        self._stop_waiting()
        super().handle_websocket_upgrade(event)

    def _wait(self) -> None:
        self._stop_waiting()
        self._waiting = self.loop.call_later(FIRST_REQUEST_S, self._close_if_silent)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _close_if_silent(self) -> None:
        self._waiting = None
        self.transport.close()
