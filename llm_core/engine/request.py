"""From what a client asks to a request that the scheduler can run, or a clear error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from llm_core.chat import ChatTemplate
from llm_core.engine.degradation import SHORT_ANSWER_TOKENS, Outlook, choose, last_turn
from llm_core.engine.generation import Generation
from llm_core.engine.prompt import Prompt, PromptBuilder
from llm_core.errors import InvalidRequestError, PromptTooLongError
from llm_core.messages import (
    ChatMessage,
    PrefillResult,
    RequestOptions,
    SamplingParams,
)
from llm_core.sampling import validate_params
from llm_core.scheduling import TokenSequence
from llm_core.structured.constraint import GuideCompiler
from llm_core.tokenizer import Tokenizer

NO_OPTIONS = RequestOptions()


@dataclass(slots=True)
class Request:
    """A request while it waits or runs. ``generation`` is None for prefill-only requests and for
    drafts, whose ``revision`` counts how often their text was replaced."""

    sequence: TokenSequence
    options: RequestOptions
    expires_ns: int | None = None
    generation: Generation | None = None
    revision: int = 0

    def prefilled(self) -> PrefillResult:
        """What to say when all of a prompt is computed."""
        return PrefillResult(
            prompt_tokens=self.sequence.prompt_len,
            cached_tokens=self.sequence.cached_len,
            dropped_messages=self.sequence.num_dropped,
            revision=self.revision,
        )

    def forked(self, request_id: int, *, received_ns: int) -> Request:
        """A second draft that says the same; it has no blocks yet."""
        source = self.sequence
        sequence = TokenSequence(
            request_id,
            source.token_ids,
            max_len=source.max_len,
            generates=False,
            is_open=True,
            salt=source.salt,
            priority=source.priority,
            arrival_ns=received_ns,
            deadline_ns=source.deadline_ns,
        )
        sequence.num_dropped = source.num_dropped
        return Request(sequence, self.options)

    def commit(self, options: RequestOptions, *, received_ns: int) -> None:
        """A draft becomes a generation: from now on it is timed, and counts what it found."""
        sequence = self.sequence
        sequence.arrival_ns = received_ns
        sequence.deadline_ns, sequence.priority = options.deadline_ns, options.priority
        sequence.computed_len = min(sequence.computed_len, sequence.prompt_len - 1)
        sequence.cached_len = sequence.computed_len
        sequence.num_steps = 0
        self.expires_ns = _expires_ns(received_ns, options)


class RequestMaker:
    """Makes requests for one model. Has no requests of its own."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        max_context: int,
        clock: Callable[[], int],
    ) -> None:
        self.guides = GuideCompiler(tokenizer, template.tool_format)
        self._tokenizer = tokenizer
        self._prompts = PromptBuilder(tokenizer, template, max_context)
        self._max_context = max_context
        self._clock = clock
        self._pool_len = max_context

    def limit(self, pool_len: int) -> None:
        """The KV pool holds no sequence longer than ``pool_len``."""
        self._pool_len = pool_len

    def prompt(
        self,
        messages: Sequence[ChatMessage],
        options: RequestOptions,
        reply_len: int = 1,
        *,
        continues_last: bool = False,
    ) -> Prompt:
        """A prompt that leaves room for a reply. Raises InvalidRequestError, PromptTooLongError."""
        if not 0 < options.retention_ratio <= 1:
            raise InvalidRequestError(
                f"retention_ratio: must be above 0 and at most 1, got {options.retention_ratio}"
            )
        if options.spare_tokens < 0:
            raise InvalidRequestError(
                f"spare_tokens: must be at least 0, got {options.spare_tokens}"
            )
        reply_len += min(options.spare_tokens, self._max_context // 4)
        prompt = self._prompts.build(
            messages,
            reply_len=reply_len,
            overflow=options.overflow,
            retention_ratio=options.retention_ratio,
            continues_last=continues_last,
        )
        self.check_fits(len(prompt.token_ids), 1)
        return prompt

    def last_turn(
        self, messages: Sequence[ChatMessage], reply_len: int, *, continues_last: bool
    ) -> Prompt:
        """A prompt of the system prompt and the last turn alone. Raises as ``prompt``."""
        kept, num_dropped = last_turn(messages)
        prompt = self._prompts.build(kept, reply_len=reply_len, continues_last=continues_last)
        return Prompt(prompt.token_ids, num_dropped)

    def shared_prefix(self, messages: Sequence[ChatMessage]) -> Prompt:
        """What conversations that begin with ``messages`` share. Raises InvalidRequestError."""
        return Prompt(self._prompts.shared_prefix(messages))

    def request(
        self,
        request_id: int,
        prompt: Prompt,
        options: RequestOptions,
        *,
        received_ns: int,
        is_open: bool = False,
    ) -> Request:
        """One that does not generate (yet)."""
        longest = min(self._max_context, self._pool_len)
        sequence = TokenSequence(
            request_id,
            prompt.token_ids,
            max_len=longest if is_open else len(prompt.token_ids),
            generates=False,
            is_open=is_open,
            salt=options.cache_salt,
            priority=options.priority,
            arrival_ns=received_ns,
            deadline_ns=options.deadline_ns,
        )
        sequence.num_dropped = prompt.num_dropped
        expires_ns = None if is_open else _expires_ns(received_ns, options)
        return Request(sequence, options, expires_ns)

    def reply(
        self,
        request_id: int,
        messages: Sequence[ChatMessage],
        params: SamplingParams,
        options: RequestOptions,
        *,
        received_ns: int,
        first_token_ns: Callable[[Prompt], int | None],
    ) -> Request:
        """One that generates. ``first_token_ns``: when a prompt would have its first token, were it
        submitted now; if that is too late, what ``options`` allow is given up. Raises as
        ``generation``."""
        self.check(params)
        reply_len, continues_last = self.reply_len(params), params.continue_last
        prompt, downgrades = choose(
            options.downgrades,
            Outlook(first_token_ns, self._clock(), options.deadline_ns),
            self.prompt(messages, options, reply_len, continues_last=continues_last),
            lambda: self.last_turn(messages, reply_len, continues_last=continues_last),
        )
        if "shorter_answer" in downgrades:
            max_tokens = min(params.max_tokens, SHORT_ANSWER_TOKENS)
            params = msgspec.structs.replace(params, max_tokens=max_tokens)
        request = self.request(request_id, prompt, options, received_ns=received_ns)
        request.sequence.downgrades = downgrades
        request.generation = self.generation(request.sequence, params, received_ns=received_ns)
        return request

    def generation(
        self, sequence: TokenSequence, params: SamplingParams, *, received_ns: int
    ) -> Generation:
        """The reply to the sequence's prompt, which is final. ``max_tokens`` is cut to what the
        prompt leaves. Raises InvalidRequestError, PromptTooLongError."""
        self.check(params)
        self.check_fits(sequence.prompt_len, self.reply_len(params))
        guide = None if params.guide is None else self.guides.start(params.guide)
        longest = min(self._max_context, self._pool_len)
        sequence.max_len = min(sequence.prompt_len + params.max_tokens, longest)
        sequence.generates = True
        sequence.is_open = False
        return Generation(
            sequence,
            params,
            self._tokenizer,
            received_ns=received_ns,
            guide=guide,
            clock=self._clock,
        )

    def check(self, params: SamplingParams) -> None:
        """Raises InvalidRequestError, naming the parameter."""
        validate_params(params, vocab_size=self._tokenizer.vocab_size)

    def reply_len(self, params: SamplingParams) -> int:
        """Room for the reply, or for as much of it as is fair to ask of a short context."""
        return min(params.max_tokens, self._max_context // 4)

    def check_fits(self, prompt_len: int, reply_len: int) -> None:
        """Raises PromptTooLongError, at once: what can never run must not wait."""
        for limit, name, least in (
            (self._max_context, "context", reply_len),
            (self._pool_len, "KV cache", 1),
        ):
            if prompt_len + least > limit:
                raise PromptTooLongError(
                    f"the prompt has {prompt_len} tokens; the {name} of {limit} tokens "
                    f"must also hold {least} of the reply"
                )


def _expires_ns(received_ns: int, options: RequestOptions) -> int | None:
    return None if options.timeout_ms is None else received_ns + options.timeout_ms * 1_000_000
