"""What a client of the Realtime protocol knows of its conversation. No I/O: events in, state out.

Positions are samples at 24 kHz since the caller began to speak, as in ``app.clients.recording``.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from app.clients.recording import RATE, Played, Recording, first_audible

# After the last sign of life the server may still notice that the caller spoke again, so the
# conversation counts as finished only when it has been quiet for this long.
SETTLE_SAMPLES = RATE * 8 // 10
# A trace that is asked for but does not come is not worth more waiting than this.
TRACE_GRACE_SAMPLES = 3 * RATE

Event = dict[str, Any]


class ProtocolError(Exception):
    """The server sent something that no Realtime server sends."""


@dataclass(slots=True)
class LoggedTurn:
    """One exchange: what the caller said and how it was answered.

    ``heard`` has the transcript of each utterance by its item id, None while it is not known; a
    caller who pauses may say several before one answer. ``status`` is the response's; "" while
    there is none. ``is_withdrawn``: the caller had not finished, and the server has noticed.
    """

    heard: dict[str, str | None] = field(default_factory=dict)
    response_id: str = ""
    reply_item_id: str = ""
    reply: str = ""
    status: str = ""
    failure: str = ""
    pieces: list[Played] = field(default_factory=list)
    is_withdrawn: bool = False
    trace: dict[str, Any] | None = None

    @property
    def transcript(self) -> str:
        """What the caller said, as far as it is known."""
        return " ".join(text for text in self.heard.values() if text)

    @property
    def awaits_response(self) -> bool:
        """The server owes an answer. Nothing is owed when nothing was said."""
        return not self.response_id and any(text != "" for text in self.heard.values())

    @property
    def is_running(self) -> bool:
        """The answer has begun and not ended."""
        return bool(self.response_id) and not self.status

    @property
    def reply_samples(self) -> int:
        """Length of the reply as far as it was played."""
        return sum(piece.pcm.size for piece in self.pieces)


class Verdict(Enum):
    """What the client should do after the caller's audio has ended."""

    WAIT = "wait"
    FINISHED = "finished"
    NO_SPEECH = "no_speech"
    NO_WORDS = "no_words"
    STALLED = "stalled"


class TalkLog:
    """The running account of a conversation while one recording is spoken into it."""

    def __init__(self, recording: Recording, *, expects_traces: bool) -> None:
        self.recording = recording
        self.turns: list[LoggedTurn] = []
        self.errors: list[str] = []
        self.is_caller_speaking = False
        self.speech_was_heard = False
        self.expects_traces = expects_traces
        self.silenced_at: list[int] = []
        """Where the caller's voice made the player fall silent."""
        self.num_rejoined = 0
        """Utterances that were taken for over, and became part of what followed."""
        self._written: dict[str, str | None] = {}  # texts of the caller without an answer yet
        self._last_sign = 0
        self._handlers: dict[str, Callable[[Event, int], list[Event]]] = {
            "input_audio_buffer.speech_started": self._on_speech_started,
            "input_audio_buffer.speech_stopped": self._on_speech_stopped,
            "input_audio_buffer.committed": self._on_committed,
            "conversation.item.added": self._on_item_added,
            "conversation.item.deleted": self._on_item_deleted,
            "conversation.item.input_audio_transcription.completed": self._on_transcript,
            "conversation.item.input_audio_transcription.failed": self._on_transcript_failed,
            "response.created": self._on_response_created,
            "response.output_audio.delta": self._on_audio,
            "response.output_audio_transcript.delta": self._on_text,
            "response.output_text.delta": self._on_text,
            "response.done": self._on_response_done,
            "parley.turn.trace": self._on_trace,
            "error": self._on_error,
        }

    def feed(self, event: Event, at: int) -> list[Event]:
        """Takes a server event that arrived ``at``; what the client has to send in return.

        Raises ProtocolError when a field is missing or of the wrong kind.
        """
        self._last_sign = max(self._last_sign, at)
        handler = self._handlers.get(event["type"])
        if handler is None:
            return []
        try:
            return handler(event, at)
        except (KeyError, TypeError, AttributeError, binascii.Error) as error:
            raise ProtocolError(f"malformed {event['type']} event: {error!r}") from error

    def verdict(self, now: int, timeout_samples: int) -> Verdict:
        """Whether to go on listening, ``now`` being after the end of the caller's audio."""
        quiet = now - max(self._last_sign, self.recording.caller.size, self.recording.reply_end)
        if self._is_waiting(quiet):
            return Verdict.STALLED if quiet >= timeout_samples else Verdict.WAIT
        if quiet < SETTLE_SAMPLES:
            return Verdict.WAIT
        if any(turn.status for turn in self.turns):
            return Verdict.FINISHED
        if quiet < timeout_samples:
            return Verdict.WAIT
        return Verdict.NO_WORDS if self.speech_was_heard else Verdict.NO_SPEECH

    def _is_waiting(self, quiet: int) -> bool:
        if self.is_caller_speaking:
            return True
        if any(turn.awaits_response or turn.is_running for turn in self.turns):
            return True
        missing = any(turn.status and turn.trace is None for turn in self.turns)
        return missing and self.expects_traces and quiet < TRACE_GRACE_SAMPLES

    def gap_ms(
        self, turn: LoggedTurn, last_voiced_before: Callable[[int], int | None]
    ) -> float | None:
        """Silence between the caller's voice and the audible reply; None without a reply."""
        heard_at = first_audible(turn.pieces)
        if heard_at is None:
            return None
        voiced_until = last_voiced_before(heard_at)
        return None if voiced_until is None else (heard_at - voiced_until) * 1000 / RATE

    def _on_speech_started(self, event: Event, at: int) -> list[Event]:
        self.is_caller_speaking = True
        self.speech_was_heard = True
        answering = self.turns[-1] if self.turns else None
        if answering is None or not answering.pieces or self.recording.reply_end <= at:
            return []
        # Barge-in: fall silent, and tell the server how much was heard.
        self.recording.stop_playing(at)
        self.silenced_at.append(at)
        answering.pieces = [piece for piece in answering.pieces if piece.start < at]
        return [
            {
                "type": "conversation.item.truncate",
                "item_id": answering.reply_item_id,
                "content_index": 0,
                "audio_end_ms": answering.reply_samples * 1000 // RATE,
            }
        ]

    def _on_speech_stopped(self, event: Event, at: int) -> list[Event]:
        self.is_caller_speaking = False
        return []

    def _on_committed(self, event: Event, at: int) -> list[Event]:
        self.is_caller_speaking = False
        self.turns.append(LoggedTurn(heard={event["item_id"]: None}))
        return []

    def _on_item_added(self, event: Event, at: int) -> list[Event]:
        """A caller's keys, or what another client wrote; words that were spoken come later."""
        item = event["item"]
        if item["type"] == "message" and item["role"] == "user":
            texts = [part["text"] for part in item["content"] if part["type"] == "input_text"]
            if texts:
                self._written[item["id"]] = " ".join(texts)
        return []

    def _on_item_deleted(self, event: Event, at: int) -> list[Event]:
        for turn in [*self.turns]:
            if event["item_id"] not in turn.heard:
                continue
            del turn.heard[event["item_id"]]
            self.num_rejoined += 1
            turn.is_withdrawn = not turn.heard
            if turn.is_withdrawn and not turn.response_id:
                self.turns.remove(turn)
        return []

    def _on_transcript(self, event: Event, at: int) -> list[Event]:
        self._set_transcript(event["item_id"], event["transcript"].strip())
        return []

    def _on_transcript_failed(self, event: Event, at: int) -> list[Event]:
        message = event["error"].get("message") or "no reason given"
        self.errors.append(f"the server could not transcribe the caller: {message}")
        self._set_transcript(event["item_id"], "")
        return []

    def _set_transcript(self, item_id: str, text: str) -> None:
        for turn in self.turns:
            if item_id in turn.heard:
                turn.heard[item_id] = text

    def _on_response_created(self, event: Event, at: int) -> list[Event]:
        waiting = [turn for turn in self.turns if turn.awaits_response]
        # Several utterances may share one answer, and it belongs to the last of them.
        for earlier in waiting[:-1]:
            waiting[-1].heard = earlier.heard | waiting[-1].heard
            self.turns.remove(earlier)
        if not waiting:
            waiting = [LoggedTurn()]
            self.turns.extend(waiting)
        waiting[-1].response_id = event["response"]["id"]
        waiting[-1].heard |= self._written
        self._written = {}
        return []

    def _on_audio(self, event: Event, at: int) -> list[Event]:
        turn = self._answered(event["response_id"])
        if turn is None or turn.status:
            return []
        turn.reply_item_id = event["item_id"]
        payload = base64.b64decode(event["delta"], validate=True)
        if len(payload) % 2:
            raise ProtocolError("an audio delta ends in the middle of a sample")
        pcm = np.frombuffer(payload, dtype="<i2").astype(np.int16, copy=False)
        if pcm.size and not self.is_caller_speaking:
            turn.pieces.append(self.recording.play(pcm, at))
        return []

    def _on_text(self, event: Event, at: int) -> list[Event]:
        turn = self._answered(event["response_id"])
        if turn is not None:
            turn.reply += event["delta"]
        return []

    def _on_response_done(self, event: Event, at: int) -> list[Event]:
        response = event["response"]
        turn = self._answered(response["id"])
        if turn is not None:
            turn.status = response["status"]
            turn.reply = turn.reply.strip()
            if turn.status == "failed":
                error = (response.get("status_details") or {}).get("error") or {}
                turn.failure = error.get("message") or error.get("code") or "no reason given"
        return []

    def _on_trace(self, event: Event, at: int) -> list[Event]:
        turn = self._answered(event["turn"]["response_id"])
        if turn is not None:
            turn.trace = event["turn"]
        return []

    def _on_error(self, event: Event, at: int) -> list[Event]:
        self.errors.append(event["error"]["message"])
        return []

    def _answered(self, response_id: str) -> LoggedTurn | None:
        return next((turn for turn in self.turns if turn.response_id == response_id), None)
