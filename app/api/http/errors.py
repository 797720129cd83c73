"""Errors over HTTP in OpenAI's shape, and the status codes that clients act upon."""

from __future__ import annotations

import logging
import math
import re
from typing import Any

from fastapi import WebSocket
from fastapi.responses import JSONResponse

from app.access import (
    AuthenticationError,
    HostError,
    OriginError,
    RateLimitedError,
    TooManySecretsError,
    peer_of,
)
from app.api.http.body import BodyTimeoutError, ClientGoneError, MediaTypeError
from app.api.http.json_input import InputTooLargeError
from app.api.models import UnknownModelError
from app.api.traces import TraceNotFoundError
from app.conversation import BusyRecognizerError
from app.errors import ClientError, ParleyError, ServiceError, UnavailableError
from llm_core import (
    EngineBusyError,
    EngineDiedError,
    InvalidRequestError,
    LlmError,
    ModelLoadError,
    PromptTooLongError,
)

logger = logging.getLogger(__name__)

# Busy and dead engines are back within seconds.
_RETRY_AFTER_S = 1


_STATUS: dict[type[ParleyError], int] = {
    AuthenticationError: 401,
    OriginError: 403,
    UnknownModelError: 404,
    TraceNotFoundError: 404,
    BodyTimeoutError: 408,
    InputTooLargeError: 413,
    MediaTypeError: 415,
    HostError: 421,
    TooManySecretsError: 429,
    RateLimitedError: 429,
    ClientGoneError: 499,
    UnavailableError: 503,
    BusyRecognizerError: 503,
    ServiceError: 500,
}


def error_body(error: ParleyError | LlmError) -> dict[str, Any]:
    """``{"error": {"message", "type", "param", "code"}}``."""
    if isinstance(error, ParleyError):
        message, param = error.message, error.param
        kind = "invalid_request_error" if isinstance(error, ClientError) else "server_error"
    else:
        message, param = str(error), _param(error)
        kind = "server_error"
        if isinstance(error, InvalidRequestError):
            kind = "invalid_request_error"
        elif isinstance(error, EngineBusyError):
            kind = "rate_limit_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": error.code}}


def error_response(error: ParleyError | LlmError, status: int | None = None) -> JSONResponse:
    """The whole response; ``status`` overrides that of the error's class."""
    headers = {}
    if isinstance(error, AuthenticationError):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, EngineBusyError | EngineDiedError | ModelLoadError | BusyRecognizerError):
        headers["Retry-After"] = str(_RETRY_AFTER_S)
    if isinstance(error, UnavailableError | RateLimitedError | TooManySecretsError):
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    return JSONResponse(error_body(error), status_code=status or _status(error), headers=headers)


async def deny(websocket: WebSocket, error: ParleyError, status: int | None = None) -> None:
    """Refuse the handshake, and say so in our log: the peer may never look at the answer."""
    extra = {"code": error.code, "peer": peer_of(websocket)}
    logger.warning("connection denied", extra=extra)
    await websocket.send_denial_response(error_response(error, status))


def _status(error: ParleyError | LlmError) -> int:
    if isinstance(error, ParleyError):
        return next((s for kind, s in _STATUS.items() if isinstance(error, kind)), 400)
    if isinstance(error, InvalidRequestError):
        return 400
    if isinstance(error, EngineBusyError):
        return 429
    # A model that cannot be loaded again is as good as a dead engine to who asks.
    return 503 if isinstance(error, EngineDiedError | ModelLoadError) else 500


def _param(error: LlmError) -> str | None:
    """The engine begins its messages with the parameter's name."""
    if isinstance(error, PromptTooLongError):
        return "messages"
    named = re.match(r"([a-z_]+): ", str(error))
    if named is None or not isinstance(error, InvalidRequestError):
        return None
    return _OUR_NAMES.get(named[1], named[1])


# Where the engine's name of a thing is not the request's.
_OUR_NAMES = {
    "schema": "response_format.json_schema.schema",
    "regex": "structured_outputs.regex",
    "choice": "structured_outputs.choice",
    "logprobs": "top_logprobs",
}
