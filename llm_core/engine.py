"""The engine: requests in, steps, events out. ``Engine.step`` is the loop's body.

Single-threaded and without I/O: the worker process feeds it, tests drive it by hand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from llm_core.batch import ForwardBatch, Segment
from llm_core.chat_template import ChatTemplate
from llm_core.errors import InvalidRequestError, LlmError, ModelLoadError, PromptTooLongError
from llm_core.generation import Generation
from llm_core.guided import GuideCompiler
from llm_core.loading.gguf import read_metadata
from llm_core.messages import (
    ChatMessage,
    EngineConfig,
    EngineStats,
    GenerationEvent,
    ModelInfo,
    PrefillResult,
    SamplingParams,
)
from llm_core.params_check import validate_params
from llm_core.runner import ModelRunner
from llm_core.sampler import FloatRow
from llm_core.scheduler import Scheduler, StepPlan
from llm_core.sequence import TokenSequence
from llm_core.tokenizer import Tokenizer

# A token of a BPE vocabulary is rarely longer; a text above this many bytes a token of context is
# refused before time is spent on encoding it.
_MAX_BYTES_PER_TOKEN = 64

Output = tuple[int, GenerationEvent | PrefillResult | LlmError]


@dataclass(slots=True)
class _Request:
    """A request while it waits or runs. ``generation`` is None for prefill-only requests."""

    sequence: TokenSequence
    generation: Generation | None = None


class Engine:
    """Owns the model, its tokenizer and template, and all requests in flight."""

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        max_waiting: int = 64,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.info = ModelInfo(**runner.info_fields, tool_format=template.tool_format)
        self.scheduler = Scheduler(num_slots=runner.num_slots, max_waiting=max_waiting)
        self._runner = runner
        self._tokenizer = tokenizer
        self._template = template
        self._clock = clock
        self._guides = GuideCompiler(tokenizer, template.tool_format)
        self._requests: dict[int, _Request] = {}

    @classmethod
    def load(cls, config: EngineConfig) -> Engine:
        """Reads the model file. Raises ModelLoadError."""
        metadata = read_metadata(config.model_path)
        tokenizer = Tokenizer.from_gguf(metadata)
        template = load_template(metadata, tokenizer)
        runner = ModelRunner.load(
            config.model_path,
            num_threads=config.num_threads,
            num_slots=config.max_sequences,
            max_context=config.max_context,
        )
        if runner.config.vocab_size < tokenizer.vocab_size:
            raise ModelLoadError(
                f"the tokenizer knows {tokenizer.vocab_size} tokens, "
                f"the model only {runner.config.vocab_size}"
            )
        engine = cls(runner, tokenizer, template, max_waiting=config.max_waiting)
        engine._guides.prepare()
        return engine

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
    ) -> None:
        """Queues a generation. ``max_tokens`` is cut to the context that the prompt leaves.

        Raises InvalidRequestError, PromptTooLongError, EngineBusyError.
        """
        validate_params(params, vocab_size=self._tokenizer.vocab_size)
        # Room for the reply, or for as much of it as is fair to ask of a short context.
        reply_len = min(params.max_tokens, self._runner.max_context // 4)
        prompt_ids = self._encode(messages, reply_len=reply_len)
        max_len = min(len(prompt_ids) + params.max_tokens, self._runner.max_context)
        sequence = TokenSequence(request_id, prompt_ids, max_len=max_len)
        generation = Generation(
            sequence,
            params,
            self._tokenizer,
            received_ns=received_ns,
            guide=None if params.guide is None else self._guides.start(params.guide),
            clock=self._clock,
        )
        self._add(_Request(sequence, generation))

    def submit_prefill(
        self, request_id: int, messages: Sequence[ChatMessage], *, received_ns: int
    ) -> None:
        """Queues the computing of a prompt's KV. Raises as ``submit``."""
        prompt_ids = self._encode(messages, reply_len=1)
        sequence = TokenSequence(request_id, prompt_ids, max_len=len(prompt_ids), generates=False)
        self._add(_Request(sequence))

    def abort(self, request_id: int) -> None:
        """Ends a request wherever it is; its slot is free at once. Unknown ids are fine: the
        request may have ended while the abort was on its way."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.remove(request.sequence)

    def step(self) -> list[Output]:
        """Computes one batch. Returns what it brought, [] when there is nothing to do."""
        plan = self.scheduler.schedule()
        if not plan.chunks:
            return []
        self._stamp_scheduled(plan)
        logits = self._run(plan)
        self.scheduler.commit(plan)
        return list(self._postprocess(plan, logits))

    def stats(self) -> EngineStats:
        slots = self.scheduler.slots
        return EngineStats(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_free_slots=slots.num_free,
            num_slots=slots.num_slots,
            cached_tokens=slots.cached_len,
        )

    def _encode(self, messages: Sequence[ChatMessage], *, reply_len: int) -> list[int]:
        max_context = self._runner.max_context
        num_bytes = sum(len(m.content.encode("utf-8", errors="replace")) for m in messages)
        if num_bytes > max_context * _MAX_BYTES_PER_TOKEN:
            raise PromptTooLongError(
                f"the messages have {num_bytes} bytes; that cannot fit into the context of "
                f"{max_context} tokens"
            )
        prompt_ids = self._tokenizer.encode_pieces(self._template.render(messages))
        if not prompt_ids:
            raise InvalidRequestError("messages: the prompt is empty")
        if len(prompt_ids) + reply_len > max_context:
            raise PromptTooLongError(
                f"the prompt has {len(prompt_ids)} tokens; the context of {max_context} tokens "
                f"must also hold {reply_len} of the reply"
            )
        return prompt_ids

    def _add(self, request: _Request) -> None:
        request_id = request.sequence.seq_id
        assert request_id not in self._requests, "a request id is used once"
        self.scheduler.add(request.sequence)
        self._requests[request_id] = request

    def _stamp_scheduled(self, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            generation = self._requests[chunk.sequence.seq_id].generation
            if chunk.sequence.num_steps == 0 and generation is not None:
                generation.scheduled_ns = self._clock()

    def _run(self, plan: StepPlan) -> torch.Tensor:
        for copy in plan.copies:
            self._runner.copy_prefix(copy.source, copy.target, copy.length)
        return self._runner.forward(_batch(plan))

    def _postprocess(self, plan: StepPlan, logits: torch.Tensor) -> Iterator[Output]:
        # A model's vocabulary may be padded beyond the tokenizer's; those are no tokens.
        rows = iter(logits.numpy()[:, : self._tokenizer.vocab_size])
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if chunk.wants_logits:
                for event in self._advance(self._requests[sequence.seq_id], next(rows)):
                    yield sequence.seq_id, event
            elif sequence.remaining_len == 0:
                self._end(sequence)
                yield (
                    sequence.seq_id,
                    PrefillResult(
                        prompt_tokens=sequence.prompt_len, cached_tokens=sequence.cached_len
                    ),
                )

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

    def _end(self, sequence: TokenSequence) -> None:
        del self._requests[sequence.seq_id]
        self.scheduler.remove(sequence)


def load_template(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate:
    """The chat template of a GGUF file. Raises ModelLoadError, also when there is none."""
    source = metadata.get("tokenizer.chat_template")
    if not isinstance(source, str):
        raise ModelLoadError("the file has no chat template: it is not a chat model")
    return ChatTemplate(
        source,
        control_tokens=tokenizer.control_tokens,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
    )


def _batch(plan: StepPlan) -> ForwardBatch:
    token_ids: list[int] = []
    segments: list[Segment] = []
    logit_rows: list[int] = []
    for chunk in plan.chunks:
        slot = chunk.sequence.slot
        assert slot is not None, "a scheduled sequence has a slot"
        end = chunk.start + chunk.length
        token_ids.extend(chunk.sequence.token_ids[chunk.start : end])
        segments.append(Segment(slot=slot, start=chunk.start, length=chunk.length))
        if chunk.wants_logits:
            logit_rows.append(len(token_ids) - 1)
    return ForwardBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        segments=tuple(segments),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
    )
