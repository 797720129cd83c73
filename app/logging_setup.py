"""Structured logs: one line an event, with the ids of the session and turn it belongs to.

    2026-01-31T12:00:00.123Z info app.api.realtime.connection session=sess_1f turn=- channel closed
    code=1000

What callers say is logged only when the settings ask for it; keys never are.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, TextIO

import msgspec

from app.config import Settings

session_id: ContextVar[str] = ContextVar("session_id", default="-")
turn_id: ContextVar[str] = ContextVar("turn_id", default="-")

# Where clients put keys: the Authorization header, and a WebSocket subprotocol of browsers.
_KEY_PLACES = re.compile(r"(?i)(bearer\s+|openai-insecure-api-key\.)[^\s,'\"]+|\b(ek_)[0-9a-f]+")
_HIDDEN = "[hidden]"
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class _Formatter(logging.Formatter):
    """``extra`` fields follow the message as key=value; line breaks are escaped."""

    def __init__(self, secrets: Sequence[str]) -> None:
        super().__init__()
        self._secrets = [secret for secret in secrets if secret]

    def format(self, record: logging.LogRecord) -> str:
        extra = " ".join(
            f"{name}={value!r}" if isinstance(value, str) else f"{name}={value}"
            for name, value in _extras(record).items()
        )
        stamp = _stamp(record)
        text = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        line = (
            f"{stamp} {record.levelname.lower()} {record.name} "
            f"session={session_id.get()} turn={turn_id.get()} {text}"
        )
        line = f"{line} {extra}" if extra else line
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return self._redacted(line)

    def _redacted(self, line: str) -> str:
        line = _KEY_PLACES.sub(lambda m: f"{m[1] or m[2]}{_HIDDEN}", line)
        for secret in self._secrets:
            line = line.replace(secret, _HIDDEN)
        return line


class _JsonFormatter(_Formatter):
    """One JSON object a line; ``extra`` fields stand beside the standard ones."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": _stamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "session": session_id.get(),
            "turn": turn_id.get(),
            "message": record.getMessage(),
        }
        for name, value in _extras(record).items():
            fields.setdefault(name, value)
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return self._redacted(msgspec.json.encode(fields, enc_hook=str).decode())


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(record).items()
        if name not in _STANDARD and name != "color_message"
    }


def _stamp(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _is_news(record: logging.LogRecord) -> bool:
    """uvicorn calls a handshake that we denied an error of the application; we log the denial."""
    return "returned without completing handshake" not in record.getMessage()


def setup_logging(settings: Settings, stream: TextIO | None = None) -> None:
    """Send all logs to ``stream`` (None: standard error), replacing earlier handlers."""
    handler = logging.StreamHandler(stream or sys.stderr)
    formatter = _JsonFormatter if settings.log_format == "json" else _Formatter
    secrets = (*settings.api_keys, settings.phone_token, settings.phone_twilio_auth_token)
    handler.setFormatter(formatter((*secrets, settings.ice_credential)))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    root.setLevel(level)
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    # These write a line for every request, or for every frame.
    for noisy in ("uvicorn.access", "uvicorn.error", "websockets", "httpx", "httpcore", "asyncio"):
        logging.getLogger(noisy).setLevel(max(level, logging.WARNING))


def speech_field(settings: Settings, name: str, text: str) -> dict[str, object]:
    """``extra`` for spoken words: the words if the settings allow it, else their length."""
    return {name: text} if settings.log_transcripts else {f"{name}_chars": len(text)}


def turn_fields(settings: Settings, traced: dict[str, Any]) -> dict[str, Any]:
    """What the log says of a finished turn; ``traced`` is its trace."""
    fields = {name: traced[name] for name in ("outcome", "voice_to_voice_ms", "stages_ms")}
    for name in ("transcript", "reply"):
        fields |= speech_field(settings, name, traced[name])
    return fields
