"""How an answer asks the model: by when its words are needed, and what may be given up for it.

The deadline moves while the answer is spoken: first the caller waits, later there is speech to hear
until the next words are needed, and the engine can serve somebody else first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Self

from app.clock import Clock
from app.conversation.response.budget import TurnBudget
from app.conversation.response.hedged_reply import HedgedReply
from app.conversation.services import Services
from app.conversation.session_config import SessionConfig
from app.errors import GenerationError
from app.observe import TurnTrace
from app.routing import LlmReply, asked_facts, served_facts
from llm_core import (
    ChatMessage,
    FirstToken,
    GenerationDone,
    GenerationEvent,
    Guide,
    LlmError,
    OptionFields,
    SamplingParams,
)

# For so long others may wait for the model to have read a turn's words.
_READING_S = 0.06


def length_options(config: SessionConfig) -> OptionFields:
    """What becomes of a conversation that is longer than the model's context."""
    if config.retention_ratio == 0:
        return {"overflow": "refuse"}
    if config.retention_ratio is None:
        return {"overflow": "drop_oldest"}
    return {"overflow": "drop_oldest", "retention_ratio": config.retention_ratio}


def oldest_of(messages: list[ChatMessage], count: int) -> list[ChatMessage]:
    """The first ``count`` messages behind those of the system: what a prompt leaves out."""
    first = next((i for i, m in enumerate(messages) if m.role != "system"), len(messages))
    return messages[first : first + count]


class LlmStream:
    """The model's replies of one answer, one after another."""

    def __init__(
        self,
        services: Services,
        config: SessionConfig,
        clock: Clock,
        trace: TurnTrace,
        budget: TurnBudget,
        prefilled: asyncio.Task[None] | None,
    ) -> None:
        """``prefilled``: reads the prompt already; asking beside it would read it twice."""
        self.dropped: Sequence[ChatMessage] = ()
        """Messages that the conversation has become too long for."""
        self._services = services
        self._config = config
        self._clock = clock
        self._trace = trace
        self._budget = budget
        self._prefilled = prefilled
        self._deadline_ns: int | None = None
        self._is_awaited = False
        self._reply: LlmReply | None = None
        self._hurried: HedgedReply | None = None
        self._has_read = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *reason: object) -> None:
        """The answer is over: nothing is asked any more."""
        if self._hurried is not None:
            await self._hurried.close()

    async def until_read(self) -> None:
        """Wait until the model has read the messages, but not for long: it may be busy."""
        late = asyncio.create_task(self._clock.sleep(_READING_S))
        read = asyncio.create_task(self._has_read.wait())
        try:
            await asyncio.wait({late, read}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            late.cancel()
            read.cancel()

    def needed_by(self, deadline_ns: int | None) -> None:
        """When the model's next token is needed. None: not known; the engine then sees to it that
        it comes neither first nor last."""
        self._deadline_ns, self._is_awaited = deadline_ns, True
        if self._reply is not None:
            self._reply.set_deadline(deadline_ns)

    async def events(
        self, messages: list[ChatMessage], *, max_tokens: int, guide: Guide | None
    ) -> AsyncGenerator[GenerationEvent, None]:
        """One reply to ``messages``. Raises GenerationError."""
        settings = self._services.settings
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            repetition_penalty=settings.repetition_penalty,
            guide=guide,
        )
        self._trace.mark("llm_submit", self._clock.now_ns())
        await self._wait_for_prefill()
        options = length_options(self._config)
        options["deadline_ns"] = self._deadline_ns
        options["downgrades"] = self._budget.downgrades
        self._trace.facts.update(asked_facts(self._services.engine))
        try:
            async with await self._open(messages, params, options) as reply:
                self._reply = reply
                if self._is_awaited and self._deadline_ns is None:
                    reply.set_deadline(None)  # a typed turn: no instant, but somebody waits
                with self._services.load.generating():
                    async for event in reply:
                        if isinstance(event, FirstToken):
                            self._has_read.set()
                            self._note_given_up(event, messages)
                            self._note_unseen(event.unseen_tokens)
                        elif isinstance(event, GenerationDone):
                            self._note_unseen(event.usage.unseen_tokens)
                        yield event
        except LlmError as error:
            raise GenerationError(str(error), code=error.code) from error
        finally:
            if self._hurried is not None and self._reply is self._hurried:
                self._trace.facts.update(self._hurried.served)
            elif self._reply is not None:
                self._trace.facts.update(served_facts(self._reply))
            self._reply = None

    async def _open(
        self, messages: list[ChatMessage], params: SamplingParams, options: OptionFields
    ) -> LlmReply:
        engine, small = self._services.engine, self._services.small_engine
        # Behind the first words the caller hears the first engine; and calls of tools are its own.
        is_first = "llm_first_token" not in self._trace.instants
        if small is None or not is_first or params.guide is not None or not self._budget.hurries:
            return await engine.open_reply(messages, params, **options)
        self._hurried = HedgedReply(
            engine, small, self._clock, self._budget, messages, params, options
        )
        await self._hurried.open()
        return self._hurried

    async def _wait_for_prefill(self) -> None:
        if self._prefilled is not None and not self._prefilled.done():
            self._trace.mark("llm_scheduled", self._clock.now_ns())
            await asyncio.wait([self._prefilled])

    def _note_unseen(self, num_tokens: int) -> None:
        if num_tokens:
            self._trace.facts["unseen_tokens"] = num_tokens

    def _note_given_up(self, event: FirstToken, messages: list[ChatMessage]) -> None:
        facts = self._trace.facts
        if event.downgrades:
            facts["downgrades"] = sorted({*facts.get("downgrades", ()), *event.downgrades})
        facts["dropped_messages"] = max(facts.get("dropped_messages", 0), event.dropped_messages)
        if "partial_context" in event.downgrades:
            return  # for this once: they are part of the conversation still
        dropped = oldest_of(messages, event.dropped_messages)
        self.dropped = max(self.dropped, dropped, key=len)
