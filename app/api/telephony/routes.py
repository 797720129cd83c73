"""Phone calls: what Twilio asks for when a call comes in, and the streams of all providers.

POST /phone/twilio/voice           TwiML that connects the call to the stream
WS   /phone/stream[/TOKEN]         Twilio, Telnyx, Plivo, Exotel, Vonage
TCP  PARLEY_AUDIOSOCKET_PORT       Asterisk's AudioSocket
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from typing import Protocol
from urllib.parse import parse_qs, urlsplit
from xml.sax.saxutils import quoteattr

from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import Response

from app.access import Authenticator, RateLimits, peer_of
from app.api.http.body import read_body
from app.api.http.errors import deny, error_response
from app.api.realtime.call_registry import CallsRegistry
from app.api.realtime.connection import MakeSession
from app.api.telephony.auth import PhoneGuard, check_twilio, tokens_in
from app.api.telephony.call import Greeting, PhoneCall
from app.api.telephony.pending_streams import START_TIMEOUT_S, PendingStreams
from app.config import Settings
from app.conversation import Services, ToolContext
from app.errors import ClientError, ConfigError, ParleyError
from app.transports.base import ChannelClosed, EventChannel
from app.transports.telephony import (
    AudioSocket,
    PhoneLine,
    PhoneProtocol,
    PhoneProtocolError,
    Started,
    TcpWire,
    Wire,
    detect,
)
from app.transports.websocket import WebSocketChannel

logger = logging.getLogger(__name__)

STREAM_PATH = "/phone/stream"
MAX_FORM_BYTES = 64 * 1024
Meet = Callable[[Wire], Awaitable[tuple[PhoneProtocol, Started]]]
_BUSY = '<?xml version="1.0" encoding="UTF-8"?><Response><Reject reason="busy"/></Response>'


class Admission(Protocol):
    """Who counts the sessions of a server; see ``Connections``."""

    max_connections: int

    @property
    def is_open(self) -> bool: ...

    def check(self) -> None: ...

    def entered(
        self, channel: EventChannel, is_busy: Callable[[], bool]
    ) -> AbstractContextManager[None]: ...


class PhoneService:
    """Takes the calls of a server."""

    def __init__(
        self,
        services: Services,
        connections: Admission,
        gatekeeper: Authenticator,
        registry: CallsRegistry,
        limits: RateLimits,
        make_session: MakeSession,
    ) -> None:
        self.guard = PhoneGuard(services.settings, gatekeeper)
        self.check_origin = gatekeeper.check_origin
        self._services = services
        self._connections = connections
        self._registry = registry
        self._limits = limits
        self._make_session = make_session
        self._greeting = Greeting(services)
        self._pending = PendingStreams(connections.max_connections)

    @property
    def is_busy(self) -> bool:
        """No further call is taken at the moment."""
        return not self._connections.is_open

    async def take(
        self, wire: Wire, tokens: Sequence[str] | None, meet: Meet, address: str = ""
    ) -> None:
        """Serve a stream from its first message, which ``meet`` reads, to its end.

        ``tokens``: what its handshake has brought from ``address``; None: whoever reaches this wire
        is trusted.
        """
        try:
            self._connections.check()
            is_known = tokens is None or self.guard.knows(tokens)
            async with self._pending.waiting(None if is_known else address):
                protocol, started = await meet(wire)
            with ExitStack() as counted:
                line, call = self._admit(wire, protocol, started, tokens, counted)
                async with line:
                    await call.run()
        except ParleyError as error:
            logger.info("phone call refused", extra={"code": error.code})
            await wire.close(1008 if isinstance(error, ClientError) else 1013, error.message)
        except PhoneProtocolError as error:
            logger.info("no phone call: %s", error)
            await wire.close(1008, str(error))
        except TimeoutError:
            await wire.close(1008, f"no start within {START_TIMEOUT_S:g} s")
        except ChannelClosed as closed:
            await wire.close(closed.code, closed.reason)

    def _admit(
        self,
        wire: Wire,
        protocol: PhoneProtocol,
        started: Started,
        tokens: Sequence[str] | None,
        counted: ExitStack,
    ) -> tuple[PhoneLine, PhoneCall]:
        """Everything that is checked before a call costs anything. Raises ParleyError."""
        owner = self.guard.operator if tokens is None else self.guard.check(started, tokens)
        self._connections.check()  # others may have come since
        account = f"{protocol.provider} {started.account or owner}"
        self._limits.check_session(f"phone {account}")
        counted.enter_context(self.guard.counted(account))
        # Vonage names the call only where the NCCO's headers do.
        call_id = started.call_id or f"phone_{secrets.token_hex(16)}"
        if call_id in self._registry:
            raise ClientError("A call of this id is running.", code="call_replaced")
        line = PhoneLine(
            wire,
            protocol,
            lead_ms=self._services.settings.phone_lead_ms,
            pace=self._limits.pacer(f"phone {protocol.provider} {call_id}"),
        )
        told = {name: value for name, value in started.parameters.items() if name != "token"}
        call = PhoneCall(
            *(line, self._services, self._greeting),
            conversation=ToolContext(call_id=call_id, parameters=told),
            make_session=self._make_session,
        )
        counted.enter_context(self._connections.entered(line, lambda: call.is_busy))
        counted.enter_context(self._registry.entered(call_id, owner, call))
        logger.info("phone call", extra={"provider": protocol.provider, "call_id": call_id[:40]})
        return line, call


async def meet_stream(wire: Wire) -> tuple[PhoneProtocol, Started]:
    """Who speaks at the other end of a WebSocket. Raises PhoneProtocolError or ChannelClosed."""
    found = detect(await wire.receive()) or detect(await wire.receive())
    if found is None:
        raise PhoneProtocolError("'connected' came twice")
    return found


async def meet_audiosocket(wire: Wire) -> tuple[PhoneProtocol, Started]:
    """An Asterisk. Raises PhoneProtocolError or ChannelClosed."""
    message = await wire.receive()
    assert isinstance(message, bytes), "TCP carries bytes"
    return AudioSocket.begin(message)


def add_phone(app: FastAPI, desk: PhoneService, settings: Settings) -> None:
    """Add the routes. Raises ConfigError when PARLEY_PHONE_PUBLIC_URL is not an address."""
    public_url = _checked_url(settings.phone_public_url)

    @app.post("/phone/twilio/voice")
    async def voice(request: Request) -> Response:
        if not settings.phone_twilio_auth_token:
            message = "Twilio's calls are taken once PARLEY_PHONE_TWILIO_AUTH_TOKEN is set."
            return error_response(ClientError(message, code="twilio_not_configured"), 501)
        body = await read_body(request, MAX_FORM_BYTES)
        try:
            params = _form(body)
            url = _public_url(request, public_url)
            signature = request.headers.get("x-twilio-signature", "")
            check_twilio(settings.phone_twilio_auth_token, url, params, signature)
        except ClientError as error:
            logger.warning("phone webhook denied", extra={"code": error.code})
            return error_response(error, 403)
        call_id = params.get("CallSid", [""])[0]
        if desk.is_busy or not call_id:
            return Response(_BUSY, media_type="text/xml")
        token = desk.guard.tokens.create(call_id)
        parts = urlsplit(url)
        scheme = "wss" if parts.scheme == "https" else "ws"
        stream = f"{scheme}://{parts.netloc}{_prefix(public_url)}{STREAM_PATH}"
        known = {name.lower(): params[name][0][:100] for name in ("From", "To") if name in params}
        return Response(twiml(stream, {"token": token, **known}), media_type="text/xml")

    @app.websocket(STREAM_PATH)
    async def stream(websocket: WebSocket) -> None:
        await _take(websocket, [])

    @app.websocket(STREAM_PATH + "/{token}")
    async def stream_with_token(websocket: WebSocket, token: str) -> None:
        await _take(websocket, [token])

    async def _take(websocket: WebSocket, tokens: list[str]) -> None:
        try:
            # Providers are no browsers: a page that connects is not to make calls for its visitor.
            desk.check_origin(websocket.headers)
        except ClientError as error:
            await deny(websocket, error)
            return
        offered = [*tokens, *tokens_in(websocket.headers)]
        await websocket.accept()
        async with WebSocketChannel(websocket) as wire:
            await desk.take(wire, offered, meet_stream, peer_of(websocket))


def twiml(stream_url: str, parameters: Mapping[str, str]) -> str:
    """The answer to Twilio's question what to do with a call; ``parameters`` come back with its
    stream."""
    given = "".join(
        f"<Parameter name={quoteattr(name)} value={quoteattr(value)}/>"
        for name, value in parameters.items()
    )
    return (
        '<?xml version="1.0" encoding="UTF-8"?>'
        f"<Response><Connect><Stream url={quoteattr(stream_url)}>{given}"
        "</Stream></Connect></Response>"
    )


@asynccontextmanager
async def audiosocket(desk: PhoneService, settings: Settings) -> AsyncIterator[int | None]:
    """Take AudioSocket calls during the block, if a port is set; gives the port.

    Raises ConfigError when the address cannot be had.
    """
    if settings.audiosocket_port is None:
        yield None
        return
    running: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        wire = TcpWire(reader, writer)
        try:
            await desk.take(wire, None, meet_audiosocket)
        except Exception:
            logger.exception("a phone call failed")
        finally:
            await wire.close(1000, "")
            running.discard(task)

    host, port = settings.audiosocket_host, settings.audiosocket_port
    try:
        server = await asyncio.start_server(serve, host, port)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port} for AudioSocket: {error}") from error
    try:
        bound = int(server.sockets[0].getsockname()[1])
        logger.info("listening for AudioSocket", extra={"port": bound})
        yield bound
    finally:
        server.close()
        for task in [*running]:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await server.wait_closed()


def _form(body: bytes) -> dict[str, list[str]]:
    try:
        return parse_qs(body.decode(), keep_blank_values=True, max_num_fields=500, errors="strict")
    except ValueError as error:
        raise ClientError("The body is not a form in UTF-8.") from error


def _public_url(request: Request, public_url: str | None) -> str:
    """The URL as Twilio knows it."""
    if public_url is None:
        return str(request.url)
    query = f"?{request.url.query}" if request.url.query else ""
    return f"{public_url}{request.url.path}{query}"


def _prefix(public_url: str | None) -> str:
    return urlsplit(public_url).path if public_url else ""


def _checked_url(url: str | None) -> str | None:
    if url is None:
        return None
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
        raise ConfigError(f"PARLEY_PHONE_PUBLIC_URL: {url!r} is not like https://voice.example.org")
    return url.rstrip("/")
