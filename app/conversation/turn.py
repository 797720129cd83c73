"""One answer: messages -> LLM -> clauses -> speech -> the client, all stages at once.

Three tasks joined by bounded queues. A full queue makes the stage before it wait (overflow rule),
so an answer that is spoken slower than it is written holds only a few clauses of audio.

An answer may be begun before it is certain that the caller has finished: ``start`` sets the stages
to work, and nothing of it reaches client or history until ``run``. ``discard`` forgets it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from app.clock import Clock
from app.conversation.asking import Asking
from app.conversation.budget import BudgetedChunker, TurnBudget
from app.conversation.calling import Calling
from app.conversation.events import Response, ResponseStarted, ResponseUsage, Sink
from app.conversation.history import History, without_tools
from app.conversation.outcome import outcome_of
from app.conversation.output import Clause, Output
from app.conversation.services import Services
from app.conversation.session_config import SessionConfig
from app.conversation.tools import Outcome, choice_after_results
from app.conversation.voicing import Voicing
from app.errors import ServiceError, TurnTimeoutError
from app.observe.trace import TurnTrace
from audio.frame import Samples
from audio.text import SpokenText
from llm_core import (
    ChatMessage,
    FirstToken,
    GenerationDone,
    GenerationEvent,
    TextDelta,
)

log = logging.getLogger(__name__)

_NO_SAMPLES: Samples = np.zeros(0, np.float32)
# Audible: above -50 dB of full scale. The first such sample ends the caller's wait.
_AUDIBLE = 0.003
# By then it is judged whether a voice over the answer was meant to stop it.
_HOLD_S = 1.5


@dataclass(frozen=True, slots=True)
class _Piece:
    """Text on its way to the voice; see ``Clause`` for the rest."""

    text: str
    part: int = 0
    is_last: bool = False
    is_filler: bool = False


class Turn:
    """One response, from its request to its last sample.

    ``run`` never raises for what goes wrong inside: the response says how it ended.
    """

    def __init__(
        self,
        services: Services,
        clock: Clock,
        sink: Sink,
        history: History,
        config: SessionConfig,
        messages: list[ChatMessage],
        response: Response,
        trace: TurnTrace,
        *,
        prefilled: asyncio.Task[None] | None,
    ) -> None:
        self.config = config
        self.messages = messages
        self.response = response
        self.trace = trace
        trace.facts["forgotten_items"] = history.num_forgotten
        self.on_audio_started: Callable[[], None] = lambda: None
        self.on_sound: Callable[[Samples, int, int], None] = lambda samples, rate, at_ns: None
        """Hears of all audio float32 [n] that is sent, its rate, and when it sounds."""
        self._services = services
        self._clock = clock
        self._sink = sink
        self._history = history
        self._speaks = response.modality == "audio"
        self._budget = TurnBudget.of(services.settings, config, trace)
        self._asking = Asking(services, config, clock, trace, self._budget, prefilled)
        self._held_until_ns = 0
        self._num_samples = 0  # of speech made, sent or not
        self._has_words = False  # the answer has begun, fillers aside
        given = (response, history, sink, clock, config.output_format)
        self._output = Output(*given, services.settings.playout_lead_ms, self._note_audible)
        self._work: asyncio.Task[None] | None = None
        self._released = asyncio.Event()
        self._stop_reason: str | None = None
        self._past_usage = ResponseUsage()  # of the model's earlier replies in this answer

    def start(self) -> None:
        """Set the stages to work. Nothing is told or shown before ``run``."""
        self._work = asyncio.create_task(self._answer())

    @property
    def has_ended(self) -> bool:
        """The stages have ended; before ``run`` that means that they failed."""
        return self._work is not None and self._work.done()

    async def until_first_token(self) -> None:
        """Wait until the model has read the words, but not for long: it may be busy."""
        await self._asking.until_read()

    async def discard(self) -> None:
        """Forget an answer that was started and not run; returns when nothing of it is left."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait([self._work])
            if not self._work.cancelled():
                self._work.exception()  # nobody asked for this answer: nobody hears how it failed

    async def run(self) -> None:
        """Answer. Returns when the client has all of the answer; ``response`` says how it ended.

        The session sends ``ResponseDone``, when it is ready for the next response.
        """
        try:
            if self._work is None and self._stop_reason is None:
                self.start()
            await self._sink(ResponseStarted(self.response))
            self._released.set()
            self._tell_deadline()
            await self._work_until_end()
            await self._tell_end()
        finally:
            if not self.has_ended:  # the sink failed, or the task was cancelled in it
                await self.discard()
            if not self.trace.outcome:  # the call ended in the middle of the answer
                self._complete_trace()

    async def _work_until_end(self) -> None:
        try:
            if self._work is not None:
                await asyncio.shield(self._work)
        except asyncio.CancelledError:
            assert self._work is not None
            if not self._work.cancelled():  # not `stop`: the session is closing
                self._work.cancel()
                await asyncio.wait([self._work])
                raise
        except ExceptionGroup as errors:
            self._end_failed(errors)
            return
        # Also when the stages were done in the very moment of `stop`, or had not begun.
        if self._stop_reason is not None:
            self._end("cancelled", self._stop_reason)

    def stop(self, reason: str) -> None:
        """Silence now: no sample leaves after this call. ``run`` then returns soon."""
        self._stop_reason = reason
        self._output.stop()
        if self._work is not None:
            self._work.cancel()

    @property
    def has_been_heard(self) -> bool:
        """A whole word of it was played by now."""
        return self._output.has_been_heard

    @property
    def text(self) -> str:
        """What was said so far."""
        return self._output.text

    def hold(self) -> bool:
        """Silence now; the answer may go on where it stopped. False when its end is being told."""
        if not self._output.hold():
            return False
        self.trace.facts["holds"] = self.trace.facts.get("holds", 0) + 1
        self._held_until_ns = self._clock.now_ns() + int(_HOLD_S * 1e9)
        self._tell_deadline()
        return True

    async def release(self) -> None:
        """Go on where the answer stopped. Returns when it has caught up."""
        self._held_until_ns = 0
        self._tell_deadline()
        await self._output.release()

    @property
    def is_playing(self) -> bool:
        """The player still has some of it to play."""
        return self._output.playout.is_playing(self._clock.now_ns())

    def cut_to_heard(self) -> None:
        """Cut history to what was heard by now. No-op once all of it was."""
        self._output.cut_to_heard()

    # --- the stages ---

    async def _answer(self) -> None:
        texts: asyncio.Queue[_Piece | None] = asyncio.Queue(maxsize=8)
        clauses: asyncio.Queue[Clause | None] = asyncio.Queue(maxsize=4)
        async with self._asking, asyncio.TaskGroup() as stages:
            expiry = stages.create_task(self._expire())
            stages.create_task(self._think(texts))
            stages.create_task(self._voice(texts, clauses))
            await stages.create_task(self._present(clauses))
            expiry.cancel()

    async def _expire(self) -> None:
        """A stage that hangs must not leave the caller in silence for ever."""
        timeout_s = self._services.settings.turn_timeout_s
        await self._clock.sleep(timeout_s)
        if not self._has_words and not any(item.call for item in self.response.output):
            raise TurnTimeoutError(f"there was no answer within {timeout_s:g} s")

    async def _think(self, texts: asyncio.Queue[_Piece | None]) -> None:
        """The model's words, in the pieces in which they will be presented.

        When it calls tools of ours, it is asked again with what they gave back: one round each. If
        it has called often enough, or only asks again what it knows, it must answer in words.
        """
        messages, choice = self.messages, self.config.tool_choice
        known: dict[tuple[str, str], Outcome] = {}
        max_rounds = self._services.settings.max_tool_rounds
        may_call = True
        for number in range(max_rounds + 1):
            async with Calling(
                self._services,
                self.config,
                choice,
                self._output,
                self._released,
                part=2 * number,
                known=known,
                may_call=may_call,
            ) as calling:
                await self._read(messages if may_call else without_tools(messages), calling, texts)
                if not calling.calls:
                    break
                results = await calling.results(self._clock, partial(self._say_filler, texts))
                self._note_calls(calling)
                if results is None:
                    break
            messages, choice = [*messages, *results], choice_after_results(choice)
            may_call = number + 1 < max_rounds and calling.brought_news
        await texts.put(None)

    async def _read(
        self,
        messages: list[ChatMessage],
        calling: Calling,
        texts: asyncio.Queue[_Piece | None],
    ) -> None:
        """One reply of the model: its words to ``texts``, its calls to ``calling``."""
        spoken_text, chunker = SpokenText(), BudgetedChunker(self._budget)

        async def take(text: str) -> None:
            pieces = [text]
            if self._speaks:
                pieces = chunker.feed(spoken_text.feed(text), self._clock.now_ns())
            await self._put_texts(texts, pieces, calling)

        async def take_rest() -> None:
            """Nothing is said behind a call that was meant before it."""
            now_ns = self._clock.now_ns()
            pieces = [*chunker.feed(spoken_text.flush(), now_ns), *chunker.flush(now_ns)]
            await self._put_texts(texts, pieces, calling)

        async with aclosing(self._generate(messages, calling)) as events:
            async for event in events:
                match event:
                    case FirstToken():
                        self._note_first_token(event)
                    case TextDelta():
                        self._note_tokens(event.num_tokens)
                        await calling.feed(event.text, take, take_rest)
                        if calling.has_enough:
                            break
                    case GenerationDone():
                        self._note_done(event)
        await calling.flush(take, take_rest)
        await take_rest()
        await texts.put(_Piece("", calling.part, is_last=True))

    async def _put_texts(
        self, texts: asyncio.Queue[_Piece | None], pieces: list[str], calling: Calling
    ) -> None:
        for piece in pieces:
            self.trace.mark("first_clause", self._clock.now_ns())
            calling.has_text = True
            await texts.put(_Piece(piece, calling.part))

    async def _say_filler(self, texts: asyncio.Queue[_Piece | None], part: int) -> None:
        """A tool takes long: say that we are still here, once what was said has been heard."""
        filler = self._services.settings.tool_filler
        if not filler or not self._speaks or "filler" in self.trace.facts:
            return
        if wait_s := self._output.playout.remaining_s(self._clock.now_ns()):
            await self._clock.sleep(wait_s)
        self.trace.facts["filler"] = filler
        await texts.put(_Piece(filler, part, is_filler=True))
        await texts.put(_Piece("", part, is_last=True, is_filler=True))

    def _generate(
        self, messages: list[ChatMessage], calling: Calling
    ) -> AsyncGenerator[GenerationEvent, None]:
        max_tokens = self.response.max_output_tokens or self._services.settings.max_reply_tokens
        left = max(1, max_tokens - self.response.usage.output_tokens)
        return self._asking.events(messages, max_tokens=left, guide=calling.guide)

    def _tell_deadline(self) -> None:
        """Tell the engine when the next words are needed: at first as the budget has it, then when
        the caller has heard all that was made, which a held answer is not for a while."""
        if not self._released.is_set():
            return  # perhaps nobody will hear it
        deadline_ns = self._budget.first_token_deadline_ns
        if self._num_samples:
            goes_on_ns = max(self._clock.now_ns(), self._held_until_ns)
            in_hand_ns = int(self._in_hand_s * 1e9)
            deadline_ns = goes_on_ns + in_hand_ns - self._budget.behind_first_token_ns
        self._asking.needed_by(deadline_ns)

    async def _voice(
        self, texts: asyncio.Queue[_Piece | None], clauses: asyncio.Queue[Clause | None]
    ) -> None:
        voicing = Voicing(self._services, self.config, self._clock, self.trace)
        while (piece := await texts.get()) is not None:
            clause = Clause(piece.text, _NO_SAMPLES, piece.part, piece.is_last, piece.is_filler)
            if self._speaks and piece.is_last:
                await clauses.put(replace(clause, samples=self._made(voicing.flush())))
            elif self._speaks:
                async with aclosing(voicing.say(piece.text, self._in_hand_s)) as sounds:
                    async for sound in sounds:
                        samples, length = self._made(sound.samples), sound.clause_len
                        await clauses.put(replace(clause, samples=samples, length=length))
                        clause = replace(clause, text="", is_more=True)
            else:
                await clauses.put(clause)
        await clauses.put(None)

    def _made(self, samples: Samples) -> Samples:
        """Note that ``samples`` can be sent."""
        if len(samples):
            self.trace.mark("tts_first_audio", self._clock.now_ns())
            self._num_samples += len(samples)
            self._tell_deadline()
        return samples

    @property
    def _in_hand_s(self) -> float:
        """What was made and not heard yet."""
        playout = self._output.playout
        unsent_s = max(0, self._num_samples - playout.sent_samples) / playout.rate
        return playout.remaining_s(self._clock.now_ns()) + unsent_s

    async def _present(self, clauses: asyncio.Queue[Clause | None]) -> None:
        """Show and play, once it is certain that the answer is wanted."""
        first = asyncio.create_task(clauses.get())
        try:
            await self._released.wait()
            if bridge := await self._bridge(first):
                await self._output.say(bridge)
            clause = await first
        finally:
            first.cancel()
        self._budget.answered(self._clock.now_ns())
        self._has_words = True
        self._history.forget_oldest(self._asking.dropped)
        while clause is not None:
            await self._output.say(clause)
            clause = await clauses.get()
        await self._output.say_nothing()
        await self._output.finish()

    async def _bridge(self, first: asyncio.Task[Clause | None]) -> Clause | None:
        """What is said when the budget is all but spent and there is no clause yet."""
        filler, wait_s = self._services.filler, self._budget.bridge_wait_s(self._clock.now_ns())
        if filler is None or wait_s is None or not self._speaks:
            return None
        sleeping = asyncio.create_task(self._clock.sleep(wait_s))
        try:
            await asyncio.wait({first, sleeping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleeping.cancel()
        if first.done():
            return None
        self._budget.bridged(self._clock.now_ns())
        samples = filler.samples(self.config.output_format.rate)
        self._num_samples += len(samples)
        return Clause(filler.text, samples, part=-1, is_last=True, is_filler=True)

    # --- notes ---

    def _note_first_token(self, event: FirstToken) -> None:
        self.trace.note_first_token(
            received_ns=event.received_ns,
            scheduled_ns=event.scheduled_ns,
            first_token_ns=event.first_token_ns,
            prompt_tokens=event.prompt_tokens,
            cached_tokens=event.cached_tokens,
        )
        past = self._past_usage = self.response.usage
        self.response.usage = ResponseUsage(
            past.input_tokens + event.prompt_tokens,
            past.cached_tokens + event.cached_tokens,
            past.output_tokens,
        )

    def _note_tokens(self, num_tokens: int) -> None:
        num_tokens += self._past_usage.output_tokens
        usage = self.response.usage
        self.response.usage = ResponseUsage(usage.input_tokens, usage.cached_tokens, num_tokens)
        self.trace.facts["completion_tokens"] = num_tokens

    def _note_done(self, event: GenerationDone) -> None:
        self._note_tokens(event.usage.completion_tokens)
        self.trace.note_generated(
            num_tokens=self.response.usage.output_tokens,
            num_steps=event.num_steps,
            finish_reason=event.finish_reason,
            finished_ns=event.finished_ns,
            speculation=event.speculation,
        )
        if event.finish_reason == "length":
            self.response.reason = "max_output_tokens"

    def _note_calls(self, calling: Calling) -> None:
        facts = self.trace.facts
        facts["tool_calls"] = facts.get("tool_calls", 0) + len(calling.calls)
        facts["tool_ms"] = facts.get("tool_ms", 0.0) + calling.waited_ns / 1e6

    def _note_audible(self, chunk: Samples, sounds_ns: int) -> None:
        if not self._speaks:
            self.on_audio_started()
            return
        self.on_sound(chunk, self.config.output_format.rate, sounds_ns)
        if self.trace.audio is not None:
            self.trace.audio.add_reply(chunk, self.config.output_format.rate, sounds_ns)
        if "first_audio_sent" in self.trace.instants:
            return
        audible = np.flatnonzero(np.abs(chunk) >= _AUDIBLE)
        if not len(audible):
            return
        offset_ns = int(audible[0]) * 1_000_000_000 // self.config.output_format.rate
        self.trace.mark("first_audio_sent", sounds_ns + offset_ns)
        self.on_audio_started()

    # --- the end ---

    def _end(self, status: Literal["cancelled", "failed"], reason: str | None) -> None:
        self.response.status = status
        self.response.reason = reason
        self._output.end(status)

    def _end_failed(self, errors: ExceptionGroup[Exception]) -> None:
        known = errors.subgroup(ServiceError)
        first: Exception = (known or errors).exceptions[0]
        if isinstance(first, ServiceError):
            self._end("failed", first.code)
            self.response.error_message = first.message
        else:
            # A bug of ours, or a foreign error that nobody mapped: its text is for the log only.
            log.error("turn %s failed", self.trace.turn_id, exc_info=errors)
            self._end("failed", "server_error")
            self.response.error_message = "internal error; the server's log has the details"

    async def _tell_end(self) -> None:
        response = self.response
        cut_short = response.reason == "max_output_tokens"
        if response.status == "in_progress":
            response.status = "incomplete" if cut_short else "completed"
        await self._output.tell_end("incomplete" if cut_short else "completed")
        self._complete_trace()

    def _complete_trace(self) -> None:
        trace = self.trace
        trace.reply = self._output.text
        start_ns = min(trace.instants.values(), default=0)
        for percent, name in ((99, "loop_lag_p99_ms"), (100, "loop_lag_max_ms")):
            trace.facts[name] = self._services.loop_lag.percentile_ms(percent, start_ns)
        trace.facts["playout_gap_ms"] = self._output.playout.gap_ns / 1e6
        trace.facts["reply_audio_s"] = self._output.audio_s
        trace.end(
            outcome_of(self.response, trace.reply), self._clock.now_ns(), self.response.reason or ""
        )
