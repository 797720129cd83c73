"""The body of a request: bounded in length and in time, and read only while somebody sends it."""

from __future__ import annotations

import asyncio

from fastapi import Request
from starlette.requests import ClientDisconnect

from app.errors import ClientError

# For the whole body; a slow phone line sends 4 MiB of JSON in less.
BODY_TIMEOUT_S = 30.0


class BodyTooLargeError(ClientError):
    """The request's body is above the limit (HTTP 413)."""

    code = "request_too_large"


class MediaTypeError(ClientError):
    """The body is of a kind that this path does not read (HTTP 415)."""

    code = "unsupported_media_type"


class BodyTimeoutError(ClientError):
    """The request's body did not arrive in time (HTTP 408)."""

    code = "request_timeout"


class ClientGoneError(ClientError):
    """The client left in the middle of its request (HTTP 499, which nobody reads)."""

    code = "client_gone"


async def read_body(request: Request, max_bytes: int, timeout_s: float | None = None) -> bytes:
    """All of it.

    Raises BodyTooLargeError as soon as it is (or says that it will be) longer than ``max_bytes``,
    BodyTimeoutError after ``timeout_s`` (None: ``BODY_TIMEOUT_S``), ClientGoneError.
    """
    limit_s = BODY_TIMEOUT_S if timeout_s is None else timeout_s
    too_large = BodyTooLargeError(f"The body may have at most {max_bytes} bytes.")
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and len(announced) < 20 and int(announced) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limit_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError as error:
        raise BodyTimeoutError(f"The body did not arrive in {limit_s:g} s.") from error
    except ClientDisconnect as error:
        raise ClientGoneError("The client left before its request was complete.") from error
    return bytes(body)
