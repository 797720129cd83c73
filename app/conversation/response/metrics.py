"""What an answer's response and trace say of it: tokens, calls, the first sound, how it ended."""

from __future__ import annotations

import numpy as np

from app.clock import Clock
from app.conversation.events import Response, ResponseUsage
from app.conversation.response.output import Output
from app.conversation.response.tool_executor import ToolExecutor
from app.errors import TurnTimeoutError
from app.observe import LoopLag, TurnOutcome, TurnTrace
from audio.frame import Samples
from llm_core import FirstToken, GenerationDone

# Audible: above -50 dB of full scale. The first such sample ends the caller's wait.
_AUDIBLE = 0.003


class TurnRecord:
    """Kept while the answer is made; ``complete`` closes it."""

    def __init__(self, response: Response, trace: TurnTrace, clock: Clock) -> None:
        self._response = response
        self._trace = trace
        self._clock = clock
        self._past_usage = ResponseUsage()  # of the model's earlier replies in this answer

    # --- what the model says ---

    def tokens_left(self, max_tokens: int) -> int:
        """How long the next reply may be, at least 1; ``max_tokens``: the answer, where the
        response says nothing of it."""
        max_tokens = self._response.max_output_tokens or max_tokens
        return max(1, max_tokens - self._response.usage.output_tokens)

    def note_first_token(self, event: FirstToken) -> None:
        """The model begins a reply; an answer may take several."""
        self._trace.note_first_token(
            received_ns=event.received_ns,
            scheduled_ns=event.scheduled_ns,
            first_token_ns=event.first_token_ns,
            prompt_tokens=event.prompt_tokens,
            cached_tokens=event.cached_tokens,
        )
        past = self._past_usage = self._response.usage
        self._response.usage = ResponseUsage(
            past.input_tokens + event.prompt_tokens,
            past.cached_tokens + event.cached_tokens,
            past.output_tokens,
        )

    def note_tokens(self, num_tokens: int) -> None:
        """The reply is ``num_tokens`` long by now."""
        num_tokens += self._past_usage.output_tokens
        usage = self._response.usage
        self._response.usage = ResponseUsage(usage.input_tokens, usage.cached_tokens, num_tokens)
        self._trace.facts["completion_tokens"] = num_tokens

    def note_done(self, event: GenerationDone) -> None:
        """The reply is whole, or as long as it may be."""
        self.note_tokens(event.usage.completion_tokens)
        self._trace.note_generated(
            num_tokens=self._response.usage.output_tokens,
            num_steps=event.num_steps,
            finish_reason=event.finish_reason,
            finished_ns=event.finished_ns,
            speculation=event.speculation,
        )
        if event.finish_reason == "length":
            self._response.reason = "max_output_tokens"

    def note_calls(self, calling: ToolExecutor) -> None:
        """The calls in a reply have been answered, or are the client's."""
        facts = self._trace.facts
        facts["tool_calls"] = facts.get("tool_calls", 0) + len(calling.calls)
        facts["tool_ms"] = facts.get("tool_ms", 0.0) + calling.waited_ns / 1e6

    def note_filler(self, text: str) -> None:
        """``text`` bridges the wait for a tool."""
        self._trace.facts["filler"] = text

    # --- what the caller hears ---

    def note_clause(self) -> None:
        """A piece of text is on its way to the voice."""
        self._trace.mark("first_clause", self._clock.now_ns())

    def note_speech(self) -> None:
        """The voice has made some sound."""
        self._trace.mark("tts_first_audio", self._clock.now_ns())

    def note_sent(self, samples: Samples, rate: int, sounds_ns: int) -> bool:
        """Audio float32 [n] was sent that sounds at ``sounds_ns``. Whether it is the first of the
        answer in which there is something to hear."""
        if self._trace.audio is not None:
            self._trace.audio.add_reply(samples, rate, sounds_ns)
        if "first_audio_sent" in self._trace.instants:
            return False
        audible = np.flatnonzero(np.abs(samples) >= _AUDIBLE)
        if not len(audible):
            return False
        offset_ns = int(audible[0]) * 1_000_000_000 // rate
        self._trace.mark("first_audio_sent", sounds_ns + offset_ns)
        return True

    def note_hold(self) -> None:
        """The answer is silent, and may go on."""
        self._trace.facts["holds"] = self._trace.facts.get("holds", 0) + 1

    # --- the end ---

    def complete(self, output: Output, loop_lag: LoopLag) -> None:
        """The response has ended, or the call has ended in the middle of it."""
        trace = self._trace
        trace.reply = output.text
        start_ns = min(trace.instants.values(), default=0)
        trace.facts["loop_lag_p99_ms"] = loop_lag.percentile_ms(99, start_ns)
        trace.facts["loop_lag_max_ms"] = loop_lag.percentile_ms(100, start_ns)
        trace.facts["playout_gap_ms"] = output.playout.gap_ns / 1e6
        trace.facts["reply_audio_s"] = output.audio_s
        outcome = _outcome_of(self._response, trace.reply)
        trace.end(outcome, self._clock.now_ns(), self._response.reason or "")


def _outcome_of(response: Response, reply: str) -> TurnOutcome:
    """``response`` has ended, or is in progress although the call is over; ``reply`` was said."""
    match response.status:
        case "completed":
            return "answered" if reply.strip() else "silent"
        case "incomplete":
            return "incomplete"
        case "failed":
            return "timed_out" if response.reason == TurnTimeoutError.code else "failed"
        case _ if response.is_withdrawn:
            return "withdrawn"
        case _:  # cancelled, or in progress when the call ended
            return "interrupted" if response.reason == "turn_detected" else "cancelled"
