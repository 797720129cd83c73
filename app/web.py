"""The routes of the server, and what guards them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Request, WebSocket
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import app as app_package
from app.api.metrics import metrics_router
from app.api.realtime import MakeSession, RealtimeConnection
from app.api.realtime_session import OWN_NAME
from app.api.realtime_wire import Wire, error_event
from app.api.traces import TraceNotFoundError, traces_router
from app.auth import (
    REALTIME_SUBPROTOCOL,
    AuthenticationError,
    Gatekeeper,
    HostError,
    OriginError,
)
from app.config import Settings
from app.conversation.services import Services
from app.conversation.session import Session
from app.errors import ClientError, ConfigError, ParleyError
from app.transports.websocket import WebSocketChannel

logger = logging.getLogger(__name__)

# Beside the package, in a checkout as well as in an installed wheel.
WEB_ROOT = Path(app_package.__file__).resolve().parent.parent / "web_demo"

# How long the sessions may take to end when the server stops.
_CLOSE_SESSIONS_S = 5.0

_SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; img-src 'self' data:; media-src 'self' blob:; "
        "worker-src 'self' blob:; object-src 'none'; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "microphone=(self), camera=(), geolocation=()",
}


class Connections:
    """The running connections: how many there may be, and how they all end."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self._channels: set[WebSocketChannel] = set()
        self._is_closing = False
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._channels)

    @property
    def refusal(self) -> str | None:
        """Why no further connection is taken at the moment."""
        if self._is_closing:
            return "The server is shutting down."
        if len(self._channels) >= self.max_connections:
            return f"All {self.max_connections} sessions of this server are in use; try again soon."
        return None

    @contextmanager
    def entered(self, channel: WebSocketChannel) -> Iterator[None]:
        """Counts ``channel`` for as long as the block runs."""
        self._channels.add(channel)
        self._empty.clear()
        try:
            yield
        finally:
            self._channels.discard(channel)
            if not self._channels:
                self._empty.set()

    async def close_all(self, reason: str) -> None:
        """Close all with 1001 (going away) and wait until their sessions have ended."""
        self._is_closing = True
        await asyncio.gather(*(channel.close(1001, reason) for channel in [*self._channels]))
        try:
            async with asyncio.timeout(_CLOSE_SESSIONS_S):
                await self._empty.wait()
        except TimeoutError:
            logger.error("%d sessions did not end in %g s", len(self), _CLOSE_SESSIONS_S)


def create_app(
    settings: Settings,
    services: Services,
    *,
    web_root: Path = WEB_ROOT,
    make_session: MakeSession = Session,
) -> FastAPI:
    """The application. Closing ``services`` is left to whoever made them.

    Raises ConfigError when the web page is missing from the installation.
    """
    if not (web_root / "index.html").is_file():
        raise ConfigError(f"the web page is missing from the installation: {web_root}/index.html")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await app.state.connections.close_all("the server is shutting down")

    app = FastAPI(
        title="Parley",
        version=app_package.__version__,
        lifespan=lifespan,
        docs_url=None,  # these pages load scripts from other hosts
        redoc_url=None,
    )
    app.state.gatekeeper = Gatekeeper(settings)
    app.state.connections = Connections(settings.max_sessions)
    app.add_middleware(_HostGuard, gatekeeper=app.state.gatekeeper)
    app.add_middleware(_SecurityHeaders)
    _add_error_handlers(app)
    _add_health(app, services)
    app.include_router(traces_router(services.traces))
    app.include_router(metrics_router(services))
    _add_gauges(app, services)
    _add_realtime(app, services, make_session)
    app.mount("/", _Pages(directory=web_root, html=True))
    return app


def _add_health(app: FastAPI, services: Services) -> None:
    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        connections: Connections = app.state.connections
        ready = services.engine.is_alive
        return JSONResponse(
            {
                "status": "ready" if ready else "the engine is not running",
                "sessions": len(connections),
                "max_sessions": connections.max_connections,
            },
            status_code=200 if ready else 503,
        )


def _add_gauges(app: FastAPI, services: Services) -> None:
    connections: Connections = app.state.connections
    gauge, traces = services.metrics.gauge, services.traces
    gauge("active_calls", "Callers connected now.", lambda: len(connections))
    gauge("max_calls", "Callers there may be.", lambda: connections.max_connections)
    gauge("traces_dropped", "Traces lost since the start.", lambda: traces.num_dropped)
    gauge(
        "event_loop_lag_p99_seconds",
        "How late the event loop was, p99 of the last minute.",
        lambda: (services.loop_lag.percentile_ms(99) or 0.0) / 1000,
    )


def _add_realtime(app: FastAPI, services: Services, make_session: MakeSession) -> None:
    connections: Connections = app.state.connections
    gatekeeper: Gatekeeper = app.state.gatekeeper

    @app.websocket("/v1/realtime")
    async def realtime(websocket: WebSocket) -> None:
        offered: list[str] = websocket.scope.get("subprotocols", [])
        try:
            gatekeeper.check(websocket.headers, offered)
        except ClientError as error:
            await _deny(websocket, error)
            return
        chosen = REALTIME_SUBPROTOCOL if REALTIME_SUBPROTOCOL in offered else None
        await websocket.accept(subprotocol=chosen)
        async with WebSocketChannel(websocket) as channel:
            # Refused with an event and a close code: browsers hide the status of a failed upgrade.
            if refusal := connections.refusal:
                await _refuse(channel, error_event("server_error", "overloaded", refusal), 1013)
                return
            if unsupported := _unsupported_query(websocket):
                await _refuse(channel, unsupported, 1008)
                return
            model = websocket.query_params.get("model") or OWN_NAME
            connection = RealtimeConnection(channel, services, model, make_session=make_session)
            with connections.entered(channel):
                await connection.run()


def _unsupported_query(websocket: WebSocket) -> Wire | None:
    for name, allowed in (("call_id", ()), ("intent", ("conversation",))):
        value = websocket.query_params.get(name)
        if value is not None and value not in allowed:
            message = f"Unsupported value for '{name}': this server cannot do that yet."
            return error_event("invalid_request_error", "unsupported_value", message, param=name)
    return None


async def _refuse(channel: WebSocketChannel, error: Wire, close_code: int) -> None:
    logger.info("connection refused", extra={"code": error["error"]["code"]})
    await channel.send(msgspec.json.encode(error).decode())
    await channel.close(close_code, error["error"]["message"])


async def _deny(websocket: WebSocket, error: ParleyError, status: int | None = None) -> None:
    """Refuse the handshake, and say so in our log: the peer may never look at the answer."""
    peer = websocket.client.host if websocket.client else "?"
    logger.warning("connection denied", extra={"code": error.code, "peer": peer})
    await websocket.send_denial_response(_error_response(error, status))


def _error_response(error: ParleyError, status: int | None = None) -> JSONResponse:
    """An error over HTTP in OpenAI's shape."""
    headers = {}
    if isinstance(error, AuthenticationError):
        status, headers = 401, {"WWW-Authenticate": "Bearer"}
    elif isinstance(error, OriginError):
        status = 403
    elif isinstance(error, HostError):
        status = 421
    elif isinstance(error, TraceNotFoundError):
        status = 404
    body = {
        "message": error.message,
        "type": "invalid_request_error" if isinstance(error, ClientError) else "server_error",
        "param": error.param,
        "code": error.code,
    }
    return JSONResponse({"error": body}, status_code=status or 400, headers=headers)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ClientError)
    async def client_error(request: Request, error: ClientError) -> JSONResponse:
        return _error_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid_request(request: Request, error: RequestValidationError) -> JSONResponse:
        first: dict[str, Any] = error.errors()[0]
        param = ".".join(str(step) for step in first["loc"][1:])
        message = f"Invalid value for '{param}': {first['msg']}."
        return _error_response(ClientError(message, code="invalid_value", param=param))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        response = _error_response(ClientError(str(error.detail), code=code), error.status_code)
        response.headers.update(error.headers or {})
        return response


class _Pages(StaticFiles):
    """The web page. Revalidated on every load, so that an upgraded server is seen at once."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            missing = ClientError("There is no WebSocket at this path.", code="not_found")
            await _deny(WebSocket(scope, receive, send), missing, 404)
            return
        await super().__call__(scope, receive, send)

    def file_response(self, *args: Any, **kwargs: Any) -> Any:
        response = super().file_response(*args, **kwargs)
        response.headers["cache-control"] = "no-cache"
        return response


class _HostGuard:
    """Turns away requests for names that are not ours, whatever they ask for."""

    def __init__(self, app: ASGIApp, gatekeeper: Gatekeeper) -> None:
        self._app = app
        self._gatekeeper = gatekeeper

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            try:
                self._gatekeeper.check_host(Headers(scope=scope))
            except HostError as error:
                if scope["type"] == "websocket":
                    await _deny(WebSocket(scope, receive, send), error)
                else:
                    await _error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _SecurityHeaders:
    """Pure ASGI: does not wrap streams, and lets WebSockets through untouched."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_SECURITY_HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers)
