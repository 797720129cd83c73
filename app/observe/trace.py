"""The trace of a turn: its instants, where its time went, and what it cost.

``TurnTrace.to_dict`` is the one record of a turn, from which everything else is made: the event
that a client gets, the rows of the store, the metrics, the spans. ``FACTS`` names what it may hold
beside the instants.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from app.observe.turn_audio import TurnAudio

if TYPE_CHECKING:
    from audio.asr import Transcript
    from audio.frame import Samples
    from llm_core import Speculation

TurnOutcome = Literal[
    "answered",
    "silent",
    "interrupted",
    "withdrawn",
    "cancelled",
    "failed",
    "timed_out",
    "incomplete",
]
OUTCOMES: tuple[TurnOutcome, ...] = get_args(TurnOutcome)

# In the order in which a turn passes them (each stage of ``STAGES`` ends at one of them).
PATH_INSTANTS = (
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
# A client may report when it played the first audible sample; `ended` closes every record.
INSTANTS = (*PATH_INSTANTS, "first_audio_played", "ended")

# What a record may say beside its instants. All of it is optional: a turn that failed early knows
# less. Times are milliseconds.
FACTS = {
    "engine": "in a roll-out: stable or canary, whichever the conversation was given to",
    "engine_fallback": "why the stable engine took the answer over from the canary",
    "model": "what answered: its name, and the beginning of the hash of its content",
    "asr_ms": "the recogniser's work on the words that were used",
    "asr_audio_s": "audio that was transcribed",
    "asr_avg_logprob": "mean log probability of its tokens",
    "asr_fallbacks": "runs beyond the first",
    "queue_wait_ms": "in the engine, from its receipt of the request to its first work on it",
    "prompt_tokens": "prompt length",
    "cached_tokens": "of it, found in the KV cache",
    "computed_tokens": "of it, computed for this turn",
    "completion_tokens": "generated",
    "llm_steps": "steps of the engine for it",
    "drafted_tokens": "guesses at what follows that the engine verified",
    "accepted_tokens": "of them, right: tokens that took no step of their own",
    "accepted_by_depth": "the same by place: the first counts guesses behind known text",
    "draft_ms": "spent on guessing",
    "verify_ms": "of the steps that verified guesses",
    "ttft_ms": "from the submission to the first token",
    "tpot_ms": "per token after the first",
    "finish_reason": "why the model stopped",
    "unseen_tokens": "the attention window had left so many tokens when the answer ended",
    "dropped_messages": "oldest messages left out, for the context was too short",
    "forgotten_items": "of the conversation, those that were too old to be kept",
    "downgrades": "what the engine gave up to be in time: turns but the last, or the length",
    "ahead_ms": "how long before its request the answer had been begun",
    "filler": "what was said while a tool ran",
    "tool_calls": "functions that the model called",
    "tool_ms": "waited for them",
    "tts_ms": "the voice's work, all clauses",
    "tts_first_ms": "of it, until the first sound",
    "tts_clauses": "clauses spoken",
    "reply_audio_s": "audio sent",
    "holds": "how often it was silent until it was known whether the caller interrupts",
    "playout_gap_ms": "silence inside the reply because audio came too late",
    "rejoined": "how often the turn was taken for over before it was",
    "wasted_transcripts": "early transcripts that were for nothing since the last turn",
    "wasted_answers": "answers begun for nothing since the last turn",
    "wasted_tokens": "tokens of those",
    "loop_lag_p99_ms": "lateness of the event loop during the turn",
    "loop_lag_max_ms": "its maximum",
    "transcript_chars": "length of the caller's words, where those themselves are not kept",
    "reply_chars": "the same of the answer's",
}

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
STAGE_NAMES = tuple(stage for stage, _ in STAGES)


def attribute_us(instants_us: dict[str, int]) -> dict[str, int]:
    """Give every microsecond from ``speech_end`` to ``first_audio_sent`` to exactly one stage.

    Stages may overlap (a transcript is tried before the end of the turn is decided). The frontier
    only moves forward: a stage that was over before the frontier reached it cost the caller
    nothing. The parts add up to the whole exactly, because the last instant closes the sum.
    """
    start, end = instants_us["speech_end"], instants_us["first_audio_sent"]
    frontier = start
    parts = {}
    for stage, instant in STAGES:
        reached = min(max(frontier, instants_us.get(instant, frontier)), end)
        parts[stage] = reached - frontier
        frontier = reached
    return parts


@dataclass(slots=True)
class BudgetAction:
    """Something that was done because a turn was late.

    ``stage`` is the one furthest over its target, ``at_ms`` when, ``overspent_ms`` by how much the
    turn was late. ``saved_ms``: how much earlier the first clause was complete, or the first sound
    was heard; None: not known, the turn ended before.
    """

    policy: str
    stage: str
    at_ms: float
    overspent_ms: float
    saved_ms: float | None = None


@dataclass(slots=True)
class TurnTrace:
    """Collected while the turn runs. Instants are monotonic nanoseconds.

    ``outcome`` is "" until ``end``; silent: there was nothing to say; withdrawn: the caller had not
    finished, and went on with the same turn. ``reason``: the error code
    or what stopped the turn. ``spoken``: by the caller (typed turns have no voice-to-voice).
    ``ended_at_ms`` is wall time, Unix milliseconds. ``words``: those of the transcript with
    ``start_ms`` and ``end_ms`` of the session's input audio; None: nobody asked, [] as long as they
    are not known.
    """

    turn_id: str
    session_id: str
    response_id: str = ""
    spoken: bool = False
    outcome: TurnOutcome | Literal[""] = ""
    reason: str = ""
    ended_at_ms: int = 0
    transcript: str = ""
    reply: str = ""
    instants: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    budget_ms: float | None = None
    stage_budgets_ms: dict[str, float] = field(default_factory=dict)
    actions: list[BudgetAction] = field(default_factory=list)
    audio: TurnAudio | None = None
    words: list[dict[str, Any]] | None = None

    def mark(self, instant: str, at_ns: int) -> None:
        """Note an instant; the first time counts."""
        if instant not in INSTANTS:
            raise KeyError(instant)
        self.instants.setdefault(instant, at_ns)

    def begin_typed(self, at_ns: int) -> None:
        """A turn that nobody spoke begins where its answer is asked for."""
        for instant in ("speech_end", "endpoint", "asr_final"):
            self.mark(instant, at_ns)

    def record(self, caller: Samples | None = None, speech_end_sample: int = 0) -> None:
        """Keep the turn's sound. ``caller``: float32 [n] at 16 kHz; none when it was typed."""
        self.audio = TurnAudio(self.instants["speech_end"])
        if caller is not None:
            self.audio.caller, self.audio.speech_end_sample = caller, speech_end_sample

    def note_transcript(self, words: Transcript) -> None:
        """What the recogniser says of its work on the words that are used."""
        self.transcript = words.text
        self.facts |= {
            "asr_ms": words.took_ms,
            "asr_audio_s": words.audio_s,
            "asr_avg_logprob": words.avg_logprob,
            "asr_fallbacks": words.num_fallbacks,
        }

    def note_first_token(
        self,
        *,
        received_ns: int,
        scheduled_ns: int,
        first_token_ns: int,
        prompt_tokens: int,
        cached_tokens: int,
    ) -> None:
        """What the engine says with the first token. Of several requests the first one counts."""
        submitted_ns = self.instants.get("llm_submit", received_ns)
        self.mark("llm_scheduled", scheduled_ns)
        self.mark("llm_first_token", first_token_ns)
        self.facts = {
            "queue_wait_ms": max(0, scheduled_ns - received_ns) / 1e6,
            "prompt_tokens": prompt_tokens,
            "cached_tokens": cached_tokens,
            "computed_tokens": max(0, prompt_tokens - cached_tokens),
            "ttft_ms": max(0, first_token_ns - submitted_ns) / 1e6,
        } | self.facts

    def note_generated(
        self,
        *,
        num_tokens: int,
        num_steps: int,
        finish_reason: str,
        finished_ns: int,
        speculation: Speculation | None = None,
    ) -> None:
        """What the engine says with the last token of a request; ``num_tokens`` of the answer."""
        self.facts["completion_tokens"] = num_tokens
        self.facts["finish_reason"] = finish_reason
        self.facts["llm_steps"] = self.facts.get("llm_steps", 0) + num_steps
        if speculation is not None and speculation.num_drafted:
            self.facts |= {
                "drafted_tokens": speculation.num_drafted,
                "accepted_tokens": speculation.num_accepted,
                "accepted_by_depth": list(speculation.accepted_by_depth),
                "draft_ms": speculation.draft_ns / 1e6,
                "verify_ms": speculation.verify_ns / 1e6,
            }
        first_ns = self.instants.get("llm_first_token")
        if first_ns is not None and num_tokens > 1 and "tpot_ms" not in self.facts:
            self.facts["tpot_ms"] = max(0, finished_ns - first_ns) / 1e6 / (num_tokens - 1)

    def note_clause_spoken(self, took_ns: int) -> None:
        """The voice has made the first piece of a clause."""
        self.facts.setdefault("tts_first_ms", took_ns / 1e6)
        self.facts["tts_clauses"] = self.facts.get("tts_clauses", 0) + 1
        self.note_more_spoken(took_ns)

    def note_more_spoken(self, took_ns: int) -> None:
        """The voice has made a further piece."""
        self.facts["tts_ms"] = self.facts.get("tts_ms", 0.0) + took_ns / 1e6

    def end(self, outcome: TurnOutcome, at_ns: int, reason: str = "") -> None:
        """Close the record.

        Audio is marked with the instant at which it sounds, a little after it is sent. If that is
        still to come, it counts for a turn whose audio plays on, and not for one that was stopped:
        nobody heard it.
        """
        self.outcome, self.reason = outcome, reason
        was_stopped = outcome in ("interrupted", "withdrawn", "cancelled")
        if was_stopped and self.audio is not None:
            self.audio.stopped_ns = at_ns
        if was_stopped and self.instants.get("first_audio_sent", at_ns) > at_ns:
            del self.instants["first_audio_sent"]
        self.mark("ended", max([at_ns, *self.instants.values()]))
        self.ended_at_ms = (time.time_ns() + self.instants["ended"] - at_ns) // 1_000_000

    def end_if_open(self, at_ns: int) -> bool:
        """Close the record of a turn that never ran; False when it is closed already."""
        if self.outcome:
            return False
        self.end("cancelled", at_ns)
        return True

    def join(self, heard: TurnTrace) -> None:
        """Take over what is known of the caller's side of the turn."""
        self.spoken = heard.spoken
        self.transcript = heard.transcript
        self.audio = heard.audio
        self.words = heard.words  # the same list: it is filled when the answer sounds
        for instant, at_ns in heard.instants.items():
            self.mark(instant, at_ns)
        self.facts.update(heard.facts)

    def to_dict(self) -> dict[str, Any]:
        """The turn as the outside sees it. Milliseconds, relative to ``speech_end``.

        A typed turn starts when the response is requested; ``time_to_first_audio_ms`` counts from
        the end of the turn (spoken: the endpoint) and exists for both.
        """
        origin_ns = self.instants.get("speech_end", min(self.instants.values(), default=0))
        # Microseconds first: parts and whole are sums of the same integers. What was done before
        # the turn began (an answer made in advance) has cost it nothing.
        since_us = {name: max(0, at - origin_ns) // 1000 for name, at in self.instants.items()}
        heard = "first_audio_sent" in since_us and "speech_end" in since_us
        parts = attribute_us(since_us) if heard else {}
        whole_us = since_us["first_audio_sent"] if heard else None
        since_end = None
        if whole_us is not None:
            since_end = (whole_us - since_us.get("endpoint", 0)) / 1000
        facts = dict(self.facts)
        if (submitted_ns := self.instants.get("llm_submit", origin_ns)) < origin_ns:
            facts["ahead_ms"] = (origin_ns - submitted_ns) / 1e6
        return {
            "turn_id": self.turn_id,
            "session_id": self.session_id,
            "response_id": self.response_id,
            "spoken": self.spoken,
            "outcome": self.outcome,
            "reason": self.reason,
            "ended_at_ms": self.ended_at_ms,
            "transcript": self.transcript,
            "reply": self.reply,
            "voice_to_voice_ms": whole_us / 1000 if whole_us is not None and self.spoken else None,
            "time_to_first_audio_ms": since_end,
            "stages_ms": {stage: us / 1000 for stage, us in parts.items()},
            "instants_ms": {name: since_us[name] / 1000 for name in INSTANTS if name in since_us},
            "facts": facts,
            "is_recorded": self.audio is not None,
            **({"words": list(self.words)} if self.words else {}),
            "budget": self._budget(whole_us, parts) if self.spoken else None,
        }

    def _budget(self, whole_us: int | None, parts_us: dict[str, int]) -> dict[str, Any] | None:
        """Targets, by how much they were missed, and what was done about it; milliseconds."""
        if self.budget_ms is None:
            return None
        targets = {**self.stage_budgets_ms, "total": self.budget_ms}
        spent = {**parts_us, **({} if whole_us is None else {"total": whole_us})}
        over = {name: spent[name] / 1000 - targets[name] for name in spent if name in targets}
        return {
            "target_ms": self.budget_ms,
            "stages_ms": dict(self.stage_budgets_ms),
            "misses_ms": {name: ms for name, ms in over.items() if ms > 0},
            "actions": [asdict(action) for action in self.actions],
        }
