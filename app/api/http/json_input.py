"""JSON that clients send, in a request's body or in an event: one parser with one set of limits.

A parser or a validator holds the interpreter's lock until it is done, so a thread alone does not
keep the event loop running beside it. What they are given is therefore bounded before they begin:
the number of values (each becomes an object), of escapes, and the digits of very long numbers
(their conversion takes time that grows with the square of their length). Within these bounds the
parser takes 15 ms at worst (2-core x86, 2.1 GHz), and mostly far below 1.
"""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from pydantic_core import from_json
from starlette.concurrency import run_in_threadpool

from app.errors import ClientError

# Commas and opening brackets outside of strings: each is followed by one value, or by a name and
# one. 4,096 chat messages of one part each have 24,580.
MAX_VALUES = 25_000
# Backslashes. Half a million characters of Chinese from an encoder that writes ASCII.
MAX_ESCAPES = 500_000
# Digits in all the numbers that have 500 or more; beyond 4,300 the parser refuses a number itself.
MAX_LONG_NUMBER_DIGITS = 64 * 1024
_LONG_NUMBER = re.compile(rb"(?<![0-9])[0-9]{500,4300}(?![0-9])")

# Texts of up to LIGHT_CHARS are parsed and validated on the event loop: 10 ms at worst. So are
# those of up to _MEDIUM_CHARS with few values, as audio in base64 is.
LIGHT_CHARS = 16 * 1024
_MEDIUM_CHARS = 64 * 1024
_FEW_VALUES = 500
_VALUES_BESIDE_A_STRING = 20
_CHUNK_CHARS = 16 * 1024

TextT = TypeVar("TextT", bound=str | bytes)
ResultT = TypeVar("ResultT")


class InputTooLargeError(ClientError):
    """What a client sent is above a limit of size or structure (HTTP 413)."""

    code = "request_too_large"


def json_object(
    text: str | bytes,
    what: str = "The body",
    param: str | None = None,
    too_large: str = InputTooLargeError.code,
) -> dict[str, Any]:
    """The JSON object in ``text``; errors call it ``what``.

    Raises ClientError (invalid_json); InputTooLargeError, with ``too_large`` as its code, for more
    values, escapes or digits than the limits allow.
    """
    excess = _excess(text)
    try:
        value = _parsed(text if excess is None else excess.before)
    except ValueError as error:
        # A malformed text is reported as such, unless it is malformed only because it was cut.
        if excess is None or not str(error).startswith("EOF"):
            message = f"{what} is not valid JSON: {error}."
            raise ClientError(message, code="invalid_json", param=param) from error
    if excess is not None:
        raise InputTooLargeError(f"{what} {excess.why}.", code=too_large, param=param)
    if not isinstance(value, dict):
        raise ClientError(f"{what} is not a JSON object.", code="invalid_json", param=param)
    return value


async def parse_aside(parse: Callable[[TextT], ResultT], text: TextT) -> ResultT:
    """``parse(text)``; if ``text`` is long, in a thread, one at a time for each event loop.

    Python code in a thread (validators are called for each object) lets the loop run in between.
    Raises what ``parse`` raises.
    """
    if is_light(text):
        return parse(text)
    lock = _locks.setdefault(asyncio.get_running_loop(), asyncio.Lock())
    async with lock:
        return await run_in_threadpool(parse, text)


_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


def is_light(text: str | bytes) -> bool:
    """``text`` is cheap to parse and to validate, whatever it contains."""
    if len(text) <= LIGHT_CHARS:
        return True
    if len(text) > _MEDIUM_CHARS:
        return False
    return all(num_found(mark, text, _FEW_VALUES) < _FEW_VALUES for mark in ",[{")


def _parsed(text: str | bytes) -> Any:
    """Raises ValueError."""
    # JSON has no cycles, but every container would count towards the next search for some.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        # Of the strings only the keys are kept for the next one: values are what people said.
        return from_json(text, allow_inf_nan=False, cache_strings="keys")
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class _Excess:
    """``before``: the beginning of the text, up to a value. ``why``: the limit exceeded."""

    before: str | bytes
    why: str


def _excess(text: str | bytes) -> _Excess | None:
    """None if ``text`` is within the limits."""
    if is_light(text) or _is_one_string(text):
        return None
    num_values = num_escapes = num_digits = 0
    is_in_string = False
    start = 0
    while start < len(text):
        end = start + _CHUNK_CHARS
        chunk = _bytes(text[start:end])
        if (len(chunk) - len(chunk.rstrip(b"\\"))) % 2:
            end += 1  # an escape belongs to one chunk
            chunk = _bytes(text[start:end])
        num_escapes += chunk.count(b"\\")
        pieces = chunk.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b'"'.join(pieces[1 if is_in_string else 0 :: 2])
        is_in_string ^= len(pieces) % 2 == 0
        num_values += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        num_digits += sum(map(len, _LONG_NUMBER.findall(outside)))
        for number, limit, what in (
            (num_values, MAX_VALUES, "values (elements of arrays and fields of objects)"),
            (num_escapes, MAX_ESCAPES, "escaped characters"),
            (num_digits, MAX_LONG_NUMBER_DIGITS, "digits in its longest numbers"),
        ):
            if number > limit:
                before = _up_to_a_value(text[:_CHUNK_CHARS])
                return _Excess(before, f"may have at most {limit} {what}")
        start = end
    return None


def _is_one_string(text: str | bytes) -> bool:
    """A long ``text`` with few values: most of it are a few strings, such as minutes of audio."""
    few = _VALUES_BESIDE_A_STRING
    return all(num_found(mark, text, few) < few for mark in ",[{") and (
        num_found("\\", text, MAX_ESCAPES + 1) <= MAX_ESCAPES
    )


def num_found(mark: str, text: str | bytes, most: int) -> int:
    """The number of ``mark`` in ``text``, at most ``most``; faster than count() if it is small."""
    count, at = 0, -1
    while count < most:
        at = text.find(mark, at + 1) if isinstance(text, str) else text.find(mark.encode(), at + 1)
        if at == -1:
            break
        count += 1
    return count


def _bytes(text: str | bytes) -> bytes:
    return text.encode("utf-8", "replace") if isinstance(text, str) else text


def _up_to_a_value(text: str | bytes) -> str | bytes:
    """``text`` up to its last comma or bracket, so that no token is cut in two."""
    if isinstance(text, str):
        return text[: max(map(text.rfind, ",[{")) + 1]
    return text[: max(map(text.rfind, (b",", b"[", b"{"))) + 1]
