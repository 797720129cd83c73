"""What a conversation asks of the language model, whoever serves it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Protocol, Self, Unpack

from llm_core import (
    ChatMessage,
    EngineStats,
    GenerationEvent,
    Guide,
    ModelInfo,
    OptionFields,
    PrefillResult,
    SamplingParams,
)


class LlmReply(Protocol):
    """A running reply: ``llm_core.Reply``, or one that may change its engine."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> GenerationEvent: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...

    def set_deadline(self, deadline_ns: int | None) -> None:
        """See ``llm_core.Reply``."""
        ...


class LlmEngine(Protocol):
    """See ``llm_core.EngineClient``, which is one."""

    @property
    def info(self) -> ModelInfo:
        """What is loaded."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether it would answer now."""
        ...

    @property
    def problem(self) -> str:
        """Why it would not; "" when it would."""
        ...

    async def prepare_guide(self, guide: Guide) -> None:
        """Makes replies with ``guide`` begin without a delay."""
        ...

    async def stats(self) -> EngineStats:
        """A snapshot."""
        ...

    def generate(
        self,
        messages: Sequence[ChatMessage],
        params: SamplingParams,
        **options: Unpack[OptionFields],
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Streams a reply."""
        ...

    async def open_reply(
        self,
        messages: Sequence[ChatMessage],
        params: SamplingParams,
        **options: Unpack[OptionFields],
    ) -> LlmReply:
        """A reply with a handle. Must be closed."""
        ...

    async def prefill(
        self, messages: Sequence[ChatMessage], **options: Unpack[OptionFields]
    ) -> PrefillResult:
        """Reads a prompt in advance."""
        ...
