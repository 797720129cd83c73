"""The trace of a turn: its instants, where its time went, and what it cost."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

# In the order in which a turn passes them (architecture.md, Clocks).
INSTANTS = (
    "speech_end",
    "endpoint",
    "asr_final",
    "llm_submit",
    "llm_scheduled",
    "llm_first_token",
    "first_clause",
    "tts_first_audio",
    "first_audio_sent",
)

# Each stage ends at the instant beside it. `queue` is all the waiting between the words and the
# first work of the model on them.
STAGES = (
    ("endpoint", "endpoint"),
    ("asr", "asr_final"),
    ("queue", "llm_scheduled"),
    ("prefill", "llm_first_token"),
    ("decode", "first_clause"),
    ("tts", "tts_first_audio"),
    ("send", "first_audio_sent"),
)


def attribute_ns(instants: dict[str, int]) -> dict[str, int]:
    """Give every nanosecond from ``speech_end`` to ``first_audio_sent`` to exactly one stage.

    Stages may overlap (a transcript is tried before the end of the turn is decided). The frontier
    only moves forward: a stage that was over before the frontier reached it cost the caller
    nothing. The parts add up to the whole exactly, because the last instant closes the sum.
    """
    start, end = instants["speech_end"], instants["first_audio_sent"]
    frontier = start
    parts = {}
    for stage, instant in STAGES:
        reached = min(max(frontier, instants.get(instant, frontier)), end)
        parts[stage] = reached - frontier
        frontier = reached
    return parts


@dataclass(slots=True)
class TurnTrace:
    """Collected while the turn runs. Instants are monotonic nanoseconds.

    ``outcome``: answered, interrupted, cancelled, incomplete, failed, or silent (nothing to say).
    ``spoken``: the turn was spoken (typed turns have no voice-to-voice).
    """

    turn_id: str
    session_id: str
    response_id: str = ""
    spoken: bool = False
    outcome: str = ""
    transcript: str = ""
    reply: str = ""
    instants: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def mark(self, instant: str, at_ns: int) -> None:
        """Note an instant; the first time counts."""
        if instant not in INSTANTS:
            raise KeyError(instant)
        self.instants.setdefault(instant, at_ns)

    def begin_typed(self, at_ns: int) -> None:
        """A turn that nobody spoke begins where its answer is asked for."""
        for instant in ("speech_end", "endpoint", "asr_final"):
            self.mark(instant, at_ns)

    def join(self, heard: TurnTrace) -> None:
        """Take over what is known of the caller's side of the turn."""
        self.spoken = heard.spoken
        self.transcript = heard.transcript
        for instant, at_ns in heard.instants.items():
            self.mark(instant, at_ns)
        self.facts.update(heard.facts)

    def to_dict(self) -> dict[str, Any]:
        """The turn as the outside sees it. Milliseconds, relative to ``speech_end``.

        A typed turn starts when the response is requested; ``time_to_first_audio_ms`` counts from
        the end of the turn (spoken: the endpoint) and exists for both.
        """
        # Microseconds first: parts and whole are sums of the same integers.
        instants_us = {name: at // 1000 for name, at in self.instants.items()}
        heard = "first_audio_sent" in instants_us and "speech_end" in instants_us
        parts = attribute_ns(instants_us) if heard else {}
        origin = instants_us.get("speech_end", min(instants_us.values(), default=0))
        whole = instants_us["first_audio_sent"] - instants_us["speech_end"] if heard else None
        since_end = None
        if heard:
            end_us = instants_us.get("endpoint", origin)
            since_end = (instants_us["first_audio_sent"] - end_us) / 1000
        return {
            "turn_id": self.turn_id,
            "session_id": self.session_id,
            "response_id": self.response_id,
            "outcome": self.outcome,
            "transcript": self.transcript,
            "reply": self.reply,
            "voice_to_voice_ms": whole / 1000 if whole is not None and self.spoken else None,
            "time_to_first_audio_ms": since_end,
            "stages_ms": {stage: us / 1000 for stage, us in parts.items()},
            "instants_ms": {
                name: (instants_us[name] - origin) / 1000
                for name in INSTANTS
                if name in instants_us
            },
            "facts": dict(self.facts),
        }


class TraceStore:
    """The last turns, in memory. Overflow rule: the oldest is forgotten."""

    def __init__(self, capacity: int) -> None:
        self._turns: deque[dict[str, Any]] = deque(maxlen=capacity)

    def add(self, turn: dict[str, Any]) -> None:
        """Keep a finished turn (``TurnTrace.to_dict``)."""
        self._turns.append(turn)

    def recent(self, limit: int) -> list[dict[str, Any]]:
        """The newest turns, newest first."""
        return list(self._turns)[: -limit - 1 : -1]
