"""The calls of tools in one reply of the model: announced, run if they are ours, answered.

Calls do not wait for speech: the client hears of one while the words before it still play, and a
tool of ours starts at once. But nothing of it happens before it is certain that the answer is
wanted: a tool may do things that cannot be undone.

If the caller interrupts, a tool of ours is cancelled (one that blocks a thread runs on, and its
result is thrown away); history keeps the call with a note that it was interrupted. A call that the
client runs is the client's: its output is taken whenever it comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any

import msgspec

from app.clock import Clock
from app.conversation.events import Item, ToolCall
from app.conversation.response.output import Output
from app.conversation.response.tool_constraints import IN_WORDS, tool_guide
from app.conversation.services import Services
from app.conversation.session_config import SessionConfig, ToolChoice
from app.conversation.tools import Outcome
from llm_core import (
    ChatMessage,
    Guide,
    ToolArguments,
    ToolCallEnd,
    ToolCallParser,
    ToolCallStart,
    ToolEvent,
    ToolText,
)
from llm_core import ToolCall as LlmToolCall

# How a call begins in the text of most models.
_TAG_START = "<tool"

Take = Callable[[str], Awaitable[None]]
TakeRest = Callable[[], Awaitable[None]]
SayFiller = Callable[[int], Coroutine[Any, Any, None]]


class ToolExecutor:
    """Reads one reply. An async context manager: what still runs at the end is cancelled.

    ``part`` is that of the reply's words, ``part + 1`` that of a filler behind them. A call
    whose outcome is ``known`` from this answer is not run again: small models like to repeat
    themselves. Without ``may_call`` the model is offered nothing, and no call of its own is run.
    """

    def __init__(
        self,
        services: Services,
        config: SessionConfig,
        choice: ToolChoice,
        output: Output,
        released: asyncio.Event,
        *,
        part: int,
        known: dict[tuple[str, str], Outcome],
        may_call: bool,
    ) -> None:
        self.part = part
        self._known = known
        self._may_call = may_call
        self.has_text = False
        self.calls: list[Item] = []
        self.waited_ns = 0
        self._num_run = 0
        self._num_whole = 0
        self._services = services
        self._config = config
        self._output = output
        self._released = released
        self._text = ""
        self._running: dict[str, asyncio.Task[Outcome]] = {}  # by the ids of their items
        self._parser: ToolCallParser | None = None
        self.guide: Guide | None = None
        if specs := services.tools.specs(config):
            names = [spec.name for spec in specs]
            self._parser = ToolCallParser(services.engine.info.tool_format, names)
            self.guide = tool_guide(specs, choice, config) if may_call else IN_WORDS

    async def __aenter__(self) -> ToolExecutor:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def has_enough(self) -> bool:
        """A whole call is there and the session allows one at a time only, or the model has begun
        to make the same calls again."""
        is_repeating = self._parser is not None and self._parser.is_repeating
        return is_repeating or (self._num_whole > 0 and not self._config.parallel_tool_calls)

    async def feed(self, text: str, take: Take, take_rest: TakeRest) -> None:
        """More of the reply. Words go to ``take``; before a call, ``take_rest`` ends them."""
        events: list[ToolEvent] = [ToolText(text)]
        if self._parser is not None:
            events = self._parser.feed(text)
        await self._handle(events, take, take_rest)

    async def flush(self, take: Take, take_rest: TakeRest) -> None:
        """The reply has ended. A call that had not got as far as its name is not spoken."""
        if self._parser is None:
            return
        events = [
            event
            for event in self._parser.flush()
            if not (isinstance(event, ToolText) and event.text.lstrip().startswith(_TAG_START))
        ]
        await self._handle(events, take, take_rest)

    async def _handle(self, events: list[ToolEvent], take: Take, take_rest: TakeRest) -> None:
        for event in events:
            match event:
                case ToolText():
                    self._text += event.text
                    await take(event.text)
                case ToolCallStart():
                    await take_rest()
                    await self._begin(event)
                case ToolArguments():
                    await self._output.add_arguments(self.calls[event.index], event.delta)
                case ToolCallEnd():
                    await self._finish(self.calls[event.index], event.is_complete)

    async def _begin(self, event: ToolCallStart) -> None:
        await self._released.wait()
        if self.has_text:
            await self._output.until_open(self.part)
        runs_here = self._services.tools.runs_here(event.name, self._config)
        call = ToolCall(event.call_id, event.name, runs_here=runs_here)
        self.calls.append(await self._output.open_call(call))

    async def _finish(self, item: Item, is_complete: bool) -> None:
        call = item.call
        assert call is not None
        self._num_whole += 1
        if not is_complete:
            call.error = "the arguments are not a JSON object" if call.runs_here else None
            await self._output.close_call(item, "incomplete")
        elif not self._may_call:
            call.error = "too many calls in one answer"
            await self._output.close_call(item, "incomplete")
        elif call.runs_here and (outcome := self._known.get((call.name, call.arguments))):
            call.output, call.error = outcome.output, outcome.error
            await self._output.close_call(item, "completed")
        elif call.runs_here:
            self._num_run += 1
            running = self._services.tools.run(call.name, call.arguments)
            self._running[item.id] = asyncio.create_task(running, name=f"tool {call.name}")
        else:
            await self._output.close_call(item, "completed")

    async def results(self, clock: Clock, say_filler: SayFiller) -> list[ChatMessage] | None:
        """Wait for the tools of ours: what the model reads next, or None if it is not its turn.

        It is the client's turn if any call is the client's.
        """
        began_ns = clock.now_ns()
        if self._running:
            await self._wait(clock, say_filler)
        self.waited_ns = clock.now_ns() - began_ns
        for item in self.calls:
            task, call = self._running.pop(item.id, None), item.call
            assert call is not None
            if task is None:
                continue
            outcome = task.result()
            call.output, call.error = outcome.output, outcome.error
            self._known[call.name, call.arguments] = outcome
            await self._output.close_call(item, "completed")
        is_ours = all(item.call is not None and item.call.runs_here for item in self.calls)
        return self._messages() if is_ours and self._may_call else None

    @property
    def brought_news(self) -> bool:
        """A tool has been run."""
        return bool(self._num_run)

    async def _wait(self, clock: Clock, say_filler: SayFiller) -> None:
        running = set(self._running.values())
        patience = asyncio.create_task(clock.sleep(self._services.settings.tool_filler_ms / 1000))
        try:
            while any(not task.done() for task in running) and not patience.done():
                await asyncio.wait({patience, *running}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            patience.cancel()
        if any(not task.done() for task in running):
            filler = asyncio.create_task(say_filler(self.part + 1))
            try:
                await asyncio.wait(running)
            finally:
                filler.cancel()
                await asyncio.wait([filler])
            if not filler.cancelled():
                filler.result()

    def _messages(self) -> list[ChatMessage]:
        made, results = [], []
        for item in self.calls:
            call = item.call
            assert call is not None
            arguments = call.arguments if _is_object(call.arguments) else "{}"
            made.append(LlmToolCall(call_id=call.call_id, name=call.name, arguments=arguments))
            text = Outcome(call.output, call.error).for_model
            results.append(ChatMessage("tool", text, call_id=call.call_id))
        return [ChatMessage("assistant", self._text.strip(), tuple(made)), *results]


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except msgspec.DecodeError:
        return False
