"""The engine: requests in, steps, events out. ``Engine.step`` is the loop's body.

Single-threaded and without I/O: the worker process feeds it, tests drive it by hand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from llm_core.batch import ForwardResult
from llm_core.chat import ChatTemplate
from llm_core.engine.batch_builder import rows_by_chunk
from llm_core.engine.generation import Generation
from llm_core.engine.pinned_prefixes import PinnedPrefixes
from llm_core.engine.prompt import Prompt
from llm_core.engine.request import NO_OPTIONS, Request, RequestMaker
from llm_core.engine.speculation import Speculator
from llm_core.engine.step_pipeline import InFlightStep, StepPipeline
from llm_core.errors import InvalidRequestError, LlmError, RequestTimeoutError
from llm_core.loading import open_model
from llm_core.messages import (
    ChatMessage,
    EngineConfig,
    EngineStats,
    GenerationDone,
    GenerationEvent,
    ModelInfo,
    PolicyName,
    PrefillResult,
    RequestOptions,
    SamplingParams,
    Speculation,
)
from llm_core.model import ModelRunner
from llm_core.progress import Progress
from llm_core.sampling import ChunkRow
from llm_core.scheduling import (
    LARGEST_CHUNK,
    AttentionWindow,
    BlockTables,
    Chunk,
    Scheduler,
    StepPlan,
    TokenBudget,
    TokenSequence,
    make_policy,
)
from llm_core.speculative import (
    Controller,
    Drafter,
    is_speculation_enabled,
    make_controller,
    make_drafter,
)
from llm_core.structured.constraint import GuideCompiler
from llm_core.tokenizer import Tokenizer

Output = tuple[int, GenerationEvent | PrefillResult | LlmError]


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
        max_step_ms: int | None = None,
        window: AttentionWindow | None = None,
        overlap_steps: bool = False,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """``max_step_ms`` None: the row budgets of the scheduler stay as they are.
        ``overlap_steps`` as in ``EngineConfig``."""
        self.progress = Progress()
        self.info = ModelInfo(**runner.info_fields, tool_format=template.tool_format)
        self.scheduler = Scheduler(
            BlockTables(runner.num_blocks, runner.block_size, window),
            make_policy(policy),
            max_running=max_sequences,
            max_waiting=max_waiting,
        )
        self._runner = runner
        self._vocab_size = tokenizer.vocab_size
        self._make = RequestMaker(tokenizer, template, runner.max_context, clock)
        self._clock = clock
        self._requests: dict[int, Request] = {}
        self._pins = PinnedPrefixes(self.scheduler.tables)
        self._row_budget = TokenBudget(self.scheduler, max_step_ms)
        self._speculator: Speculator | None = None
        self._steps = StepPipeline(
            runner,
            self.scheduler.tables,
            self._vocab_size,
            overlaps=overlap_steps,
            clock=clock,
            progress=self.progress,
        )
        self._num_timeouts = 0
        self._num_downgraded = 0
        self._limit_length()

    def speculate(self, drafter: Drafter | None, controller: Controller) -> None:
        """From now on steps verify what ``drafter`` proposes, and what guides force, where the
        controller finds that worth it. Once, before the first request."""
        assert self._speculator is None and not self._requests, "nothing runs yet"
        assert self.scheduler.tables.window is None, "drafts and a window do not go together"
        self._steps.overlaps = False  # a draft follows a known token
        self._speculator = Speculator(
            drafter,
            controller,
            max_context=self._runner.max_context,
            clock=self._clock,
            progress=self.progress,
        )
        if self._speculator.wants_features and drafter is not None:
            self._runner.set_feature_layers(drafter.feature_layers)

    @classmethod
    def load(cls, config: EngineConfig) -> Engine:
        """Reads the model's files. Raises ModelLoadError."""
        drafter: Drafter | None = None
        with open_model(config.model_path) as opened:
            runner = ModelRunner.of(opened.model, config)
            is_speculating = is_speculation_enabled(config, runner)
            if is_speculating:
                drafter = make_drafter(config, runner, opened)
        engine = cls(
            runner,
            opened.tokenizer,
            opened.template,
            max_sequences=config.max_sequences,
            max_waiting=config.max_waiting,
            policy=config.policy,
            max_step_ms=config.max_step_ms,
            window=runner.attention_window(config),
            overlap_steps=config.overlap_steps,
        )
        if is_speculating:
            engine.speculate(drafter, make_controller(config, runner, drafter))
        return engine

    @property
    def guides(self) -> GuideCompiler:
        """Compiles, and keeps, what replies are guided by."""
        return self._make.guides

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._steps.is_in_flight

    def submit(
        self,
        request_id: int,
        messages: Sequence[ChatMessage],
        params: SamplingParams,
        *,
        received_ns: int,
        options: RequestOptions = NO_OPTIONS,
    ) -> None:
        """Queues a generation. ``max_tokens`` is cut to the context that the prompt leaves.

        Raises InvalidRequestError, PromptTooLongError, EngineBusyError.
        """
        request = self._make.reply(
            request_id,
            messages,
            params,
            options,
            received_ns=received_ns,
            first_token_ns=lambda prompt: self._first_token_ns(prompt, options),
        )
        self._add(request)
        self._num_downgraded += bool(request.sequence.downgrades)

    def submit_prefill(
        self,
        request_id: int,
        messages: Sequence[ChatMessage],
        *,
        received_ns: int,
        options: RequestOptions = NO_OPTIONS,
    ) -> None:
        """Queues the computing of a prompt's KV. Raises as ``submit``."""
        prompt = self._make.prompt(messages, options)
        self._add(self._make.request(request_id, prompt, options, received_ns=received_ns))

    def pin(
        self, request_id: int, messages: Sequence[ChatMessage], *, received_ns: int, salt: str = ""
    ) -> PrefillResult | None:
        """Computes what all conversations that begin with ``messages`` share, and keeps it for as
        long as the engine lives. What is pinned already is returned at once.

        Raises as ``submit``, and InvalidRequestError when pins would fill a quarter of the cache.
        """
        prompt = self._make.shared_prefix(messages)
        prompt_len = len(prompt.token_ids)
        if prompt_len == 0:
            raise InvalidRequestError("messages: the template begins with the user's words")
        if self._pins.holds(prompt.token_ids, salt):
            return PrefillResult(prompt_tokens=prompt_len, cached_tokens=prompt_len)
        self._pins.check_room(prompt_len)
        options = RequestOptions(cache_salt=salt)
        request = self._make.request(
            request_id, prompt, options, received_ns=received_ns, is_open=True
        )
        self._add(request)
        self._pins.add(request.sequence)
        self._limit_length()
        return None

    def open_draft(
        self,
        request_id: int,
        messages: Sequence[ChatMessage],
        *,
        received_ns: int,
        options: RequestOptions = NO_OPTIONS,
    ) -> None:
        """Begins to compute a prompt that may still change. Raises as ``submit``."""
        prompt = self._make.prompt(messages, options)
        self._add(
            self._make.request(request_id, prompt, options, received_ns=received_ns, is_open=True)
        )

    def update_draft(
        self, request_id: int, messages: Sequence[ChatMessage]
    ) -> PrefillResult | None:
        """Replaces a draft's text, keeping all that is computed of the common beginning. Returns
        its result when nothing is left to compute. Raises as ``submit``; the draft is then over."""
        request = self._draft(request_id)
        try:
            prompt = self._make.prompt(messages, request.options)
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
            self._end(request.sequence)
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
        request = source.forked(request_id, received_ns=received_ns)
        self.scheduler.fork(source.sequence, request.sequence)
        self._requests[request_id] = request
        return request.prefilled() if request.sequence.remaining_len == 0 else None

    def commit_draft(
        self,
        request_id: int,
        params: SamplingParams,
        *,
        received_ns: int,
        options: RequestOptions = NO_OPTIONS,
    ) -> None:
        """The draft's text is final: generates the reply to it. Raises as ``submit``; the draft is
        then over."""
        request = self._draft(request_id)
        try:
            if params.continue_last:
                raise InvalidRequestError("continue_last: a draft ends with the reply's header")
            request.generation = self._make.generation(
                request.sequence, params, received_ns=received_ns
            )
        except LlmError:
            self._end(request.sequence)
            raise
        request.commit(options, received_ns=received_ns)
        self.scheduler.changed(request.sequence)

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
            return outputs + self._learn_of(self._steps.take(), is_late=True)
        self._stamp_scheduled(plan)
        generations = self._generations(plan)
        if self._speculator is not None:
            self._speculator.add_drafts(plan, self.scheduler, generations)
        wants_features = self._speculator is not None and self._speculator.wants_features
        before = self._steps.launch(plan, generations, wants_features=wants_features)
        outputs += self._learn_of(before, is_late=True)
        # Rows of replies that have ended by that were computed for nothing.
        kept = StepPlan(chunks=[c for c in plan.chunks if c.sequence.seq_id in self._requests])
        self.scheduler.commit(kept)
        if not self._steps.leave(kept):
            outputs += self._learn_of(self._steps.take(), is_late=False)
        return outputs

    def check(self) -> None:
        """Asserts that requests, places and blocks agree, as they do between any two calls."""
        self.scheduler.check()
        assert self.scheduler.ids == self._requests.keys(), "requests that nobody schedules"

    def stats(self) -> EngineStats:
        tables = self.scheduler.tables
        counts = tables.cache.counts
        return EngineStats(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_drafts=self.scheduler.num_parked - len(self._pins),
            num_blocks=tables.pool.num_blocks,
            num_free_blocks=tables.num_available,
            num_pinned_blocks=self._pins.num_blocks,
            cached_tokens=tables.cache.cached_len,
            total_prompt_tokens=counts.prompt_tokens,
            total_hit_tokens=counts.hit_tokens,
            total_evicted_blocks=counts.evicted_blocks,
            total_preempted=self.scheduler.num_preempted,
            total_timeouts=self._num_timeouts,
            total_downgraded=self._num_downgraded,
            speculation=Speculation() if self._speculator is None else self._speculator.stats(),
        )

    def _first_token_ns(self, prompt: Prompt, options: RequestOptions) -> int | None:
        """When a prompt would have its first token if it were submitted now; None if unknown."""
        now_ns = self._clock()
        sequence = self._make.request(-1, prompt, options, received_ns=now_ns).sequence
        wait_ns = self._row_budget.wait_ns(sequence)
        return None if wait_ns is None else now_ns + wait_ns

    def _limit_length(self) -> None:
        """The longest sequence must fit into the pool beside what is pinned, and with a block to
        spare for a copy; with a window, as much of it as is seen and a chunk."""
        num_blocks = self._pins.num_blocks_left
        longest = num_blocks * self._runner.block_size
        if num_blocks >= self.scheduler.tables.num_needed(LARGEST_CHUNK):
            longest = self._runner.max_context
        self._make.limit(longest)

    def _draft(self, request_id: int) -> Request:
        request = self._requests.get(request_id)
        if request is None or not request.sequence.is_open or request.sequence.is_pinned:
            raise InvalidRequestError(f"there is no open draft {request_id}")
        return request

    def _replace(self, request: Request, token_ids: list[int]) -> PrefillResult | None:
        request.revision += 1
        kept_len = request.sequence.replace(token_ids)
        if self._speculator is not None:
            self._speculator.truncate(request.sequence, kept_len)
        self.scheduler.changed(request.sequence)
        return request.prefilled() if request.sequence.remaining_len == 0 else None

    def _add(self, request: Request) -> None:
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

    def _generations(self, plan: StepPlan) -> dict[int, Generation]:
        """The replies that get logits in this step, by sequence."""
        ids = [chunk.sequence.seq_id for chunk in plan.chunks if chunk.wants_logits]
        replies = ((seq_id, self._requests[seq_id].generation) for seq_id in ids)
        return {seq_id: reply for seq_id, reply in replies if reply is not None}

    def _stamp_scheduled(self, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            generation = self._requests[chunk.sequence.seq_id].generation
            if generation is not None and generation.scheduled_ns == 0:
                generation.scheduled_ns = self._clock()

    def _learn_of(self, flight: InFlightStep | None, *, is_late: bool) -> list[Output]:
        """``is_late``: requests may have ended since, and no prompt was done with the step."""
        if flight is None:
            return []
        plan = flight.plan
        result, duration_ns = self._steps.result(flight)
        self._row_budget.observe(plan.num_rows, duration_ns)
        if self._speculator is not None:
            self._speculator.ran(plan, self._generations(plan), duration_ns)
        return self._postprocess(flight, result, is_late=is_late)

    def _postprocess(
        self, flight: InFlightStep, result: ForwardResult, *, is_late: bool
    ) -> list[Output]:
        """Tokens, events and ends that follow from a step. ``is_late`` as in ``_learn_of``."""
        outputs: list[Output] = []
        ended: list[TokenSequence] = []
        accepted: dict[int, list[int]] = {}
        sampler = self._runner.sampler_backend
        for chunk, rows in rows_by_chunk(
            flight.plan, result, self._vocab_size, flight.keeps, sampler
        ):
            sequence = chunk.sequence
            request = self._requests.get(sequence.seq_id)
            if request is None:
                continue
            if chunk.wants_logits:
                kept, events = self._advance(request, chunk, rows)
                outputs += [(sequence.seq_id, event) for event in events]
                if chunk.tree:
                    accepted[sequence.seq_id] = kept
                if events and isinstance(events[-1], LlmError | GenerationDone):
                    ended.append(sequence)
            elif sequence.remaining_len == 0 and not is_late:
                outputs.append((sequence.seq_id, request.prefilled()))
                if sequence.is_pinned:
                    self.scheduler.tables.publish_tail(sequence)
                elif not sequence.is_open:
                    ended.append(sequence)
        if self._speculator is not None:
            self._speculator.observe(flight.plan, result.features, accepted)
        for sequence in ended:
            self._end(sequence)
        if self._speculator is not None:
            self._speculator.finished()
        return outputs

    def _advance(
        self, request: Request, chunk: Chunk, rows_of_chunk: Sequence[ChunkRow]
    ) -> tuple[list[int], list[GenerationEvent | LlmError]]:
        """Says what follows from the rows of a chunk's last token and of its drafts, as far as
        drafts are right. Returns the rows that are text now, and the events."""
        generation, sequence = request.generation, chunk.sequence
        assert generation is not None, "only generations ask for logits"
        rows, events = generation.advance_along(chunk.tree, rows_of_chunk)
        if chunk.tree:
            if rows[-1] != len(rows) - 1:  # else they follow one another already
                self._runner.move_rows(sequence.block_ids, chunk.start, rows)
            self.scheduler.settle_drafts(sequence)
            if self._speculator is not None:
                self._speculator.verified(chunk.tree, rows)
        return rows, events

    def _end(self, sequence: TokenSequence) -> None:
        del self._requests[sequence.seq_id]
        if sequence.is_pinned:
            self._pins.remove(sequence)
            self._limit_length()
        if self._speculator is not None:
            self._speculator.close(sequence)
        self.scheduler.remove(sequence)
