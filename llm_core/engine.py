"""The engine: requests in, steps, events out. ``Engine.step`` is the loop's body.

Single-threaded and without I/O: the worker process feeds it, tests drive it by hand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from llm_core.batch import ForwardBatch, Segment
from llm_core.block_tables import BlockTables
from llm_core.chat_template import ChatTemplate
from llm_core.errors import (
    InvalidRequestError,
    LlmError,
    PromptTooLongError,
    RequestTimeoutError,
)
from llm_core.generation import Generation
from llm_core.messages import (
    ChatMessage,
    EngineConfig,
    EngineStats,
    GenerationEvent,
    ModelInfo,
    Overflow,
    PolicyName,
    PrefillResult,
    RequestOptions,
    SamplingParams,
)
from llm_core.model_files import open_model
from llm_core.policy import make_policy
from llm_core.prompt import Prompt, PromptBuilder
from llm_core.runner import ModelRunner
from llm_core.sampler import FloatRow, validate_params
from llm_core.scheduler import Scheduler, StepPlan
from llm_core.sequence import TokenSequence
from llm_core.tokenizer import Tokenizer

Output = tuple[int, GenerationEvent | PrefillResult | LlmError]

_NO_OPTIONS = RequestOptions()


@dataclass(slots=True)
class _Request:
    """A request while it waits or runs. ``generation`` is None for prefill-only requests and for
    drafts, whose ``revision`` counts how often their text was replaced."""

    sequence: TokenSequence
    generation: Generation | None = None
    expires_ns: int | None = None
    overflow: Overflow = "refuse"
    revision: int = 0


class Engine:
    """Owns the model, its tokenizer and template, and all requests in flight."""

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        max_sequences: int = 8,
        max_waiting: int = 64,
        policy: PolicyName = "deadline",
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.info = ModelInfo(**runner.info_fields)
        self.scheduler = Scheduler(
            BlockTables(runner.num_blocks, runner.block_size),
            make_policy(policy),
            max_running=max_sequences,
            max_waiting=max_waiting,
        )
        self._runner = runner
        self._tokenizer = tokenizer
        self._prompts = PromptBuilder(tokenizer, template, runner.max_context)
        self._clock = clock
        self._requests: dict[int, _Request] = {}
        self._num_timeouts = 0

    @classmethod
    def load(cls, config: EngineConfig) -> Engine:
        """Reads the model's files. Raises ModelLoadError."""
        with open_model(config.model_path) as opened:
            runner = ModelRunner.of(opened.model, config)
        return cls(
            runner,
            opened.tokenizer,
            opened.template,
            max_sequences=config.max_sequences,
            max_waiting=config.max_waiting,
            policy=config.policy,
        )

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def submit(
        self,
        request_id: int,
        messages: Sequence[ChatMessage],
        params: SamplingParams,
        *,
        received_ns: int,
        options: RequestOptions = _NO_OPTIONS,
    ) -> None:
        """Queues a generation. ``max_tokens`` is cut to the context that the prompt leaves.

        Raises InvalidRequestError, PromptTooLongError, EngineBusyError.
        """
        validate_params(params)
        prompt = self._build(messages, self._reply_len(params), options.overflow)
        request = self._request(request_id, prompt, received_ns, options)
        self._will_generate(request, params, received_ns)
        self._add(request)

    def submit_prefill(
        self,
        request_id: int,
        messages: Sequence[ChatMessage],
        *,
        received_ns: int,
        options: RequestOptions = _NO_OPTIONS,
    ) -> None:
        """Queues the computing of a prompt's KV. Raises as ``submit``."""
        prompt = self._build(messages, 1, options.overflow)
        self._add(self._request(request_id, prompt, received_ns, options))

    def pin(
        self, request_id: int, messages: Sequence[ChatMessage], *, received_ns: int, salt: str = ""
    ) -> PrefillResult | None:
        """Computes what all conversations that begin with ``messages`` share, and keeps it for as
        long as the engine lives. What is pinned already is returned at once.

        Raises as ``submit``, and InvalidRequestError when pins would fill a quarter of the cache.
        """
        token_ids = self._prompts.shared_prefix(messages)
        if not token_ids:
            raise InvalidRequestError("messages: the template begins with the user's words")
        for pinned in self._pinned:
            if pinned.token_ids == token_ids and pinned.salt == salt:
                return PrefillResult(prompt_tokens=len(token_ids), cached_tokens=len(token_ids))
        tables = self.scheduler.tables
        num_blocks = self._num_pinned_blocks + tables.num_blocks_of(len(token_ids))
        if 4 * num_blocks > tables.pool.num_blocks:
            raise InvalidRequestError(
                f"pinned prompts would take {num_blocks} of {tables.pool.num_blocks} blocks of the "
                "KV cache; at most a quarter can be pinned"
            )
        options = RequestOptions(cache_salt=salt)
        request = self._request(request_id, Prompt(token_ids), received_ns, options, is_open=True)
        request.sequence.is_pinned = True
        self._add(request)
        return None

    def open_draft(
        self,
        request_id: int,
        messages: Sequence[ChatMessage],
        *,
        received_ns: int,
        options: RequestOptions = _NO_OPTIONS,
    ) -> None:
        """Begins to compute a prompt that may still change. Raises as ``submit``."""
        prompt = self._build(messages, 1, options.overflow)
        self._add(self._request(request_id, prompt, received_ns, options, is_open=True))

    def update_draft(
        self, request_id: int, messages: Sequence[ChatMessage]
    ) -> PrefillResult | None:
        """Replaces a draft's text, keeping all that is computed of the common beginning. Returns
        its result when nothing is left to compute. Raises as ``submit``; the draft is then over."""
        request = self._draft(request_id)
        try:
            prompt = self._build(messages, 1, request.overflow)
        except LlmError:
            self._end(request.sequence)
            raise
        request.sequence.num_dropped = prompt.num_dropped
        return self._replace(request, prompt.token_ids)

    def truncate_draft(self, request_id: int, num_tokens: int) -> PrefillResult | None:
        """Takes all but the first ``num_tokens`` tokens from a draft. Returns as ``update_draft``;
        raises InvalidRequestError."""
        request = self._draft(request_id)
        if not 0 < num_tokens <= request.sequence.prompt_len:
            raise InvalidRequestError(
                f"num_tokens: must be from 1 to the draft's {request.sequence.prompt_len}, "
                f"got {num_tokens}"
            )
        return self._replace(request, request.sequence.token_ids[:num_tokens])

    def fork_draft(
        self, request_id: int, source_id: int, *, received_ns: int
    ) -> PrefillResult | None:
        """A second draft, equal to ``source_id``, that shares all that is computed. Returns as
        ``update_draft``; raises InvalidRequestError, EngineBusyError."""
        source = self._draft(source_id)
        options = RequestOptions(cache_salt=source.sequence.salt, overflow=source.overflow)
        prompt = Prompt(list(source.sequence.token_ids), source.sequence.num_dropped)
        request = self._request(request_id, prompt, received_ns, options, is_open=True)
        self.scheduler.fork(source.sequence, request.sequence)
        self._requests[request_id] = request
        return self._prefilled(request) if request.sequence.remaining_len == 0 else None

    def commit_draft(
        self,
        request_id: int,
        params: SamplingParams,
        *,
        received_ns: int,
        options: RequestOptions = _NO_OPTIONS,
    ) -> None:
        """The draft's text is final: generates the reply to it. Raises as ``submit``; the draft is
        then over."""
        request = self._draft(request_id)
        try:
            validate_params(params)
            self._check_fits(request.sequence.prompt_len, self._reply_len(params))
        except LlmError:
            self._end(request.sequence)
            raise
        sequence = request.sequence
        sequence.is_open = False
        sequence.arrival_ns = received_ns
        sequence.deadline_ns, sequence.priority = options.deadline_ns, options.priority
        sequence.cached_len = sequence.computed_len = min(
            sequence.computed_len, sequence.prompt_len - 1
        )
        sequence.num_steps = 0
        request.expires_ns = _expires_ns(received_ns, options)
        self._will_generate(request, params, received_ns)
        self.scheduler.changed(sequence)

    def set_deadline(self, request_id: int, deadline_ns: int | None) -> None:
        """When the next token of a request is needed; unknown ids are fine, as in ``abort``."""
        request = self._requests.get(request_id)
        if request is not None:
            request.sequence.deadline_ns = deadline_ns

    def abort(self, request_id: int) -> None:
        """Ends a request wherever it is; its blocks are free at once. Unknown ids are fine: the
        request may have ended while the abort was on its way."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request.sequence)

    def step(self) -> list[Output]:
        """Computes one batch. Returns what it brought, [] when there is nothing to do."""
        outputs = self._expire(self._clock())
        plan = self.scheduler.schedule(self._clock())
        if not plan.chunks:
            return outputs
        self._stamp_scheduled(plan)
        logits = self._run(plan)
        self.scheduler.commit(plan)
        return [*outputs, *self._postprocess(plan, logits)]

    def stats(self) -> EngineStats:
        tables = self.scheduler.tables
        counts = tables.cache.counts
        return EngineStats(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_drafts=self.scheduler.num_parked - len(self._pinned),
            num_blocks=tables.pool.num_blocks,
            num_free_blocks=tables.num_available,
            num_pinned_blocks=self._num_pinned_blocks,
            cached_tokens=tables.cache.cached_len,
            total_prompt_tokens=counts.prompt_tokens,
            total_hit_tokens=counts.hit_tokens,
            total_evicted_blocks=counts.evicted_blocks,
            total_preempted=self.scheduler.num_preempted,
            total_timeouts=self._num_timeouts,
        )

    @property
    def _pinned(self) -> list[TokenSequence]:
        sequences = (request.sequence for request in self._requests.values())
        return [sequence for sequence in sequences if sequence.is_pinned]

    @property
    def _num_pinned_blocks(self) -> int:
        return len({block for sequence in self._pinned for block in sequence.block_ids})

    @property
    def _pool_len(self) -> int:
        """The longest sequence that the pool can hold beside what is pinned, with a block to spare
        for a copy."""
        pool = self.scheduler.tables.pool
        return (pool.num_blocks - self._num_pinned_blocks - 1) * pool.block_size

    def _reply_len(self, params: SamplingParams) -> int:
        """Room for the reply, or for as much of it as is fair to ask of a short context."""
        return min(params.max_tokens, self._runner.max_context // 4)

    def _build(self, messages: Sequence[ChatMessage], reply_len: int, overflow: Overflow) -> Prompt:
        prompt = self._prompts.build(messages, reply_len=reply_len, overflow=overflow)
        self._check_fits(len(prompt.token_ids), 1)
        return prompt

    def _check_fits(self, prompt_len: int, reply_len: int) -> None:
        for limit, name in ((self._runner.max_context, "context"), (self._pool_len, "KV cache")):
            if prompt_len + reply_len > limit:
                raise PromptTooLongError(
                    f"the prompt has {prompt_len} tokens; the {name} of {limit} tokens "
                    f"must also hold {reply_len} of the reply"
                )

    def _request(
        self,
        request_id: int,
        prompt: Prompt,
        received_ns: int,
        options: RequestOptions,
        *,
        is_open: bool = False,
    ) -> _Request:
        """One that does not generate (yet)."""
        sequence = TokenSequence(
            request_id,
            prompt.token_ids,
            max_len=min(self._runner.max_context, self._pool_len),
            generates=False,
            is_open=is_open,
            salt=options.cache_salt,
            priority=options.priority,
            arrival_ns=received_ns,
            deadline_ns=options.deadline_ns,
        )
        sequence.num_dropped = prompt.num_dropped
        expires_ns = None if is_open else _expires_ns(received_ns, options)
        return _Request(sequence, expires_ns=expires_ns, overflow=options.overflow)

    def _will_generate(self, request: _Request, params: SamplingParams, received_ns: int) -> None:
        sequence = request.sequence
        sequence.generates = True
        sequence.max_len = min(sequence.prompt_len + params.max_tokens, sequence.max_len)
        request.generation = Generation(
            sequence, params, self._tokenizer, received_ns=received_ns, clock=self._clock
        )

    def _draft(self, request_id: int) -> _Request:
        request = self._requests.get(request_id)
        if request is None or not request.sequence.is_open or request.sequence.is_pinned:
            raise InvalidRequestError(f"there is no open draft {request_id}")
        return request

    def _replace(self, request: _Request, token_ids: list[int]) -> PrefillResult | None:
        request.revision += 1
        request.sequence.replace(token_ids)
        self.scheduler.changed(request.sequence)
        return self._prefilled(request) if request.sequence.remaining_len == 0 else None

    def _add(self, request: _Request) -> None:
        request_id = request.sequence.seq_id
        assert request_id not in self._requests, "a request id is used once"
        self.scheduler.add(request.sequence)
        self._requests[request_id] = request

    def _expire(self, now_ns: int) -> list[Output]:
        """Ends requests that ran out of time, wherever they are; never as if they were done."""
        expired = [
            request.sequence
            for request in self._requests.values()
            if request.expires_ns is not None and request.expires_ns <= now_ns
        ]
        outputs: list[Output] = []
        for sequence in expired:
            place = "running" if sequence.num_steps else "waiting"
            outputs.append(
                (sequence.seq_id, RequestTimeoutError(f"the request timed out while {place}"))
            )
            self._end(sequence)
        self._num_timeouts += len(expired)
        return outputs

    def _stamp_scheduled(self, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            generation = self._requests[chunk.sequence.seq_id].generation
            if generation is not None and generation.scheduled_ns == 0:
                generation.scheduled_ns = self._clock()

    def _run(self, plan: StepPlan) -> torch.Tensor:
        for copy in plan.copies:
            self._runner.copy_block_rows(copy.source, copy.target, copy.num_rows)
        return self._runner.forward(_batch(plan))

    def _postprocess(self, plan: StepPlan, logits: torch.Tensor) -> Iterator[Output]:
        # A model's vocabulary may be padded beyond the tokenizer's; those are no tokens.
        rows = iter(logits.numpy()[:, : self._tokenizer.vocab_size])
        for chunk in plan.chunks:
            sequence = chunk.sequence
            request = self._requests[sequence.seq_id]
            if chunk.wants_logits:
                for event in self._advance(request, next(rows)):
                    yield sequence.seq_id, event
            elif sequence.remaining_len == 0:
                yield sequence.seq_id, self._prefilled(request)
                if sequence.is_pinned:
                    self.scheduler.tables.publish_tail(sequence)
                elif not sequence.is_open:
                    self._end(sequence)

    def _advance(self, request: _Request, row: FloatRow) -> Sequence[GenerationEvent | LlmError]:
        assert request.generation is not None, "only generations ask for logits"
        try:
            events = request.generation.advance(row)
        except LlmError as error:
            self._end(request.sequence)
            return [error]
        if request.generation.is_finished:
            self._end(request.sequence)
        return events

    def _prefilled(self, request: _Request) -> PrefillResult:
        return PrefillResult(
            prompt_tokens=request.sequence.prompt_len,
            cached_tokens=request.sequence.cached_len,
            dropped_messages=request.sequence.num_dropped,
            revision=request.revision,
        )

    def _end(self, sequence: TokenSequence) -> None:
        del self._requests[sequence.seq_id]
        self.scheduler.remove(sequence)


def _expires_ns(received_ns: int, options: RequestOptions) -> int | None:
    return None if options.timeout_ms is None else received_ns + options.timeout_ms * 1_000_000


def _batch(plan: StepPlan) -> ForwardBatch:
    token_ids: list[int] = []
    segments: list[Segment] = []
    logit_rows: list[int] = []
    for chunk in plan.chunks:
        end = chunk.start + chunk.length
        token_ids.extend(chunk.sequence.token_ids[chunk.start : end])
        block_ids = tuple(chunk.sequence.block_ids)
        segments.append(Segment(block_ids, start=chunk.start, length=chunk.length))
        if chunk.wants_logits:
            logit_rows.append(len(token_ids) - 1)
    return ForwardBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        segments=tuple(segments),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
    )
