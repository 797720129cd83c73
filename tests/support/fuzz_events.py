"""Random client events: right ones in any order, wrong ones of every kind."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

from tests.support.fakes import silence, voice

Wire = dict[str, Any]

SPEECH = base64.b64encode(voice(0.3)).decode()
PAUSE = base64.b64encode(silence(0.6)).decode()
ULAW = base64.b64encode(bytes(range(256)) * 20).decode()
FUNCTION = {"type": "function", "name": "look", "parameters": {"type": "object"}}


class EventMaker:
    """Knows the ids that it has seen, so that some of what it makes is about something."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.ids = ["item_none", "root"]

    def see(self, event: Wire) -> None:
        """Remember the ids in a server event."""
        found = [event.get("item_id"), event.get("response_id")]
        for name in ("item", "response"):
            if isinstance(event.get(name), dict):
                found += [event[name].get("id"), event[name].get("call_id")]
        self.ids = [*self.ids[-20:], *(i for i in found if isinstance(i, str))]

    def message(self) -> str | bytes:
        """The next thing to send."""
        kind = self.rng.random()
        if kind < 0.05:
            return self.rng.randbytes(self.rng.randrange(0, 300))
        if kind < 0.10:
            return self._text(60).encode("utf-8", "replace").decode()
        if kind < 0.17:
            return json.dumps(self.value(4))
        event = self._event()
        if kind < 0.55:
            self.spoil(event)
        return json.dumps(event)

    # --- right ones ---

    def _event(self) -> Wire:
        rng = self.rng
        event: Wire = rng.choice(
            (
                {"type": "session.update", "session": self._session()},
                {"type": "input_audio_buffer.append", "audio": rng.choice((SPEECH, PAUSE, ULAW))},
                {"type": "input_audio_buffer.append", "audio": rng.choice((SPEECH, PAUSE, PAUSE))},
                {"type": "input_audio_buffer.commit"},
                {"type": "input_audio_buffer.clear"},
                {"type": "output_audio_buffer.clear"},
                {
                    "type": "conversation.item.create",
                    "item": self._item(),
                    "previous_item_id": rng.choice((None, self._id())),
                },
                {"type": "conversation.item.retrieve", "item_id": self._id()},
                {"type": "conversation.item.delete", "item_id": self._id()},
                {
                    "type": "conversation.item.truncate",
                    "item_id": self._id(),
                    "content_index": rng.choice((0, 0, 1)),
                    "audio_end_ms": rng.choice((0, 50, 10_000_000)),
                },
                {"type": "response.create"},
                {"type": "response.create", "response": self._response()},
                {"type": "response.cancel", "response_id": rng.choice((None, self._id()))},
            )
        )
        if rng.random() < 0.3:
            event["event_id"] = self._text(10)
        return event

    def _session(self) -> Wire:
        rng = self.rng
        return rng.choice(
            (
                {"instructions": self._text(30)},
                {"output_modalities": [rng.choice(("audio", "text"))]},
                {"tools": rng.choice(([], [FUNCTION], None))},
                {"tool_choice": rng.choice(("auto", "none", "required"))},
                {"truncation": rng.choice(("auto", "disabled"))},
                {"audio": {"input": {"turn_detection": self._detection()}}},
                {"audio": {"input": {"format": self._format()}}},
                {"audio": {"output": {"format": self._format(), "speed": rng.choice((0.5, 1))}}},
                {"max_output_tokens": rng.choice(("inf", 1, 50))},
                {"parley": {"trace": rng.choice((True, False))}},
                {"parley": {"word_timestamps": rng.choice((True, False))}},
            )
        )

    def _detection(self) -> Wire | None:
        return self.rng.choice(
            (
                None,
                {"type": "server_vad", "silence_duration_ms": 200},
                {"type": "semantic_vad", "eagerness": "high"},
                {"create_response": False},
                {"interrupt_response": False},
            )
        )

    def _format(self) -> Wire:
        return {"type": self.rng.choice(("audio/pcm", "audio/pcmu", "audio/pcma"))}

    def _item(self) -> Wire:
        rng = self.rng
        item: Wire = rng.choice(
            (
                self._said("user", "input_text"),
                self._said("assistant", "output_text"),
                self._said("system", "input_text"),
                {"type": "function_call", "name": "look", "arguments": "{}", "call_id": "c1"},
                {"type": "function_call_output", "call_id": rng.choice(("c1", self._id()))}
                | {"output": self._text(20)},
            )
        )
        if rng.random() < 0.2:
            item["id"] = self._id()
        return item

    def _said(self, role: str, kind: str) -> Wire:
        content = [{"type": kind, "text": self._text(40)}]
        return {"type": "message", "role": role, "content": content}

    def _response(self) -> Wire:
        rng = self.rng
        return rng.choice(
            (
                {"output_modalities": ["text"]},
                {"conversation": "none", "output_modalities": ["text"]},
                {"conversation": "none", "input": [{"type": "item_reference", "id": self._id()}]},
                {"input": [self._item()], "metadata": {"a": self._text(5)}},
                {"tools": [FUNCTION], "tool_choice": "required"},
                {"instructions": self._text(20), "max_output_tokens": 2},
            )
        )

    # --- wrong ones ---

    def spoil(self, event: Wire) -> None:
        """Change one thing somewhere inside."""
        places: list[tuple[Any, Any]] = []

        def collect(value: Any) -> None:
            entries: Any = ()
            if isinstance(value, dict):
                entries = value.items()
            elif isinstance(value, list):
                entries = enumerate(value)
            for key, inner in entries:
                places.append((value, key))
                collect(inner)

        collect(event)
        holder, key = self.rng.choice(places)
        how = self.rng.random()
        if how < 0.15 and isinstance(holder, dict):
            del holder[key]
        elif how < 0.3 and isinstance(holder, dict):
            holder[self._text(8)] = self.value(2)
        else:
            holder[key] = self.value(3)

    def value(self, depth: int) -> Any:
        """Any JSON value, and some that are none."""
        rng = self.rng
        kinds = 9 if depth else 7
        match rng.randrange(kinds):
            case 0:
                return None
            case 1:
                return rng.choice((True, False))
            case 2:
                return rng.choice((0, -1, 2**31, 2**63, -(10**30), 10**400))
            case 3:
                return rng.choice((0.5, -1e308, 1e-308, float("inf"), float("nan")))
            case 4 | 5 | 6:
                return self._text(30)
            case 7:
                return [self.value(depth - 1) for _ in range(rng.randrange(4))]
            case _:
                return {self._text(6): self.value(depth - 1) for _ in range(rng.randrange(4))}

    def _text(self, max_chars: int) -> str:
        alphabet = "ab .,{}[]\"'<>|\\/\0\n\x7fäß€漢😀\u202e\ud800\udfff\ufffe"
        count = self.rng.randrange(max_chars + 1)
        return "".join(self.rng.choice(alphabet) for _ in range(count))

    def _id(self) -> str:
        return self.rng.choice(self.ids)
