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
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from app.clock import Clock
from app.conversation.budget import BudgetedChunker, TurnBudget
from app.conversation.events import (
    Item,
    OutputAudio,
    OutputDone,
    OutputStarted,
    OutputText,
    Part,
    Response,
    ResponseStarted,
    ResponseUsage,
    Sink,
)
from app.conversation.history import History, SpokenRecord, shortened
from app.conversation.ids import new_id
from app.conversation.pacing import PlayoutClock
from app.conversation.services import Services
from app.conversation.session_config import SessionConfig
from app.errors import GenerationError, ServiceError, SynthesisError, TurnTimeoutError
from app.observe.trace import TurnOutcome, TurnTrace
from audio.codecs import encode
from audio.errors import AudioError
from audio.frame import Samples
from audio.resample import StreamResampler
from audio.text import SpokenText
from llm_core import (
    ChatMessage,
    FirstToken,
    GenerationDone,
    GenerationEvent,
    LlmError,
    PromptTooLongError,
    SamplingParams,
    TextDelta,
)

log = logging.getLogger(__name__)

# Audible: above -50 dB of full scale. The first such sample ends the caller's wait.
_AUDIBLE = 0.003


@dataclass(frozen=True, slots=True)
class Clause:
    """A piece of the answer. ``samples``: float32 [n] at the output's rate; none when written."""

    text: str
    samples: Samples


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
        self.on_audio_started: Callable[[], None] = lambda: None
        self._services = services
        self._clock = clock
        self._sink = sink
        self._history = history
        self._prefilled = prefilled
        self._speaks = response.modality == "audio"
        self._budget = TurnBudget.of(services.settings, config, trace)
        self._playout = PlayoutClock(config.output_format.rate, services.settings.playout_lead_ms)
        self._spoken = SpokenRecord(config.output_format.rate)
        self._item: Item | None = None
        self._has_words = False  # the answer has begun, fillers aside
        self._work: asyncio.Task[None] | None = None
        self._released = asyncio.Event()
        self._stop_reason: str | None = None

    def start(self) -> None:
        """Set the stages to work. Nothing is told or shown before ``run``."""
        self._work = asyncio.create_task(self._answer())

    @property
    def has_ended(self) -> bool:
        """The stages have ended; before ``run`` that means that they failed."""
        return self._work is not None and self._work.done()

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
        if self._work is not None:
            self._work.cancel()

    def cut_to_heard(self) -> None:
        """Cut history to what was heard by now. No-op once all of it was."""
        now = self._clock.now_ns()
        if self._item is not None and self._playout.is_playing(now):
            self._history.cut(self._item.id, self._playout.played_samples(now))

    # --- the stages ---

    async def _answer(self) -> None:
        texts: asyncio.Queue[str | None] = asyncio.Queue(maxsize=8)
        clauses: asyncio.Queue[Clause | None] = asyncio.Queue(maxsize=2)
        async with asyncio.TaskGroup() as stages:
            expiry = stages.create_task(self._expire())
            stages.create_task(self._think(texts))
            stages.create_task(self._voice(texts, clauses))
            await stages.create_task(self._present(clauses))
            expiry.cancel()

    async def _expire(self) -> None:
        """A stage that hangs must not leave the caller in silence for ever."""
        timeout_s = self._services.settings.turn_timeout_s
        await self._clock.sleep(timeout_s)
        if not self._has_words:
            raise TurnTimeoutError(f"there was no answer within {timeout_s:g} s")

    async def _think(self, texts: asyncio.Queue[str | None]) -> None:
        """The model's words, in the pieces in which they will be presented."""
        spoken_text, chunker = SpokenText(), BudgetedChunker(self._budget)
        async with aclosing(self._generate()) as events:
            async for event in events:
                match event:
                    case FirstToken():
                        self._note_first_token(event)
                    case TextDelta():
                        self._note_tokens(event.num_tokens)
                        pieces = [event.text]
                        if self._speaks:
                            words = spoken_text.feed(event.text)
                            pieces = chunker.feed(words, self._clock.now_ns())
                        await self._put_texts(texts, pieces)
                    case GenerationDone():
                        self._note_done(event)
        now_ns = self._clock.now_ns()
        rest = [*chunker.feed(spoken_text.flush(), now_ns), *chunker.flush(now_ns)]
        await self._put_texts(texts, rest)
        await texts.put(None)

    async def _put_texts(self, texts: asyncio.Queue[str | None], pieces: list[str]) -> None:
        for piece in pieces:
            self.trace.mark("first_clause", self._clock.now_ns())
            await texts.put(piece)

    async def _generate(self) -> AsyncGenerator[GenerationEvent, None]:
        """The model's answer; drops the oldest messages until the prompt fits the context."""
        settings = self._services.settings
        params = SamplingParams(
            max_tokens=self.response.max_output_tokens or settings.max_reply_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            repetition_penalty=settings.repetition_penalty,
        )
        messages = self.messages
        self.trace.mark("llm_submit", self._clock.now_ns())
        await self._wait_for_prefill()
        while True:
            self.trace.facts["dropped_messages"] = len(self.messages) - len(messages)
            try:
                async with aclosing(self._services.engine.generate(messages, params)) as events:
                    async for event in events:
                        yield event
                return
            except PromptTooLongError as error:
                shorter = shortened(messages)
                if shorter is None:
                    raise GenerationError(str(error), code=error.code) from error
                messages = shorter
            except LlmError as error:
                raise GenerationError(str(error), code=error.code) from error

    async def _wait_for_prefill(self) -> None:
        """The prompt is being read already; asking beside it would read it twice."""
        if self._prefilled is not None and not self._prefilled.done():
            self.trace.mark("llm_scheduled", self._clock.now_ns())
            await asyncio.wait([self._prefilled])

    async def _voice(
        self, texts: asyncio.Queue[str | None], clauses: asyncio.Queue[Clause | None]
    ) -> None:
        loop = asyncio.get_running_loop()
        rate = self.config.output_format.rate
        resampler = StreamResampler(self._services.synthesizer.sample_rate, rate)
        samples = np.zeros(0, np.float32)
        while (text := await texts.get()) is not None:
            if self._speaks:
                job = partial(self._synthesize, text, resampler)
                begun_ns = self._clock.now_ns()
                samples = await loop.run_in_executor(self._services.workers, job)
                self.trace.note_clause_spoken(self._clock.now_ns() - begun_ns)
            if len(samples):
                self.trace.mark("tts_first_audio", self._clock.now_ns())
            await clauses.put(Clause(text, samples))
        if self._speaks:
            await clauses.put(Clause("", resampler.flush()))
        await clauses.put(None)

    def _synthesize(self, text: str, resampler: StreamResampler) -> Samples:
        """Runs in a worker thread, one clause of this answer at a time."""
        try:
            samples = self._services.synthesizer.synthesize(text, speed=self.config.speed)
        except AudioError as error:
            raise SynthesisError(f"speech synthesis failed: {error}") from error
        return resampler.process(samples)

    async def _present(self, clauses: asyncio.Queue[Clause | None]) -> None:
        """Show and play, once it is certain that the answer is wanted."""
        first = asyncio.create_task(clauses.get())
        try:
            item = None
            await self._released.wait()
            if bridge := await self._bridge(first):
                item = await self._open_item()
                await self._say(item, bridge)
            clause = await first
        finally:
            first.cancel()
        self._budget.answered(self._clock.now_ns())
        self._has_words = True
        item = item or await self._open_item()
        while clause is not None:
            await self._say(item, clause)
            clause = await clauses.get()

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
        return Clause(f"{filler.text} ", filler.samples(self.config.output_format.rate))

    async def _say(self, item: Item, clause: Clause) -> None:
        self._spoken.timeline.append(clause.text, len(clause.samples))
        await self._write(item, clause.text)
        await self._send(item, clause.samples)

    # --- to the client ---

    async def _open_item(self) -> Item:
        part = Part("output_audio" if self._speaks else "output_text", "")
        item = Item(new_id("item"), "assistant", [part], "in_progress")
        self._history.forget_oldest(self.trace.facts.get("dropped_messages", 0))
        previous = self._history.append_own(item)
        if self._speaks:
            self._history.attach_audio(item.id, self._spoken)
        self._item = item
        self.response.output.append(item)
        await self._sink(OutputStarted(self.response.id, item, previous))
        return item

    async def _write(self, item: Item, text: str) -> None:
        if not text:
            return
        part = item.content[0]
        if self._spoken.kept_samples is None:  # else the client has cut it already
            part.text = (part.text or "") + text
        if not self._speaks:
            self.on_audio_started()
        await self._sink(OutputText(self.response.id, item.id, text))

    async def _send(self, item: Item, samples: Samples) -> None:
        """Send audio in pieces of 100 ms, never further ahead of its playout than the lead."""
        fmt = self.config.output_format
        for start in range(0, len(samples), fmt.rate // 10):
            chunk = samples[start : start + fmt.rate // 10]
            if wait_s := self._playout.wait_s(self._clock.now_ns()):
                await self._clock.sleep(wait_s)
            if self._stop_reason is not None:
                return  # woken in the very moment of `stop`, before the cancellation arrived
            await self._sink(OutputAudio(self.response.id, item.id, encode(chunk, fmt)))
            sounds_ns = self._playout.sent(len(chunk), self._clock.now_ns())
            self._spoken.sent_samples += len(chunk)
            if self._spoken.kept_samples is None:
                item.content[0].audio_ms = self._spoken.sent_ms
            self._note_audible(chunk, sounds_ns)

    # --- notes ---

    def _note_first_token(self, event: FirstToken) -> None:
        self.trace.note_first_token(
            received_ns=event.received_ns,
            scheduled_ns=event.scheduled_ns,
            first_token_ns=event.first_token_ns,
            prompt_tokens=event.prompt_tokens,
            cached_tokens=event.cached_tokens,
        )
        self.response.usage = ResponseUsage(event.prompt_tokens, event.cached_tokens, 0)

    def _note_tokens(self, num_tokens: int) -> None:
        usage = self.response.usage
        self.response.usage = ResponseUsage(usage.input_tokens, usage.cached_tokens, num_tokens)
        self.trace.facts["completion_tokens"] = num_tokens

    def _note_done(self, event: GenerationDone) -> None:
        self._note_tokens(event.usage.completion_tokens)
        self.trace.note_generated(
            num_tokens=event.usage.completion_tokens,
            num_steps=event.num_steps,
            finish_reason=event.finish_reason,
            finished_ns=event.finished_ns,
        )
        if event.finish_reason == "length":
            self.response.reason = "max_output_tokens"

    def _note_audible(self, chunk: Samples, sounds_ns: int) -> None:
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
        if self._item is not None:
            self._item.status = "incomplete"
            heard = self._playout.played_samples(self._clock.now_ns())
            # A failed answer is not taken back: the client plays what it has.
            kept = heard if status == "cancelled" else self._spoken.sent_samples
            self._history.cut(self._item.id, kept)

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
        if response.status == "in_progress":
            cut_short = response.reason == "max_output_tokens"
            response.status = "incomplete" if cut_short else "completed"
            if self._item is not None:
                is_cut = self._spoken.kept_samples is not None
                self._item.status = "incomplete" if cut_short or is_cut else "completed"
        if self._item is not None:
            previous = self._history.previous_id(self._item.id)
            await self._sink(OutputDone(response.id, self._item, previous))
        self._complete_trace()

    def _complete_trace(self) -> None:
        trace, response = self.trace, self.response
        trace.reply = (self._item.content[0].text or "") if self._item is not None else ""
        start_ns = min(trace.instants.values(), default=0)
        for percent, name in ((99, "loop_lag_p99_ms"), (100, "loop_lag_max_ms")):
            trace.facts[name] = self._services.loop_lag.percentile_ms(percent, start_ns)
        trace.facts["playout_gap_ms"] = self._playout.gap_ns / 1e6
        trace.facts["reply_audio_s"] = self._spoken.sent_samples / self._spoken.rate
        trace.end(self._outcome(), self._clock.now_ns(), response.reason or "")

    def _outcome(self) -> TurnOutcome:
        match self.response.status:
            case "completed":
                return "answered" if self.trace.reply.strip() else "silent"
            case "incomplete":
                return "incomplete"
            case "failed":
                return "timed_out" if self.response.reason == TurnTimeoutError.code else "failed"
            case _:  # cancelled, or in progress when the call ended
                by_voice = self.response.reason == "turn_detected"
                return "interrupted" if by_voice else "cancelled"
