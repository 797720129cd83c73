"""WebRTC calls over HTTP: an offer in, an answer out, and the end of a call.

POST /v1/realtime/calls                  application/sdp, or multipart with "sdp" and "session"
POST /v1/realtime/calls?resume=CALL_ID   the offer of a caller whose connection broke
POST /v1/realtime/calls/CALL_ID/hangup
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from app.access import Authenticator, Connections, Principal, RateLimits, peer_of
from app.api.http.body import read_body
from app.api.http.errors import error_response
from app.api.http.json_input import json_object, parse_aside
from app.api.http.multipart import form_fields
from app.api.model_names import OWN_NAME, is_beta
from app.api.realtime.call import CallConnection
from app.api.realtime.call_registry import CallsRegistry
from app.api.realtime.connection import MakeSession
from app.conversation import Services
from app.errors import ClientError, UnavailableError
from app.extras import how_to_install
from app.transports.webrtc.sdp import Offer, parse_offer

try:
    from app.transports.webrtc.call import Call, Gateway

    HAS_WEBRTC = True
except ModuleNotFoundError as missing:  # the extra ``webrtc`` is not installed
    if (missing.name or "").split(".")[0] not in ("aiortc", "aioice", "av", "libopus"):
        raise
    HAS_WEBRTC = False

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 512 * 1024
"""Of a request: the offer (64 KiB at most) and the session's settings."""
_RETRY_AFTER_S = 5.0


class HttpError(ClientError):
    """A refusal with a status of its own."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message, code=code, param=param)
        self.status = status


@dataclass(frozen=True, slots=True)
class CallContext:
    """What calls need of the server around them."""

    services: Services
    make_session: MakeSession
    connections: Connections
    registry: CallsRegistry
    limits: RateLimits


class Calls:
    """The running calls of a server, by id."""

    def __init__(self, gateway: Gateway, around: CallContext) -> None:
        self._gateway = gateway
        self._around = around
        self._calls: dict[str, tuple[str, Call]] = {}  # with the owner
        self._serving: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._calls)

    async def begin(
        self,
        sdp: str,
        model: str,
        opening: dict[str, Any],
        grant: Principal,
        peer: str,
        is_beta: bool,
    ) -> tuple[str, str]:
        """Id and answer of a new call. Raises ClientError or UnavailableError."""
        around, limited = self._around, grant.limited_as(peer)
        around.connections.check()
        around.limits.check_session(limited)
        offer = parse_offer(sdp)
        call = self._gateway.new_call()
        connection = CallConnection(
            call.channel,
            call.audio,
            around.services,
            model,
            opening=opening,
            make_session=around.make_session,
            pace=around.limits.pacer(limited),
            is_beta=is_beta,
        )
        call.channel.greet = connection.greeting
        self._calls[call.id] = (grant.owner, call)
        # Counted before anything is awaited, so that a crowd cannot slip in together.
        counted = ExitStack()
        counted.enter_context(around.connections.entered(call.channel, lambda: connection.is_busy))
        counted.enter_context(around.registry.entered(call.id, grant.owner, connection))
        serving = asyncio.create_task(self._serve(call, connection, counted), name="webrtc call")
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)
        try:
            return call.id, await _connected(call, offer)
        except BaseException:
            call.channel.fail(1011, "the call could not be answered")
            raise

    async def resume(self, call_id: str, sdp: str, owner: str) -> str:
        """The answer to the offer of a caller who comes back. Raises ClientError."""
        call = self._get(call_id, owner)
        return await _connected(call, parse_offer(sdp))

    async def hang_up(self, call_id: str, owner: str) -> None:
        """End a call. Raises ClientError when its owner has none of this id."""
        await self._get(call_id, owner).channel.close(1000, "hung up")

    def _get(self, call_id: str, owner: str) -> Call:
        known_owner, call = self._calls.get(call_id, ("", None))
        if call is None or known_owner != owner or call.channel.closed is not None:
            raise HttpError(
                404, "call_not_found", "There is no call with this id (any more).", "call_id"
            )
        return call

    async def _serve(self, call: Call, connection: CallConnection, counted: ExitStack) -> None:
        with counted:
            try:
                await connection.run()
            finally:
                self._calls.pop(call.id, None)
                await call.close()


async def _connected(call: Call, offer: Offer) -> str:
    """The answer to ``offer``. Raises HttpError."""
    try:
        return await call.connect(offer)
    except ConnectionError as error:
        message = "Another offer for this call came, or it ended, before this one was answered."
        raise HttpError(409, "call_replaced", message) from error
    except OSError as error:
        logger.error("no call can be answered: %s", error)
        message = "The server has no network sockets left."
        raise UnavailableError(message, retry_after_s=_RETRY_AFTER_S) from error


def add_calls(app: FastAPI, around: CallContext, gatekeeper: Authenticator) -> None:
    """Add the routes. Where the extra ``webrtc`` is not installed they say so (501)."""
    calls = Calls(Gateway(around.services.settings), around) if HAS_WEBRTC else None

    def ready(request: Request) -> tuple[Calls, Principal]:
        grant = gatekeeper.check_caller(request.headers)
        if calls is None:
            raise HttpError(
                501,
                "webrtc_not_installed",
                "This server cannot take WebRTC calls; the WebSocket at /v1/realtime works. Its "
                f"operator installs what is missing {how_to_install('webrtc')}",
            )
        return calls, grant

    @app.post("/v1/realtime/calls")
    async def create(request: Request) -> Response:
        return await _answered(request, ready)

    @app.post("/v1/realtime/calls/{call_id}/hangup")
    async def hang_up(call_id: str, request: Request) -> Response:
        try:
            calls, grant = ready(request)
            await calls.hang_up(call_id, grant.owner)
        except HttpError as error:
            return _refused(error)
        return Response(status_code=200)


async def _answered(
    request: Request, ready: Callable[[Request], tuple[Calls, Principal]]
) -> Response:
    try:
        calls, grant = ready(request)
        sdp, session = await _read(request)
        resumed = request.query_params.get("resume")
        if resumed is not None:
            call_id, answer = resumed, await calls.resume(resumed, sdp, grant.owner)
        else:
            opening = _merged(grant.session, session)
            named = request.query_params.get("model") or opening.get("model")
            model = named if isinstance(named, str) else OWN_NAME
            call_id, answer = await calls.begin(
                sdp, model, opening, grant, peer_of(request), is_beta(request.headers)
            )
    except HttpError as error:
        return _refused(error)
    headers = {"location": f"/v1/realtime/calls/{call_id}"}
    return Response(answer, status_code=201, media_type="application/sdp", headers=headers)


async def _read(request: Request) -> tuple[str, dict[str, Any]]:
    """Offer and session settings of a request. Raises ClientError."""
    kind = request.headers.get("content-type", "")
    name = kind.partition(";")[0].strip().lower()
    if name not in ("application/sdp", "multipart/form-data"):
        raise HttpError(
            415,
            "unsupported_media_type",
            "Send the offer as application/sdp, or as multipart/form-data with the fields 'sdp' "
            "and 'session'.",
        )
    body = await read_body(request, MAX_BODY_BYTES)
    if name == "application/sdp":
        return _text(body, "sdp"), {}
    fields = {field.name: field.value for field in form_fields(kind, body)}
    if "sdp" not in fields:
        raise ClientError(
            "Missing required parameter: 'sdp'.", code="missing_required_parameter", param="sdp"
        )
    session = fields.get("session")
    # What is in the settings is checked where the session is opened.
    opening = {} if session is None else await parse_aside(_session_in, session)
    return _text(fields["sdp"], "sdp"), opening


def _session_in(field: bytes) -> dict[str, Any]:
    return json_object(field, "'session'", "session")


def _text(data: bytes, param: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ClientError(f"'{param}' is not UTF-8.", code="invalid_value", param=param) from error


def _merged(base: dict[str, Any], update: dict[str, Any]) -> dict[str, Any]:
    """``update`` over ``base``, object by object."""
    merged = dict(base)
    for name, value in update.items():
        known = merged.get(name)
        both = isinstance(known, dict) and isinstance(value, dict)
        merged[name] = _merged(known, value) if both else value  # type: ignore[arg-type]
    return merged


def _refused(error: HttpError) -> JSONResponse:
    logger.info("call refused", extra={"code": error.code})
    return error_response(error, error.status)
