"""Server-sent events as ASGI messages."""

from __future__ import annotations

from typing import Any

_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # proxies hold streams back otherwise
}


def sse_start() -> dict[str, Any]:
    """The head of the response."""
    headers = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def sse_event(data: bytes, *, is_last: bool = False) -> dict[str, Any]:
    """One event with ``data``, which is one line."""
    body = b"data: " + data + b"\n\n"
    return {"type": "http.response.body", "body": body, "more_body": not is_last}
