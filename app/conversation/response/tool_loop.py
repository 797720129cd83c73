"""The words of one answer: the model replies, its calls of tools are run, and it is asked again.

What it says goes to a bounded queue, in the pieces in which it will be presented. A full queue
makes the words of the model wait (overflow rule).
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass

from app.clock import Clock
from app.conversation.history import without_tools
from app.conversation.response.budget import BudgetedChunker, TurnBudget
from app.conversation.response.llm_stream import LlmStream
from app.conversation.response.metrics import TurnRecord
from app.conversation.response.output import Output
from app.conversation.response.tool_executor import ToolExecutor
from app.conversation.services import Services
from app.conversation.session_config import SessionConfig
from app.conversation.tools import Outcome, choice_after_results
from audio.text import SpokenText
from llm_core import ChatMessage, FirstToken, GenerationDone, TextDelta


@dataclass(frozen=True, slots=True)
class Piece:
    """Text on its way to the voice; see ``output.Clause`` for the rest."""

    text: str
    part: int = 0
    is_last: bool = False
    is_filler: bool = False


class ToolLoop:
    """Writes one answer to ``texts``, where None is its end."""

    def __init__(
        self,
        services: Services,
        clock: Clock,
        config: SessionConfig,
        *,
        asking: LlmStream,
        budget: TurnBudget,
        output: Output,
        record: TurnRecord,
        released: asyncio.Event,
    ) -> None:
        """``released``: it is certain that the answer is wanted."""
        self.texts: asyncio.Queue[Piece | None] = asyncio.Queue(maxsize=8)
        self._services = services
        self._clock = clock
        self._config = config
        self._asking = asking
        self._budget = budget
        self._output = output
        self._record = record
        self._released = released
        self._has_said_filler = False

    async def run(self, messages: list[ChatMessage]) -> None:
        """Answer ``messages``: one round for each reply of the model that calls tools of ours.

        If it has called often enough, or only asks again what it knows, it must answer in words.
        """
        choice = self._config.tool_choice
        known: dict[tuple[str, str], Outcome] = {}
        max_rounds = self._services.settings.max_tool_rounds
        may_call = True
        for number in range(max_rounds + 1):
            async with ToolExecutor(
                self._services,
                self._config,
                choice,
                self._output,
                self._released,
                part=2 * number,
                known=known,
                may_call=may_call,
            ) as calling:
                await self._read(messages if may_call else without_tools(messages), calling)
                if not calling.calls:
                    break
                results = await calling.results(self._clock, self._say_filler)
                self._record.note_calls(calling)
                if results is None:
                    break
            messages = [*messages, *results]
            choice = choice_after_results(choice)
            may_call = number + 1 < max_rounds and calling.brought_news
        await self.texts.put(None)

    async def _read(self, messages: list[ChatMessage], calling: ToolExecutor) -> None:
        """One reply of the model: its words to ``texts``, its calls to ``calling``."""
        spoken_text = SpokenText()
        chunker = BudgetedChunker(self._budget)

        async def take(text: str) -> None:
            pieces = [text]
            if self._output.is_spoken:
                pieces = chunker.feed(spoken_text.feed(text), self._clock.now_ns())
            await self._put(pieces, calling)

        async def take_rest() -> None:
            """Nothing is said behind a call that was meant before it."""
            now_ns = self._clock.now_ns()
            pieces = chunker.feed(spoken_text.flush(), now_ns)
            await self._put([*pieces, *chunker.flush(now_ns)], calling)

        max_tokens = self._record.tokens_left(self._services.settings.max_reply_tokens)
        reply = self._asking.events(messages, max_tokens=max_tokens, guide=calling.guide)
        async with aclosing(reply) as events:
            async for event in events:
                match event:
                    case FirstToken():
                        self._record.note_first_token(event)
                    case TextDelta():
                        self._record.note_tokens(event.num_tokens)
                        await calling.feed(event.text, take, take_rest)
                        if calling.has_enough:
                            break
                    case GenerationDone():
                        self._record.note_done(event)
        await calling.flush(take, take_rest)
        await take_rest()
        await self.texts.put(Piece("", calling.part, is_last=True))

    async def _put(self, pieces: list[str], calling: ToolExecutor) -> None:
        for piece in pieces:
            self._record.note_clause()
            calling.has_text = True
            await self.texts.put(Piece(piece, calling.part))

    async def _say_filler(self, part: int) -> None:
        """A tool takes long: say that we are still here, once what was said has been heard."""
        filler = self._services.settings.tool_filler
        if not filler or not self._output.is_spoken or self._has_said_filler:
            return
        if wait_s := self._output.playout.remaining_s(self._clock.now_ns()):
            await self._clock.sleep(wait_s)
        self._has_said_filler = True
        self._record.note_filler(filler)
        await self.texts.put(Piece(filler, part, is_filler=True))
        await self.texts.put(Piece("", part, is_last=True, is_filler=True))
