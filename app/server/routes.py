"""The routes of the server, and what guards them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Request, WebSocket
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import app as app_package
from app.access import (
    REALTIME_SUBPROTOCOL,
    Authenticator,
    Connections,
    HostError,
    Principal,
    RateLimitedError,
    RateLimits,
    peer_of,
)
from app.api.audio.routes import audio_router
from app.api.chat.request import ChatDefaults
from app.api.chat.routes import chat_router
from app.api.http.body import BodyBudget
from app.api.http.errors import deny, error_response
from app.api.metrics import metrics_router
from app.api.model_names import OWN_NAME, Names, is_beta
from app.api.models import models_router
from app.api.realtime.call_registry import CallsRegistry
from app.api.realtime.client_secrets import client_secrets_router
from app.api.realtime.connection import MakeSession, RealtimeConnection
from app.api.realtime.server_events import Wire, error_event
from app.api.realtime.webrtc_calls import CallContext, add_calls
from app.api.telephony.routes import PhoneService, add_phone
from app.api.traces import traces_router
from app.config import Settings
from app.conversation import Services, Session
from app.errors import ClientError, ConfigError, ServiceError, UnavailableError
from app.server.pages import Pages
from app.transports.websocket import WebSocketChannel

logger = logging.getLogger(__name__)

# How long a browser need not ask again whether a page of another origin may send its request.
_PREFLIGHT_AGE_S = 3600

# Beside the package, in a checkout as well as in an installed wheel.
WEB_ROOT = Path(app_package.__file__).resolve().parent.parent / "web_demo"

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
    app.state.gatekeeper = Authenticator(settings)
    app.state.connections = Connections(settings.max_sessions)
    app.state.calls = CallsRegistry()
    app.state.rate_limits = RateLimits(settings)
    app.state.bodies = BodyBudget()
    app.add_middleware(_HostGuard, gatekeeper=app.state.gatekeeper)
    app.add_middleware(_SecurityHeaders)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=app.state.gatekeeper.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # keys, and whatever clients tell of themselves
            expose_headers=["Location", "Retry-After"],
            max_age=_PREFLIGHT_AGE_S,
        )
    _add_error_handlers(app)
    _add_health(app, services)
    app.include_router(traces_router(services.traces))
    app.include_router(metrics_router(services))
    _add_gauges(app, services)
    names = Names.of(settings, services.recognition.languages)
    app.include_router(client_secrets_router(services, names))
    app.include_router(models_router(services.engine, names))
    defaults = ChatDefaults(settings.temperature, settings.top_p, settings.repetition_penalty)
    app.include_router(chat_router(services.engine, defaults, settings.max_chat_requests))
    app.include_router(audio_router(services))
    _add_realtime(app, services, make_session)
    state = app.state
    add_calls(
        app,
        CallContext(services, make_session, state.connections, state.calls, state.rate_limits),
        state.gatekeeper,
    )
    app.state.phone = PhoneService(
        services,
        app.state.connections,
        app.state.gatekeeper,
        app.state.calls,
        app.state.rate_limits,
        make_session,
    )
    add_phone(app, app.state.phone, settings)
    app.mount("/", _WebPages(directory=web_root, html=True))
    return app


def _add_health(app: FastAPI, services: Services) -> None:
    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    # `/health` is where load tools made for vLLM look before they begin.
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        connections: Connections = app.state.connections
        ready = services.engine.is_alive and not connections.is_closing
        problem = "shutting down" if connections.is_closing else services.engine.problem
        return JSONResponse(
            {
                "status": "ready" if ready else problem,
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
    recognition, load, counter = services.recognition, services.load, services.metrics.counter
    counter(
        "asr_refused",
        "Jobs that the recogniser's queue was full for.",
        lambda: recognition.num_refused,
    )
    counter(
        "early_answers_skipped",
        "Pauses in which there was no time to begin an answer in hope.",
        lambda: load.num_skipped,
    )
    gauge(
        "event_loop_lag_p99_seconds",
        "How late the event loop was, p99 of the last minute.",
        lambda: (services.loop_lag.percentile_ms(99) or 0.0) / 1000,
    )


def _add_realtime(app: FastAPI, services: Services, make_session: MakeSession) -> None:
    connections: Connections = app.state.connections
    gatekeeper: Authenticator = app.state.gatekeeper
    calls: CallsRegistry = app.state.calls
    limits: RateLimits = app.state.rate_limits

    @app.websocket("/v1/realtime")
    async def realtime(websocket: WebSocket) -> None:
        offered: list[str] = websocket.scope.get("subprotocols", [])
        try:
            grant = gatekeeper.check_caller(websocket.headers, offered)
        except ClientError as error:
            await deny(websocket, error)
            return
        chosen = REALTIME_SUBPROTOCOL if REALTIME_SUBPROTOCOL in offered else None
        await websocket.accept(subprotocol=chosen)
        async with WebSocketChannel(websocket) as channel:
            if (call_id := websocket.query_params.get("call_id")) is not None:
                await _attach(channel, calls, call_id, grant)
                return
            # Refused with an event and a close code: browsers hide the status of a failed upgrade.
            owner = grant.limited_as(peer_of(websocket))
            try:
                connections.check()
                limits.check_session(owner)
            except (UnavailableError, RateLimitedError) as error:
                kind = "server_error" if isinstance(error, UnavailableError) else error.code
                await _refuse(channel, error_event(kind, error.code, error.message), 1013)
                return
            if unsupported := _unsupported_query(websocket):
                await _refuse(channel, unsupported, 1008)
                return
            model = websocket.query_params.get("model") or grant.session.get("model") or OWN_NAME
            connection = RealtimeConnection(
                channel,
                services,
                model,
                make_session=make_session,
                opening=grant.session,
                pace=limits.pacer(owner),
                is_beta=is_beta(websocket.headers),
            )
            with connections.entered(channel, lambda: connection.is_busy):
                await connection.run()


def _unsupported_query(websocket: WebSocket) -> Wire | None:
    if websocket.query_params.get("intent") in (None, "conversation"):
        return None
    message = "Unsupported value for 'intent': only 'conversation' is offered."
    return error_event("invalid_request_error", "unsupported_value", message, param="intent")


async def _attach(
    channel: WebSocketChannel, calls: CallsRegistry, call_id: str, grant: Principal
) -> None:
    """A controlling client beside the one whose call it is."""
    try:
        await calls.find(call_id, grant.owner).attach(channel)
    except ClientError as error:
        event = error_event("invalid_request_error", error.code, error.message, param=error.param)
        await _refuse(channel, event, 1008)


async def _refuse(channel: WebSocketChannel, error: Wire, close_code: int) -> None:
    logger.info("connection refused", extra={"code": error["error"]["code"]})
    await channel.send(msgspec.json.encode(error).decode())
    await channel.close(close_code, error["error"]["message"])


_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 426: "upgrade_required"}


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ClientError)
    async def client_error(request: Request, error: ClientError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(UnavailableError)
    async def unavailable(request: Request, error: UnavailableError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid_request(request: Request, error: RequestValidationError) -> JSONResponse:
        first: dict[str, Any] = error.errors()[0]
        param = ".".join(str(step) for step in first["loc"][1:])
        message = f"Invalid value for '{param}': {first['msg']}."
        return error_response(ClientError(message, code="invalid_value", param=param))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        code, message = _HTTP_CODES.get(error.status_code), str(error.detail)
        if message == HTTPStatus(error.status_code).phrase:  # nobody has said more
            message = f"{message}: {request.method} {request.url.path[:200]}"
        response = error_response(ClientError(message, code=code), error.status_code)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def fault(request: Request, error: Exception) -> JSONResponse:
        # A fault of ours, which the server logs; clients expect the shape all the same.
        return error_response(ServiceError("The server had an error of its own."), 500)


class _WebPages(Pages):
    """Denies WebSockets in words that a client can read."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            missing = ClientError("There is no WebSocket at this path.", code="not_found")
            await deny(WebSocket(scope, receive, send), missing, 404)
            return
        await super().__call__(scope, receive, send)


class _HostGuard:
    """Turns away requests for names that are not ours, whatever they ask for."""

    def __init__(self, app: ASGIApp, gatekeeper: Authenticator) -> None:
        self._app = app
        self._gatekeeper = gatekeeper

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            try:
                self._gatekeeper.check_host(Headers(scope=scope))
            except HostError as error:
                if scope["type"] == "websocket":
                    await deny(WebSocket(scope, receive, send), error)
                else:
                    await error_response(error)(scope, receive, send)
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
