"""The policy ``smaller_model``: a smaller engine answers when the first one would be late.

The first engine is asked as always. When its first token is not there at the instant at which the
turn's budget needs it, the smaller engine is asked the same, and whichever begins first gives the
answer. The first engine is then listened to until its own first token, unless the answer has been
sent before: the time between the two is what was saved (in the other case, at least).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from types import TracebackType
from typing import Any, Self

from app.clock import Clock
from app.conversation.response.budget import TurnBudget
from app.observe import BudgetAction
from app.routing import LlmEngine, LlmReply, model_id, served_facts
from llm_core import ChatMessage, GenerationEvent, LlmError, OptionFields, SamplingParams

log = logging.getLogger(__name__)

# The smaller engine needs some time for its own first token.
_AHEAD_NS = 50_000_000


class HedgedReply:
    """A ``LlmReply`` of ``first``, or of ``small`` where that begins sooner and there is hurry."""

    def __init__(
        self,
        first: LlmEngine,
        small: LlmEngine,
        clock: Clock,
        budget: TurnBudget,
        messages: Sequence[ChatMessage],
        params: SamplingParams,
        options: OptionFields,
    ) -> None:
        """``options`` hold the deadline of the first token; without one there is no hurry."""
        self._first = first
        self._small = small
        self._clock = clock
        self._budget = budget
        self._messages = messages
        self._params = params
        self._options = options
        self._moved = asyncio.Event()  # the deadline
        self._main: LlmReply | None = None
        self._other: LlmReply | None = None  # the smaller engine's
        self._chosen: LlmReply | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._action: BudgetAction | None = None
        self._began_ns = 0  # the smaller engine's answer

    async def open(self) -> None:
        """Asks the first engine. Raises LlmError."""
        self._main = await self._first.open_reply(self._messages, self._params, **self._options)

    @property
    def served(self) -> dict[str, Any]:
        """Facts for the trace."""
        assert self._main is not None, "opened before"
        if self._other is not None and self._chosen is self._other:
            return {"model": model_id(self._small.info)}
        return served_facts(self._main)

    def set_deadline(self, deadline_ns: int | None) -> None:
        """See ``LlmReply``."""
        self._options["deadline_ns"] = deadline_ns
        self._moved.set()
        for reply in (self._main, self._other) if self._chosen is None else (self._chosen,):
            if reply is not None:
                reply.set_deadline(deadline_ns)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerationEvent:
        """Raises as ``llm_core.Reply``."""
        if self._chosen is not None:
            return await anext(self._chosen)
        return await self._first_event()

    async def _first_event(self) -> GenerationEvent:
        assert self._main is not None, "opened before"
        main: asyncio.Task[GenerationEvent] = self._start(anext(self._main))
        late = self._start(self._until_late())
        await asyncio.wait({main, late}, return_when=asyncio.FIRST_COMPLETED)
        late.cancel()
        if main.done():
            self._chosen = self._main
            return await main
        other = self._start(self._ask_small())
        await asyncio.wait({main, other}, return_when=asyncio.FIRST_COMPLETED)
        event: GenerationEvent | None = None
        if not main.done() or main.exception() is not None:
            event = await other  # None: it failed, or has nothing to say
        if event is None:
            self._chosen = self._main
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)
            await self._close(self._other)
            return await main
        self._chosen, self._began_ns = self._other, self._clock.now_ns()
        overspent_ms = self._budget.overspent_ms("queue", self._began_ns)
        self._action = self._budget.act("smaller_model", self._began_ns, overspent_ms)
        self._start(self._watch(main))
        return event

    async def _until_late(self) -> None:
        """Returns when the first token has to be asked for elsewhere, were it not to be late."""
        while True:
            self._moved.clear()
            deadline_ns = self._options.get("deadline_ns")
            if deadline_ns is None:
                await self._moved.wait()
                continue
            wait_s = (deadline_ns - _AHEAD_NS - self._clock.now_ns()) / 1e9
            if wait_s <= 0:
                return
            waits = (self._start(self._clock.sleep(wait_s)), self._start(self._moved.wait()))
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    async def _ask_small(self) -> GenerationEvent | None:
        try:
            self._other = await self._small.open_reply(
                self._messages, self._params, **self._options
            )
            return await anext(self._other)
        except LlmError as error:
            log.warning("the smaller engine cannot help (%s)", error.code)
            return None

    async def _watch(self, main: asyncio.Task[GenerationEvent]) -> None:
        """Notes when the first engine would have begun, and lets it go."""
        await asyncio.wait({main})
        self._note_saved()
        if not main.cancelled() and (error := main.exception()) is not None:
            log.warning("the first engine failed behind the smaller one: %s", error)
        await self._close(self._main)

    def _note_saved(self) -> None:
        if self._action is not None and self._action.saved_ms is None:
            self._action.saved_ms = (self._clock.now_ns() - self._began_ns) / 1e6

    def _start(self, work: Awaitable[Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        return task

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        """Ends the answer. A first engine that has not begun is still listened to, until ``close``:
        what was saved is not known yet."""
        if self._action is not None and self._action.saved_ms is None:
            await self._close(self._other)
        else:
            await self.close()

    async def close(self) -> None:
        """Ends everything."""
        self._note_saved()  # at least so much, when the first engine has not begun yet
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for reply in (self._main, self._other):
            await self._close(reply)

    @staticmethod
    async def _close(reply: LlmReply | None) -> None:
        if reply is not None:
            await reply.__aexit__(None, None, None)
