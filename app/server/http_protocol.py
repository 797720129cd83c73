"""uvicorn's protocols, with an end to what a peer could go on with for ever."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import unquote

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame
from websockets.http11 import Request

from app.api.telephony.routes import STREAM_PATH
from app.server.read_throttle import Portions
from app.transports.telephony.providers.fields import MAX_MESSAGE_CHARS

# A request's head comes in one or two packets; this is for slow lines.
FIRST_REQUEST_S = 20.0
# Enough for the largest message in fragments of 1 KB. Each costs 60 bytes of memory beside its
# content, also those without content, which no limit of a message's length would ever end.
MAX_FRAGMENTS = 16_384
# In UTF-8 a character has up to four.
MAX_PHONE_BYTES = 4 * MAX_MESSAGE_CHARS


def server_protocol(**uvicorn_arguments: Any) -> asyncio.Protocol:
    """What uvicorn serves a connection with."""
    return Portions(lambda: ImpatientProtocol(**uvicorn_arguments))


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


class FewFragmentsProtocol(WebSocketsSansIOProtocol):
    """Closes with 1009 when a message comes in more than ``MAX_FRAGMENTS`` pieces, or to a phone
    stream, which nobody has to have a key to open, with more than ``MAX_PHONE_BYTES``."""

    def handle_connect(self, event: Request) -> None:
        if unquote(event.path).startswith(STREAM_PATH):
            self.conn.max_message_size = MAX_PHONE_BYTES
        super().handle_connect(event)

    def handle_cont(self, event: Frame) -> None:
        if self.close_sent:
            return
        if len(self.frames) < MAX_FRAGMENTS:
            super().handle_cont(event)
            return
        self.frames = []
        why = f"a message in more than {MAX_FRAGMENTS} fragments"
        self.conn.send_close(CloseCode.MESSAGE_TOO_BIG, why)
        self.handle_parser_exception()
