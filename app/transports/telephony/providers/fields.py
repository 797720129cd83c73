"""Reading JSON that a stranger wrote: every field is checked, and named when it is wrong."""

from __future__ import annotations

import binascii
from typing import Any

import msgspec

from app.digits import whole_number
from app.transports.telephony.protocol import KeyPressed, Message, PhoneProtocolError

Object = dict[str, Any]
MAX_MESSAGE_CHARS = 64 * 1024
"""Exotel's 100 ms of PCM16 at 24 kHz in base64 are 6,400; nobody sends ten times as much."""
MAX_NAME_CHARS = 256
KEYS = frozenset("0123456789*#ABCD")


def shown(value: Any) -> str:
    """What came instead of what was expected, for a log and a reason: its beginning."""
    return f"{value!r:.60}"


def parse_object(message: Message) -> Object:
    """A JSON object. Raises PhoneProtocolError."""
    if isinstance(message, bytes):
        raise PhoneProtocolError("a binary message, where JSON text was expected")
    if len(message) > MAX_MESSAGE_CHARS:
        raise PhoneProtocolError(f"a message of more than {MAX_MESSAGE_CHARS} characters")
    try:
        value = msgspec.json.decode(message)
    except (msgspec.DecodeError, RecursionError) as error:
        raise PhoneProtocolError("a message that is not JSON") from error
    if not isinstance(value, dict):
        raise PhoneProtocolError("a message that is not a JSON object")
    return value


def inner(message: Object, name: str) -> Object:
    """The object ``name`` in ``message``. Raises PhoneProtocolError."""
    value = message.get(name)
    if not isinstance(value, dict):
        raise PhoneProtocolError(f"'{name}' is {shown(value)}, expected an object")
    return value


def text(message: Object, name: str, default: str | None = None) -> str:
    """A short string; numbers count as such. ``default`` None: there must be one.

    Raises PhoneProtocolError.
    """
    value = message.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value or len(value) > MAX_NAME_CHARS:
        raise PhoneProtocolError(
            f"'{name}' is {shown(value)}, expected 1 to {MAX_NAME_CHARS} characters"
        )
    return value


def number(message: Object, name: str) -> int | None:
    """A whole number, as a number or in a string; None without one. Raises PhoneProtocolError."""
    value = message.get(name)
    if value is None:
        return None
    if isinstance(value, str) and (found := whole_number(value, max_digits=18)) is not None:
        return found
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**18:
        return value
    raise PhoneProtocolError(f"'{name}' is {shown(value)}, expected a whole number")


def payload(media: Object) -> bytes:
    """The audio in ``media.payload``. Raises PhoneProtocolError."""
    value = media.get("payload")
    if not isinstance(value, str):
        raise PhoneProtocolError(f"'media.payload' is {shown(value)}, expected a string")
    try:
        return binascii.a2b_base64(value, strict_mode=True)
    except (ValueError, binascii.Error) as error:
        raise PhoneProtocolError("'media.payload' is not base64") from error


def key(dtmf: Object) -> KeyPressed:
    """The key in ``dtmf.digit``. Raises PhoneProtocolError."""
    digit = text(dtmf, "digit").upper()
    if digit not in KEYS:
        raise PhoneProtocolError("'digit' is not a key of a phone")
    return KeyPressed(digit)


def parameters(message: Object, name: str) -> dict[str, str]:
    """The strings in the object ``name``; other values are left out, as is a missing object."""
    value = message.get(name)
    if not isinstance(value, dict):
        return {}
    return {k: v for k, v in value.items() if isinstance(v, str) and len(v) <= MAX_NAME_CHARS}


def encoded(**fields: Any) -> str:
    """A message to the provider. Bytes become base64."""
    return msgspec.json.encode(fields).decode()
