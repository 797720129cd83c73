"""What one generation makes of its rows of logits: the next token, its text, and the end.

The engine computes rows and hands them in; nothing here knows of batches, KV or other requests.
``advance`` is the usual way; ``choose`` and ``accept`` are its halves, for who wants to look at a
token before it is final.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from llm_core.detokenizer import Detokenizer
from llm_core.messages import (
    FinishReason,
    FirstToken,
    GenerationDone,
    GenerationEvent,
    SamplingParams,
    TextDelta,
    Usage,
)
from llm_core.sampler import FloatRow, SamplerState, sample_row
from llm_core.sequence import TokenSequence
from llm_core.tokenizer import Tokenizer


class Generation:
    """The reply of one request while it grows. Appends to ``sequence``, and ends it.

    ``scheduled_ns`` is set by the engine when the first rows of the request are computed;
    ``is_finished`` is True once ``GenerationDone`` was given out.
    """

    def __init__(
        self,
        sequence: TokenSequence,
        params: SamplingParams,
        tokenizer: Tokenizer,
        *,
        received_ns: int,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """``sequence`` holds the prompt; ``params`` are validated."""
        self.scheduled_ns = 0
        self.is_finished = False
        self._sequence = sequence
        self._params = params
        self._received_ns = received_ns
        self._clock = clock
        self._eos_ids = frozenset[int]() if params.ignore_eos else tokenizer.eos_ids
        self._sampler = SamplerState(params, sequence.token_ids, vocab_size=tokenizer.vocab_size)
        self._detokenizer = Detokenizer(tokenizer.token_bytes, params.stop)

    def advance(self, row: FloatRow) -> list[GenerationEvent]:
        """Chooses the next token from logits float32 [vocab] and says what follows from it.

        Raises LlmError when the model produced no usable logits; the request is then over.
        """
        return self.accept(self.choose(row))

    def choose(self, row: FloatRow) -> int:
        """The next token; changes nothing. Raises LlmError as ``advance``."""
        return sample_row(row, self._sampler, len(self._sequence.token_ids))

    def accept(self, token_id: int) -> list[GenerationEvent]:
        """Appends a chosen token. Returns what is now certain, with GenerationDone at the end."""
        sequence = self._sequence
        sequence.append(token_id)
        self._sampler.observe(token_id)
        events: list[GenerationEvent] = []
        if sequence.num_generated == 1:
            events.append(self._first_token())
        is_eos = token_id in self._eos_ids
        text = "" if is_eos else self._detokenizer.feed(token_id)
        reason = self._finish_reason(is_eos)
        if reason is not None:
            text += self._detokenizer.flush()
        if text:
            events.append(TextDelta(text=text, num_tokens=sequence.num_generated))
        if reason is not None:
            self.is_finished = True
            events.append(self._done(reason))
        return events

    def _finish_reason(self, is_eos: bool) -> FinishReason | None:
        if is_eos or self._detokenizer.stopped:
            return "stop"
        if len(self._sequence.token_ids) == self._sequence.max_len:
            return "length"
        return None

    def _first_token(self) -> FirstToken:
        return FirstToken(
            received_ns=self._received_ns,
            scheduled_ns=self.scheduled_ns,
            first_token_ns=self._clock(),
            prompt_tokens=self._sequence.prompt_len,
            cached_tokens=self._sequence.cached_len,
            dropped_messages=self._sequence.num_dropped,
        )

    def _done(self, reason: FinishReason) -> GenerationDone:
        sequence = self._sequence
        return GenerationDone(
            finish_reason=reason,
            usage=Usage(
                prompt_tokens=sequence.prompt_len,
                cached_tokens=sequence.cached_len,
                completion_tokens=sequence.num_generated,
            ),
            num_steps=sequence.num_steps,
            finished_ns=self._clock(),
        )
