"""What one generation makes of its rows of logits: the next token, its text, and the end.

The engine computes rows and hands them in; nothing here knows of batches, KV or other requests.
``advance`` is the usual way, and ``advance_along`` that of a step with drafts; ``choose`` and
``accept`` are its halves, for who wants to look at a token before it is final.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from llm_core.errors import LlmError
from llm_core.faults import failure_of
from llm_core.messages import (
    FinishReason,
    FirstToken,
    GenerationDone,
    GenerationEvent,
    SamplingParams,
    TextDelta,
    Usage,
)
from llm_core.sampling import (
    ChunkRow,
    FloatRow,
    LogprobTrack,
    SamplerBackend,
    SamplerState,
    sample_row,
    uniform,
)
from llm_core.scheduling import EMPTY, DraftTree, TokenSequence
from llm_core.speculative import DraftRequest, DraftShape, SpeculationCounts, accepted_path
from llm_core.structured.constraint import GuideState
from llm_core.tokenizer import Detokenizer, Tokenizer


class Generation:
    """The reply of one request while it grows. Appends to ``sequence``, and ends it.

    ``scheduled_ns`` is set by the engine when the first rows of the request are computed, and
    ``speculation`` counts what drafts did for it;
    ``is_finished`` is True once ``GenerationDone`` was given out.
    """

    def __init__(
        self,
        sequence: TokenSequence,
        params: SamplingParams,
        tokenizer: Tokenizer,
        *,
        received_ns: int,
        guide: GuideState | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """``sequence`` holds the prompt; ``params`` are validated, and ``guide`` is theirs."""
        self.scheduled_ns = 0
        self.is_finished = False
        self.speculation = SpeculationCounts()
        self._sequence = sequence
        self._params = params
        self._received_ns = received_ns
        self._clock = clock
        self._eos_ids = frozenset[int]() if params.ignore_eos else tokenizer.eos_ids
        self._sampler = SamplerState(params, sequence.token_ids, vocab_size=tokenizer.vocab_size)
        self._detokenizer = Detokenizer(tokenizer.token_bytes, params.stop)
        self._guide = guide
        self._failure: LlmError | None = None  # found while drafts were proposed
        self._logprobs: LogprobTrack | None = None
        if params.logprobs is not None:
            self._logprobs = LogprobTrack(tokenizer.token_bytes, params.logprobs)

    def advance(self, row: ChunkRow) -> list[GenerationEvent]:
        """Chooses the next token, unless it was chosen already as ``chosen_elsewhere`` says, and
        says what follows from it.

        Raises LlmError when the model produced no usable logits, or the guide has outgrown its
        limits; the request is then over.
        """
        if self._failure is not None:
            raise self._failure
        token_id = row.token_id
        if token_id is None:
            assert row.logits is not None, "a token is chosen from logits"
            token_id = self.choose(row.logits, row.block_maxima, row.sampler)
        elif token_id < 0:
            raise LlmError("the model produced unusable logits")
        return self.accept(token_id, row.logits)

    def advance_along(
        self, tree: DraftTree, rows: Sequence[ChunkRow]
    ) -> tuple[list[int], list[GenerationEvent | LlmError]]:
        """Goes on from the sequence's last token and then from the drafts of ``tree``, as far as
        they are right: ``rows`` are theirs. Returns which rows are text now, and what follows. An
        error, also an unforeseen one, comes last; the request is then over."""
        sequence = self._sequence
        events: list[GenerationEvent | LlmError] = []
        if sequence.is_expecting:
            sequence.take_back()
        computed_len = sequence.computed_len
        self.speculation.add_drafts(tree)

        def sample(row: int) -> int | None:
            if row > 0:  # the draft is text: its row counts as computed
                sequence.computed_len += 1
                self.speculation.add_accepted(sequence.computed_len - computed_len)
            try:
                events.extend(self.advance(rows[row]))
            except BaseException as error:
                events.append(failure_of(error, f"request {sequence.seq_id}"))
                return None
            return None if self.is_finished else sequence.token_ids[-1]

        return accepted_path(tree, sample), events

    @property
    def chosen_elsewhere(self) -> tuple[SamplingParams, int] | None:
        """The parameters and the seed, where these and a row of logits are all that it takes to
        choose the next token, so that it can be done where the logits are; None where it takes
        what only this reply knows: penalties, biases, bans, a guide; or where logits are told."""
        is_plain = self._guide is None and self._logprobs is None and self._sampler.is_plain
        if not is_plain or not (self._may_end or not self._eos_ids):
            return None
        return self._params, self._sampler.seed

    def choose(
        self,
        row: FloatRow,
        block_maxima: FloatRow | None = None,
        sampler: SamplerBackend | None = None,
    ) -> int:
        """The next token; changes nothing. Raises LlmError as ``advance``."""
        return sample_row(
            row,
            self._sampler,
            len(self._sequence.token_ids),
            banned=() if self._may_end else self._eos_ids,
            allowed=None if self._guide is None else self._guide.allowed(),
            block_maxima=block_maxima,
            backend=sampler,
        )

    def accept(self, token_id: int, row: FloatRow | None) -> list[GenerationEvent]:
        """Appends the token that was chosen for ``row`` (None: no logprobs are told). Returns what
        is now certain, with GenerationDone at the end. Raises LlmError as ``advance``."""
        sequence = self._sequence
        is_eos = token_id in self._eos_ids
        text = "" if is_eos else self._take(token_id, row)
        sequence.append(token_id)
        self._sampler.observe(token_id)
        events: list[GenerationEvent] = []
        if sequence.num_generated == 1:
            events.append(self._first_token())
        reason = self._finish_reason(is_eos)
        if reason is not None:
            text += self._detokenizer.flush()
        if text:
            events.append(self._delta(text))
        if reason is not None:
            self.is_finished = True
            events.append(self._done(reason))
        return events

    def draft_request(self, shape: DraftShape) -> DraftRequest:
        """What a drafter is told of this reply. Nothing is drafted beyond its longest end."""
        sequence = self._sequence
        if self.draft_room < shape.max_depth:
            shape = replace(shape, max_depth=self.draft_room)
        uniforms: tuple[float, ...] = ()
        if not self._sampler.is_greedy:
            first, seed = len(sequence.token_ids), self._sampler.seed
            uniforms = tuple(uniform(seed, first + k) for k in range(shape.max_depth))
        return DraftRequest(sequence, shape, self._params, uniforms)

    @property
    def draft_room(self) -> int:
        """Drafts one after another that can be right: the reply's last token is the target's."""
        return max(0, self._sequence.max_len - len(self._sequence.token_ids) - 1)

    @property
    def is_guided(self) -> bool:
        """A guide restricts what may be said."""
        return self._guide is not None

    def forced_tokens(self) -> list[int]:
        """What the guide leaves no choice about; [] without a guide, or when it fails: then
        ``advance`` does."""
        try:
            return [] if self._guide is None else self._guide.forced()
        except BaseException as error:
            self._failure = failure_of(error, f"request {self._sequence.seq_id}")
            return []

    def allowed_drafts(self, tree: DraftTree) -> DraftTree:
        """Those that the guide lets pass; none when it fails: then ``advance`` does."""
        if self._guide is None or not tree:
            return tree
        kept: set[int] = set()
        try:
            for draft in set(range(len(tree))) - set(tree.parents):
                path = tree.path(draft)
                kept.update(path[: self._guide.num_allowed([tree.token_ids[i] for i in path])])
        except BaseException as error:
            self._failure = failure_of(error, f"request {self._sequence.seq_id}")
            return EMPTY
        return tree.subtree(sorted(kept))

    @property
    def _may_end(self) -> bool:
        """Whether the next token may end the reply. A guide that allows nothing else decides."""
        is_long_enough = self._sequence.num_generated >= self._params.min_tokens
        return is_long_enough or self._guide is not None

    def _take(self, token_id: int, row: FloatRow | None) -> str:
        if self._guide is not None:
            self._guide.accept(token_id)
        if self._logprobs is not None:
            assert row is not None, "logprobs are told of logits"
            self._logprobs.add(row, token_id, self._detokenizer.decoded_len)
        may_stop = self._sequence.num_generated >= self._params.min_tokens
        return self._detokenizer.feed(token_id, may_stop=may_stop)

    def _finish_reason(self, is_eos: bool) -> FinishReason | None:
        if is_eos or self._detokenizer.stopped:
            return "stop"
        if self._guide is not None and self._guide.is_complete:
            return "stop"
        if len(self._sequence.token_ids) == self._sequence.max_len:
            return "length"
        return None

    def _delta(self, text: str) -> TextDelta:
        track = self._logprobs
        return TextDelta(
            text=text,
            num_tokens=self._sequence.num_generated,
            logprobs=() if track is None else track.take(self._detokenizer.given_len),
        )

    def _first_token(self) -> FirstToken:
        return FirstToken(
            received_ns=self._received_ns,
            scheduled_ns=self.scheduled_ns,
            first_token_ns=self._clock(),
            prompt_tokens=self._sequence.prompt_len,
            cached_tokens=self._sequence.cached_len,
            dropped_messages=self._sequence.num_dropped,
            downgrades=self._sequence.downgrades,
            unseen_tokens=self._sequence.num_unseen,
        )

    def _done(self, reason: FinishReason) -> GenerationDone:
        sequence = self._sequence
        return GenerationDone(
            finish_reason=reason,
            usage=Usage(
                prompt_tokens=sequence.prompt_len,
                cached_tokens=sequence.cached_len,
                completion_tokens=sequence.num_generated,
                unseen_tokens=sequence.num_unseen,
            ),
            num_steps=sequence.num_steps,
            finished_ns=self._clock(),
            speculation=self.speculation.snapshot(),
        )
