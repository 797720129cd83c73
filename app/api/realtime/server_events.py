"""Domain events -> server events of the Realtime API (GA shape). Pure: no I/O, no clock."""

from __future__ import annotations

import base64
from dataclasses import asdict, dataclass
from functools import singledispatchmethod
from typing import Any

from app.access import RateState
from app.conversation import events as e
from app.conversation import new_id

Wire = dict[str, Any]

# Under this name the server's own tools appear.
SERVER_LABEL = "parley"

# Why a response did not complete, as far as the protocol has names for it.
_REASONS = ("turn_detected", "client_cancelled", "max_output_tokens", "content_filter")


@dataclass(frozen=True, slots=True)
class Speaker:
    """How the session speaks at the moment, for the response object."""

    format: Wire
    voice: str


@dataclass(slots=True)
class _Running:
    """What later events of a running response need to know of it."""

    is_spoken: bool
    in_conversation: bool
    items: dict[str, e.Item]  # by their ids, in the order of their output index


class WireMapper:
    """Server events of one connection. Remembers the running responses and their items.

    ``speaker`` is replaced after every session update.
    """

    def __init__(self, conversation_id: str, speaker: Speaker) -> None:
        self.conversation_id = conversation_id
        self.speaker = speaker
        self._running: dict[str, _Running] = {}

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
    def _(self, event: e.IdleTimedOut) -> list[Wire]:
        return [
            server_event(
                "input_audio_buffer.timeout_triggered",
                item_id=event.item_id,
                audio_start_ms=event.audio_start_ms,
                audio_end_ms=event.audio_end_ms,
            )
        ]

    @to_wire.register
    def _(self, event: e.DtmfReceived) -> list[Wire]:
        received_at = event.received_at_s
        kind = "input_audio_buffer.dtmf_event_received"
        # The API gives this event no event_id.
        return [{"type": kind, "event": event.key, "received_at": received_at}]

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
    def _(self, event: e.TranscriptWords) -> list[Wire]:
        words = [asdict(word) for word in event.words]
        return [_words_event(event.item_id, words=words, error=None)]

    @to_wire.register
    def _(self, event: e.TranscriptWordsFailed) -> list[Wire]:
        error = {"type": "server_error", "code": event.code, "message": event.message}
        return [_words_event(event.item_id, words=None, error=error)]

    @to_wire.register
    def _(self, event: e.ResponseStarted) -> list[Wire]:
        response = event.response
        self._running[response.id] = _Running(
            response.modality == "audio", response.in_conversation, {}
        )
        return [server_event("response.created", response=self.response_object(event.response))]

    @to_wire.register
    def _(self, event: e.OutputStarted) -> list[Wire]:
        running, item = self._running[event.response_id], event.item
        running.items[item.id] = item
        # The item is shown as it begins: what it will say is not known yet.
        shown = item_object(item)
        if item.call is None:
            shown |= {"status": "in_progress", "content": []}
        else:
            shown["arguments"] = ""
        events = [self._of_item("response.output_item.added", event.response_id, item, shown)]
        if running.in_conversation:
            events.append(
                server_event(
                    "conversation.item.added", previous_item_id=event.previous_item_id, item=shown
                )
            )
        if item.call is None:
            part = {"type": "text", "text": ""}
            if running.is_spoken:
                part = {"type": "audio", "transcript": ""}
            at = (event.response_id, item.id)
            events.append(self._in_part("response.content_part.added", *at, part=part))
        elif item.call.runs_here:
            events.append(
                server_event(
                    "response.mcp_call.in_progress",
                    item_id=item.id,
                    output_index=self._output_index(event.response_id, item.id),
                )
            )
        return events

    @to_wire.register
    def _(self, event: e.OutputText) -> list[Wire]:
        spoken = self._running[event.response_id].is_spoken
        kind = "response.output_audio_transcript.delta" if spoken else "response.output_text.delta"
        return [self._in_part(kind, event.response_id, event.item_id, delta=event.text)]

    @to_wire.register
    def _(self, event: e.OutputAudio) -> list[Wire]:
        delta = base64.b64encode(event.audio).decode("ascii")
        kind = "response.output_audio.delta"
        return [self._in_part(kind, event.response_id, event.item_id, delta=delta)]

    @to_wire.register
    def _(self, event: e.OutputArguments) -> list[Wire]:
        return [self._of_call("delta", event.response_id, event.item_id, delta=event.text)]

    @to_wire.register
    def _(self, event: e.PlaybackCut) -> list[Wire]:
        return []  # a client that plays the audio itself acts on speech_started, or on its own will

    @to_wire.register
    def _(self, event: e.OutputDone) -> list[Wire]:
        response_id, item = event.response_id, event.item
        shown = item_object(item)
        events = self._call_done(response_id, item) if item.call else self._part_done(event)
        events.append(self._of_item("response.output_item.done", response_id, item, shown))
        if self._running[response_id].in_conversation:
            events.append(_item_event("conversation.item.done", item, event.previous_item_id))
        return events

    def _part_done(self, event: e.OutputDone) -> list[Wire]:
        at = (event.response_id, event.item.id)
        text = "".join(part.text or "" for part in event.item.content)
        if self._running[event.response_id].is_spoken:
            part = {"type": "audio", "transcript": text}
            done = [
                self._in_part("response.output_audio.done", *at),
                self._in_part("response.output_audio_transcript.done", *at, transcript=text),
            ]
        else:
            part = {"type": "text", "text": text}
            done = [self._in_part("response.output_text.done", *at, text=text)]
        return [*done, self._in_part("response.content_part.done", *at, part=part)]

    def _call_done(self, response_id: str, item: e.Item) -> list[Wire]:
        assert item.call is not None
        fields: Wire = {"arguments": item.call.arguments}
        if not item.call.runs_here:
            fields["name"] = item.call.name
            return [self._of_call("done", response_id, item.id, **fields)]
        outcome = "completed" if item.call.error is None else "failed"
        return [
            self._of_call("done", response_id, item.id, **fields),
            server_event(
                f"response.mcp_call.{outcome}",
                item_id=item.id,
                output_index=self._output_index(response_id, item.id),
            ),
        ]

    @to_wire.register
    def _(self, event: e.ResponseDone) -> list[Wire]:
        self._running.pop(event.response.id, None)
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
            "conversation_id": self.conversation_id if response.in_conversation else None,
            "output_modalities": [response.modality],
            "max_output_tokens": response.max_output_tokens or "inf",
            "audio": {"output": {"format": self.speaker.format, "voice": self.speaker.voice}},
            "usage": _usage(response.usage) if ended else None,
            "metadata": response.metadata,
        }

    def _output_index(self, response_id: str, item_id: str) -> int:
        return list(self._running[response_id].items).index(item_id)

    def _of_item(self, kind: str, response_id: str, item: e.Item, shown: Wire) -> Wire:
        index = self._output_index(response_id, item.id)
        return server_event(kind, response_id=response_id, output_index=index, item=shown)

    def _in_part(self, kind: str, response_id: str, item_id: str, **fields: Any) -> Wire:
        at = {"response_id": response_id, "item_id": item_id}
        index = self._output_index(response_id, item_id)
        return server_event(kind, **at, output_index=index, content_index=0, **fields)

    def _of_call(self, end: str, response_id: str, item_id: str, **fields: Any) -> Wire:
        call = self._running[response_id].items[item_id].call
        assert call is not None
        at = {"response_id": response_id, "item_id": item_id}
        index = self._output_index(response_id, item_id)
        if call.runs_here:
            kind = f"response.mcp_call_arguments.{end}"
            return server_event(kind, **at, output_index=index, **fields)
        kind = f"response.function_call_arguments.{end}"
        return server_event(kind, **at, output_index=index, call_id=call.call_id, **fields)


def server_event(kind: str, **fields: Any) -> Wire:
    """A server event with a fresh ``event_id``."""
    return {"type": kind, "event_id": new_id("event"), **fields}


def rate_limits_event(messages: RateState) -> Wire:
    """What is left of the only limit that there is in a session: messages of one key."""
    limit = {
        "name": "requests",
        "limit": messages.limit,
        "remaining": messages.remaining,
        "reset_seconds": round(messages.reset_s, 3),
    }
    return server_event("rate_limits.updated", rate_limits=[limit])


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
    """An item as clients see it: everything but the audio.

    A call of a tool of our own is shown as the API shows calls that the server makes by itself: as
    an ``mcp_call``, so that no client believes that it should run it.
    """
    shown: Wire = {"id": item.id}
    call, output = item.call, item.output
    if call is not None and call.runs_here:
        error = call.error and {"type": "tool_execution_error", "message": call.error}
        return shown | {
            "type": "mcp_call",
            "server_label": SERVER_LABEL,
            "name": call.name,
            "arguments": call.arguments,
            "output": call.output,
            "error": error,
            "approval_request_id": None,
        }
    shown |= {"object": "realtime.item", "status": item.status}
    if call is not None:
        return shown | {
            "type": "function_call",
            "call_id": call.call_id,
            "name": call.name,
            "arguments": call.arguments,
        }
    if output is not None:
        return shown | {
            "type": "function_call_output",
            "call_id": output.call_id,
            "output": output.output,
        }
    content = [_part_object(part) for part in item.content]
    return shown | {"type": "message", "role": item.role, "content": content}


def _part_object(part: e.Part) -> Wire:
    if part.type in ("input_text", "output_text"):
        return {"type": part.type, "text": part.text or ""}
    return {"type": part.type, "transcript": part.text}


def _words_event(item_id: str, **fields: Any) -> Wire:
    return server_event("parley.transcript.words", item_id=item_id, content_index=0, **fields)


def _item_event(kind: str, item: e.Item, previous_item_id: str | None) -> Wire:
    return server_event(kind, previous_item_id=previous_item_id, item=item_object(item))


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
