"""Domain events -> server events of the Realtime API (GA shape). Pure: no I/O, no clock."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from functools import singledispatchmethod
from typing import Any

from app.conversation import events as e
from app.conversation.ids import new_id

Wire = dict[str, Any]

# Why a response did not complete, as far as the protocol has names for it.
_REASONS = ("turn_detected", "client_cancelled", "max_output_tokens", "content_filter")


@dataclass(frozen=True, slots=True)
class Speaker:
    """How the session speaks at the moment, for the response object."""

    format: Wire
    voice: str


class WireMapper:
    """Server events of one connection. Remembers which running response is spoken, which written.

    ``speaker`` is replaced after every session update.
    """

    def __init__(self, conversation_id: str, speaker: Speaker) -> None:
        self.conversation_id = conversation_id
        self.speaker = speaker
        self._is_spoken: dict[str, bool] = {}

    @singledispatchmethod
    def to_wire(self, event: e.SessionEvent) -> list[Wire]:
        """The server events for a domain event, in order."""
        raise TypeError(f"no server event for {type(event).__name__}")

    @to_wire.register
    def _(self, event: e.SpeechStarted) -> list[Wire]:
        return [
            server_event(
                "input_audio_buffer.speech_started",
                audio_start_ms=event.audio_start_ms,
                item_id=event.item_id,
            )
        ]

    @to_wire.register
    def _(self, event: e.SpeechStopped) -> list[Wire]:
        return [
            server_event(
                "input_audio_buffer.speech_stopped",
                audio_end_ms=event.audio_end_ms,
                item_id=event.item_id,
            )
        ]

    @to_wire.register
    def _(self, event: e.InputCommitted) -> list[Wire]:
        return [
            server_event(
                "input_audio_buffer.committed",
                item_id=event.item_id,
                previous_item_id=event.previous_item_id,
            )
        ]

    @to_wire.register
    def _(self, event: e.InputCleared) -> list[Wire]:
        return [server_event("input_audio_buffer.cleared")]

    @to_wire.register
    def _(self, event: e.ItemAdded) -> list[Wire]:
        return [_item_event("conversation.item.added", event.item, event.previous_item_id)]

    @to_wire.register
    def _(self, event: e.ItemDone) -> list[Wire]:
        return [_item_event("conversation.item.done", event.item, event.previous_item_id)]

    @to_wire.register
    def _(self, event: e.ItemDeleted) -> list[Wire]:
        return [server_event("conversation.item.deleted", item_id=event.item_id)]

    @to_wire.register
    def _(self, event: e.ItemTruncated) -> list[Wire]:
        return [
            server_event(
                "conversation.item.truncated",
                item_id=event.item_id,
                content_index=event.content_index,
                audio_end_ms=event.audio_end_ms,
            )
        ]

    @to_wire.register
    def _(self, event: e.TranscriptionDelta) -> list[Wire]:
        return [
            server_event(
                "conversation.item.input_audio_transcription.delta",
                item_id=event.item_id,
                content_index=0,
                delta=event.text,
            )
        ]

    @to_wire.register
    def _(self, event: e.TranscriptionCompleted) -> list[Wire]:
        return [
            server_event(
                "conversation.item.input_audio_transcription.completed",
                item_id=event.item_id,
                content_index=0,
                transcript=event.transcript,
                usage={"type": "duration", "seconds": round(event.audio_s, 3)},
            )
        ]

    @to_wire.register
    def _(self, event: e.TranscriptionFailed) -> list[Wire]:
        return [
            server_event(
                "conversation.item.input_audio_transcription.failed",
                item_id=event.item_id,
                content_index=0,
                error={
                    "type": "server_error",
                    "code": event.code,
                    "message": event.message,
                    "param": None,
                },
            )
        ]

    @to_wire.register
    def _(self, event: e.ResponseStarted) -> list[Wire]:
        self._is_spoken[event.response.id] = event.response.modality == "audio"
        return [server_event("response.created", response=self.response_object(event.response))]

    @to_wire.register
    def _(self, event: e.OutputStarted) -> list[Wire]:
        spoken = self._is_spoken[event.response_id]
        # The item is shown as it begins: what it will say is not known yet.
        item = item_object(event.item) | {"status": "in_progress", "content": []}
        part = {"type": "audio", "transcript": ""} if spoken else {"type": "text", "text": ""}
        return [
            server_event(
                "response.output_item.added",
                response_id=event.response_id,
                output_index=0,
                item=item,
            ),
            server_event(
                "conversation.item.added", previous_item_id=event.previous_item_id, item=item
            ),
            _in_part("response.content_part.added", event.response_id, event.item.id, part=part),
        ]

    @to_wire.register
    def _(self, event: e.OutputText) -> list[Wire]:
        spoken = self._is_spoken[event.response_id]
        kind = "response.output_audio_transcript.delta" if spoken else "response.output_text.delta"
        return [_in_part(kind, event.response_id, event.item_id, delta=event.text)]

    @to_wire.register
    def _(self, event: e.OutputAudio) -> list[Wire]:
        delta = base64.b64encode(event.audio).decode("ascii")
        kind = "response.output_audio.delta"
        return [_in_part(kind, event.response_id, event.item_id, delta=delta)]

    @to_wire.register
    def _(self, event: e.PlaybackCut) -> list[Wire]:
        return []  # a client that plays the audio itself acts on speech_started, or on its own will

    @to_wire.register
    def _(self, event: e.OutputDone) -> list[Wire]:
        response_id, item = event.response_id, event.item
        text = "".join(part.text or "" for part in item.content)
        shown = item_object(item)
        if self._is_spoken[response_id]:
            part = {"type": "audio", "transcript": text}
            done = [
                _in_part("response.output_audio.done", response_id, item.id),
                _in_part(
                    "response.output_audio_transcript.done", response_id, item.id, transcript=text
                ),
            ]
        else:
            part = {"type": "text", "text": text}
            done = [_in_part("response.output_text.done", response_id, item.id, text=text)]
        return [
            *done,
            _in_part("response.content_part.done", response_id, item.id, part=part),
            server_event(
                "response.output_item.done", response_id=response_id, output_index=0, item=shown
            ),
            _item_event("conversation.item.done", item, event.previous_item_id),
        ]

    @to_wire.register
    def _(self, event: e.ResponseDone) -> list[Wire]:
        self._is_spoken.pop(event.response.id, None)
        return [server_event("response.done", response=self.response_object(event.response))]

    @to_wire.register
    def _(self, event: e.TurnTraced) -> list[Wire]:
        return [server_event("parley.turn.trace", turn=event.turn)]

    def response_object(self, response: e.Response) -> Wire:
        """The response resource. ``usage`` is null until the response has ended."""
        ended = response.status != "in_progress"
        return {
            "object": "realtime.response",
            "id": response.id,
            "status": response.status,
            "status_details": _status_details(response),
            "output": [item_object(item) for item in response.output],
            "conversation_id": self.conversation_id,
            "output_modalities": [response.modality],
            "max_output_tokens": response.max_output_tokens or "inf",
            "audio": {"output": {"format": self.speaker.format, "voice": self.speaker.voice}},
            "usage": _usage(response.usage) if ended else None,
            "metadata": response.metadata,
        }


def server_event(kind: str, **fields: Any) -> Wire:
    """A server event with a fresh ``event_id``."""
    return {"type": kind, "event_id": new_id("event"), **fields}


def error_event(
    kind: str,
    code: str | None,
    message: str,
    *,
    param: str | None = None,
    client_event_id: str | None = None,
) -> Wire:
    """An ``error`` event. ``client_event_id``: the event that caused it, if it was named."""
    error = {
        "type": kind,
        "code": code,
        "message": message,
        "param": param,
        "event_id": client_event_id,
    }
    return server_event("error", error=error)


def item_object(item: e.Item) -> Wire:
    """An item as clients see it: everything but the audio."""
    return {
        "id": item.id,
        "object": "realtime.item",
        "type": "message",
        "status": item.status,
        "role": item.role,
        "content": [_part_object(part) for part in item.content],
    }


def _part_object(part: e.Part) -> Wire:
    if part.type in ("input_text", "output_text"):
        return {"type": part.type, "text": part.text or ""}
    return {"type": part.type, "transcript": part.text}


def _item_event(kind: str, item: e.Item, previous_item_id: str | None) -> Wire:
    return server_event(kind, previous_item_id=previous_item_id, item=item_object(item))


def _in_part(kind: str, response_id: str, item_id: str, **fields: Any) -> Wire:
    return server_event(
        kind, response_id=response_id, item_id=item_id, output_index=0, content_index=0, **fields
    )


def _status_details(response: e.Response) -> Wire | None:
    if response.status in ("in_progress", "completed"):
        return None
    details: Wire = {"type": response.status}
    if response.status == "failed":
        details["error"] = {
            "type": "server_error",
            "code": response.reason or "server_error",
            "message": response.error_message or "The response failed.",
        }
    elif response.reason in _REASONS:
        details["reason"] = response.reason
    return details


def _usage(usage: e.ResponseUsage) -> Wire:
    """Our model reads and writes text only, so no audio tokens are ever counted."""
    return {
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "input_token_details": {
            "text_tokens": usage.input_tokens,
            "audio_tokens": 0,
            "image_tokens": 0,
            "cached_tokens": usage.cached_tokens,
            "cached_tokens_details": {
                "text_tokens": usage.cached_tokens,
                "audio_tokens": 0,
                "image_tokens": 0,
            },
        },
        "output_token_details": {"text_tokens": usage.output_tokens, "audio_tokens": 0},
    }
