"""The interface of an engine that is measured, and our engine with that interface."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from app.errors import ParleyError
from llm_core import (
    ChatMessage,
    EngineClient,
    EngineConfig,
    GenerationDone,
    SamplingParams,
    TextDelta,
)


@dataclass(frozen=True, slots=True)
class Generated:
    """One generation as its client saw it: ``ttft_ms`` from the request to the first text,
    ``gaps_ms`` between texts."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_ms: float
    gaps_ms: tuple[float, ...]

    @property
    def decode_tok_s(self) -> float:
        """Tokens a second after the first one."""
        return (self.completion_tokens - 1) / (sum(self.gaps_ms) / 1e3)


class MeasuredEngine(Protocol):
    """A running engine with a model loaded."""

    name: str

    async def generate(self, messages: Sequence[ChatMessage], num_tokens: int) -> Generated:
        """Generate exactly ``num_tokens`` tokens greedily, past end-of-sequence tokens."""
        ...

    async def close(self) -> None:
        """Stop the engine."""
        ...


class Stopwatch:
    """Times of the texts of one generation; starts when it is constructed."""

    def __init__(self) -> None:
        self._start = time.monotonic_ns()
        self._texts: list[int] = []

    def text(self) -> None:
        """Note that a text has arrived."""
        self._texts.append(time.monotonic_ns())

    def generated(self, prompt_tokens: int, cached_tokens: int, num_tokens: int) -> Generated:
        """The generation at its end. Raises ParleyError when no text came."""
        if not self._texts:
            raise ParleyError("the engine generated no text at all: nothing to measure")
        gaps = zip(self._texts, self._texts[1:], strict=False)
        return Generated(
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            completion_tokens=num_tokens,
            ttft_ms=(self._texts[0] - self._start) / 1e6,
            gaps_ms=tuple((after - before) / 1e6 for before, after in gaps),
        )


class ParleyEngine:
    """Our engine, in its own process."""

    def __init__(self, client: EngineClient, name: str = "parley") -> None:
        self.client = client
        self.name = name

    @classmethod
    async def start(cls, config: EngineConfig, name: str = "parley") -> ParleyEngine:
        """Raises ModelLoadError."""
        return cls(await EngineClient.start(config), name)

    async def generate(self, messages: Sequence[ChatMessage], num_tokens: int) -> Generated:
        """See ``MeasuredEngine``."""
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        watch = Stopwatch()
        async with aclosing(self.client.generate(messages, params)) as events:
            async for event in events:
                if isinstance(event, TextDelta):
                    watch.text()
                elif isinstance(event, GenerationDone):
                    usage = event.usage
        return watch.generated(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)

    async def close(self) -> None:
        """See ``MeasuredEngine``."""
        await self.client.close()
