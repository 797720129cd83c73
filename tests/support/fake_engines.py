"""Scripted engines of special kinds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from llm_core import (
    ChatMessage,
    FirstToken,
    GenerationEvent,
    PrefillResult,
    PromptTooLongError,
    SamplingParams,
)
from tests.support.fakes import ScriptedEngine


class ShortContextEngine(ScriptedEngine):
    """Has room for ``max_chars`` characters; whoever allows it loses the oldest beyond that.

    ``prefill_gate`` holds what is read in advance.
    """

    def __init__(self, max_chars: int, *replies: str) -> None:
        super().__init__(*replies)
        self.max_chars = max_chars
        self.dropped: list[int] = []
        self.dropped_by_prefill: list[int] = []
        self.prefill_gate = asyncio.Event()
        self.prefill_gate.set()

    async def prefill(self, messages: Sequence[ChatMessage], **options: Any) -> PrefillResult:
        self.prefills.append(list(messages))
        await self.prefill_gate.wait()
        spare = min(options.get("spare_tokens", 0), self.max_chars // 4)
        num_dropped = len(messages) - len(self._fitting(messages, self.max_chars - spare, options))
        self.dropped_by_prefill.append(num_dropped)
        return PrefillResult(prompt_tokens=10, cached_tokens=0, dropped_messages=num_dropped)

    async def generate(
        self, messages: Sequence[ChatMessage], params: SamplingParams, **options: Any
    ) -> AsyncGenerator[GenerationEvent, None]:
        if params.continue_last:
            async for event in super().generate(messages, params, **options):
                yield event
            return
        fitting = self._fitting(messages, self.max_chars, options)
        num_dropped = len(messages) - len(fitting)
        self.dropped.append(num_dropped)
        async with aclosing(super().generate(fitting, params, **options)) as events:
            async for event in events:
                if isinstance(event, FirstToken):
                    event = msgspec.structs.replace(event, dropped_messages=num_dropped)
                yield event

    @staticmethod
    def _fitting(
        messages: Sequence[ChatMessage], room: int, options: dict[str, Any]
    ) -> list[ChatMessage]:
        first = next((i for i, m in enumerate(messages) if m.role != "system"), len(messages))
        kept = list(messages[first:])
        excess = sum(len(m.content) for m in messages) - room
        if excess > 0:
            if options.get("overflow") != "drop_oldest":
                raise PromptTooLongError("the prompt has 5000 tokens, the context holds 4096")
            excess += int(room * (1 - options.get("retention_ratio", 0.75)))
        while excess > 0 and len(kept) > 1:
            excess -= len(kept.pop(0).content)
        return [*messages[:first], *kept]
