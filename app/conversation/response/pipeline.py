"""One answer: messages -> LLM -> clauses -> speech -> the client, all stages at once.

Three tasks joined by bounded queues. A full queue makes the stage before it wait (overflow rule),
so an answer that is spoken slower than it is written holds only a few clauses of audio.

An answer may be begun before it is certain that the caller has finished: ``start`` sets the stages
to work, and nothing of it reaches client or history until ``run``. ``discard`` forgets it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Literal

import numpy as np

from app.clock import Clock
from app.conversation.events import ResponseStarted, Sink
from app.conversation.history import History
from app.conversation.response.budget import TurnBudget
from app.conversation.response.llm_stream import LlmStream
from app.conversation.response.metrics import TurnRecord
from app.conversation.response.output import Clause, Output
from app.conversation.response.spec import ResponseSpec
from app.conversation.response.tool_loop import ToolLoop
from app.conversation.services import Services
from app.conversation.speech.tts_stream import TtsStream
from app.errors import ServiceError, TurnTimeoutError
from audio.frame import Samples

log = logging.getLogger(__name__)

_NO_SAMPLES: Samples = np.zeros(0, np.float32)
# By then it is judged whether a voice over the answer was meant to stop it.
_HOLD_S = 1.5


class ResponsePipeline:
    """One response, from its request to its last sample.

    ``run`` never raises for what goes wrong inside: the response says how it ended.
    """

    def __init__(
        self,
        services: Services,
        clock: Clock,
        sink: Sink,
        history: History,
        asked: ResponseSpec,
        *,
        prefilled: asyncio.Task[None] | None,
    ) -> None:
        config, response, trace = asked.config, asked.response, asked.trace
        self.config = config
        self.messages = asked.messages
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
        self._asking = LlmStream(services, config, clock, trace, self._budget, prefilled)
        self._held_until_ns = 0
        self._num_samples = 0  # of speech made, sent or not
        self._has_words = False  # the answer has begun, fillers aside
        self._begun = asyncio.Event()
        self._released = asyncio.Event()
        self._record = TurnRecord(response, trace, clock)
        self._output = Output(
            response,
            history,
            sink,
            clock,
            config.output_format,
            services.settings.playout_lead_ms,
            self._on_audible,
        )
        self._tool_loop = ToolLoop(
            services,
            clock,
            config,
            asking=self._asking,
            budget=self._budget,
            output=self._output,
            record=self._record,
            released=self._released,
        )
        self._work: asyncio.Task[None] | None = None
        self._stop_reason: str | None = None

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

    async def until_begun(self) -> None:
        """Wait until something of it can be heard (or read, if it is written), or it has ended."""
        await self._begun.wait()

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
            self._begun.set()
            if not self.has_ended:  # the sink failed, or the task was cancelled in it
                await self.discard()
            if not self.trace.outcome:  # the call ended in the middle of the answer
                self._record.complete(self._output, self._services.loop_lag)

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
        self._record.note_hold()
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
        clauses: asyncio.Queue[Clause | None] = asyncio.Queue(maxsize=4)
        async with self._asking, asyncio.TaskGroup() as stages:
            expiry = stages.create_task(self._expire())
            stages.create_task(self._tool_loop.run(self.messages))
            stages.create_task(self._voice(clauses))
            await stages.create_task(self._present(clauses))
            expiry.cancel()

    async def _expire(self) -> None:
        """A stage that hangs must not leave the caller in silence for ever."""
        timeout_s = self._services.settings.turn_timeout_s
        await self._clock.sleep(timeout_s)
        if not self._has_words and not any(item.call for item in self.response.output):
            raise TurnTimeoutError(f"there was no answer within {timeout_s:g} s")

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

    async def _voice(self, clauses: asyncio.Queue[Clause | None]) -> None:
        """Give the words their sound, if the answer is to be spoken."""
        voicing = TtsStream(self._services, self.config, self._clock, self.trace)
        while (piece := await self._tool_loop.texts.get()) is not None:
            clause = Clause(
                piece.text,
                _NO_SAMPLES,
                piece.part,
                is_last=piece.is_last,
                is_filler=piece.is_filler,
            )
            if not self._speaks:
                await clauses.put(clause)
            elif piece.is_last:
                await clauses.put(replace(clause, samples=self._made(voicing.flush())))
            else:
                await self._say(clause, voicing, clauses)
        await clauses.put(None)

    async def _say(
        self, clause: Clause, voicing: TtsStream, clauses: asyncio.Queue[Clause | None]
    ) -> None:
        """A clause with sound may come in several pieces; the text is in the first of them."""
        async with aclosing(voicing.synthesize_clause(clause.text, self._in_hand_s)) as sounds:
            async for sound in sounds:
                samples = self._made(sound.samples)
                await clauses.put(replace(clause, samples=samples, length=sound.clause_len))
                clause = replace(clause, text="", is_more=True)

    def _made(self, samples: Samples) -> Samples:
        """Note that ``samples`` can be sent."""
        if len(samples):
            self._record.note_speech()
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
        filler = self._services.filler
        wait_s = self._budget.bridge_wait_s(self._clock.now_ns())
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

    def _on_audible(self, chunk: Samples, sounds_ns: int) -> None:
        """``chunk`` was sent; of a written answer there is none, only the instant."""
        if not self._speaks:
            self._begun.set()
            self.on_audio_started()
            return
        rate = self.config.output_format.rate
        self.on_sound(chunk, rate, sounds_ns)
        if self._record.note_sent(chunk, rate, sounds_ns):
            self._begun.set()
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
        self._record.complete(self._output, self._services.loop_lag)
