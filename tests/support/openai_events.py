"""Server events as the stock `openai` package declares them: what is checked, and how strictly."""

from __future__ import annotations

from typing import Any, get_args

from openai.types.realtime import RealtimeServerEvent
from pydantic import BaseModel

# Ours, or shown by the API itself though the package does not declare them.
_KNOWN_EXTRAS = {
    "session.id",
    "session.object",
    "session.expires_at",
    "session.parley",
    "session.audio.input.turn_detection.idle_timeout_ms",
}


def _by_type() -> dict[str, type[BaseModel]]:
    union = get_args(RealtimeServerEvent)[0]
    return {get_args(cls.model_fields["type"].annotation)[0]: cls for cls in get_args(union)}


EVENT_CLASSES = _by_type()


def check_server_event(event: dict[str, Any]) -> None:
    """Parse with the package's class for the event's type: types exact, nothing missing, no field
    that the package does not know. Raises otherwise."""
    if event["type"] == "parley.turn.trace":
        assert set(event) == {"type", "event_id", "turn"}
        return
    if event["type"] == "parley.transcript.words":
        assert set(event) == {"type", "event_id", "item_id", "content_index", "words", "error"}
        return
    parsed = EVENT_CLASSES[event["type"]].model_validate(event, strict=True)
    unknown = {path for path in _extras(parsed, "") if path not in _KNOWN_EXTRAS}
    assert not unknown, f"{event['type']}: fields that the openai package does not know: {unknown}"


def _extras(value: Any, path: str) -> list[str]:
    if isinstance(value, list):
        return [found for item in value for found in _extras(item, path)]
    if not isinstance(value, BaseModel):
        return []
    prefix = f"{path}." if path else ""
    found = [prefix + name for name in value.model_extra or {}]
    for name in type(value).model_fields:
        found += _extras(getattr(value, name), prefix + name)
    return found
