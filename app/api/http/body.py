"""The body of a request: bounded in length and in time, and read only while somebody sends it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from app.access import peer_of
from app.api.http.json_input import InputTooLargeError, parse_aside
from app.digits import whole_number
from app.errors import ClientError, UnavailableError

# For the whole body; a slow phone line sends 4 MiB of JSON in less.
BODY_TIMEOUT_S = 30.0
# Of all bodies together that are being read or parsed, without the files of /v1/audio, which have
# places of their own. One address may have half of it.
MAX_TOTAL_BYTES = 64 * 1024 * 1024
_RETRY_AFTER_S = 1.0

ResultT = TypeVar("ResultT")


class BodyTooLargeError(InputTooLargeError):
    """The request's body is above the limit (HTTP 413)."""


class MediaTypeError(ClientError):
    """The body is of a kind that this path does not read (HTTP 415)."""

    code = "unsupported_media_type"


class BodyTimeoutError(ClientError):
    """The request's body did not arrive in time (HTTP 408)."""

    code = "request_timeout"


class ClientGoneError(ClientError):
    """The client left in the middle of its request (HTTP 499, which nobody reads)."""

    code = "client_gone"


class BodyBudget:
    """Bytes of the bodies that are being read or parsed: at most ``max_bytes``, and half of them
    for one address."""

    def __init__(self, max_bytes: int = MAX_TOTAL_BYTES) -> None:
        self._max_bytes = max_bytes
        self._held: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._held.total()

    @contextmanager
    def part(self, peer: str) -> Iterator[Callable[[int], None]]:
        """For one body from ``peer``, which counts until the block ends; gives the function to call
        with the length of each chunk. That raises UnavailableError when there is no room."""
        num_bytes = 0

        def grow(by: int) -> None:
            nonlocal num_bytes
            num_bytes += by
            self._held[peer] += by
            if len(self) > self._max_bytes or self._held[peer] > self._max_bytes // 2:
                raise UnavailableError(
                    "The server reads as many request bodies as it has room for; try again soon.",
                    retry_after_s=_RETRY_AFTER_S,
                )

        try:
            yield grow
        finally:
            self._held[peer] -= num_bytes
            if not self._held[peer]:
                del self._held[peer]


async def read_parsed(
    request: Request, max_bytes: int, parse: Callable[[bytes], ResultT]
) -> ResultT:
    """``parse`` of the whole body, in a thread if that is long.

    Raises what ``read_body`` and ``parse`` raise.
    """
    with _part(request) as grow:
        return await parse_aside(parse, await _read(request, max_bytes, BODY_TIMEOUT_S, grow))


async def read_body(request: Request, max_bytes: int) -> bytes:
    """All of it.

    Raises BodyTooLargeError as soon as it is (or says that it will be) longer than ``max_bytes``,
    BodyTimeoutError after ``BODY_TIMEOUT_S``, UnavailableError when too much is being read,
    ClientGoneError.
    """
    with _part(request) as grow:
        return await _read(request, max_bytes, BODY_TIMEOUT_S, grow)


async def read_file_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """As ``read_body``, for routes that bound by themselves how many bodies are read at once."""
    return await _read(request, max_bytes, timeout_s, lambda num_bytes: None)


def _part(request: Request) -> AbstractContextManager[Callable[[int], None]]:
    budget: BodyBudget = request.app.state.bodies
    return budget.part(peer_of(request))


async def _read(
    request: Request, max_bytes: int, limit_s: float, grow: Callable[[int], None]
) -> bytes:
    too_large = BodyTooLargeError(f"The body may have at most {max_bytes} bytes.")
    announced = whole_number(request.headers.get("content-length", ""), max_digits=19)
    if announced is not None and announced > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limit_s):
            async for chunk in request.stream():
                grow(len(chunk))
                body += chunk
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError as error:
        raise BodyTimeoutError(f"The body did not arrive in {limit_s:g} s.") from error
    except ClientDisconnect as error:
        raise ClientGoneError("The client left before its request was complete.") from error
    return bytes(body)
