"""When the words of the caller's turns were said, for clients that ask.

The transcript decides what is answered; this comes behind everything that somebody waits for. It
needs the same cores as the answer, so it is begun when the answer sounds, and in the recogniser's
queue only looks at turns that go on come later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import asdict

from app.clock import Clock
from app.conversation.events import Sink, SpokenWord, TranscriptWords, TranscriptWordsFailed
from app.conversation.input.audio_input import RATE
from app.conversation.input.user_turn import CommittedTurn
from app.conversation.response.pipeline import ResponsePipeline
from app.conversation.speech.asr_scheduler import AsrScheduler
from app.conversation.tasks import Tasks
from app.errors import RecognitionError
from audio.asr import WordTime

log = logging.getLogger(__name__)

# How long the record of a turn waits for them, once its answer is sent.
_RECORD_WAITS_S = 0.25


class WordTimes:
    """Of one conversation."""

    def __init__(self, recognition: AsrScheduler, sink: Sink, clock: Clock, tasks: Tasks) -> None:
        self._recognition = recognition
        self._sink = sink
        self._clock = clock
        self._tasks = tasks
        self._due: dict[str, asyncio.Task[None]] = {}  # by the items' ids
        self._withdrawn: set[str] = set()

    def begin(self, heard: CommittedTurn, answer: asyncio.Future[ResponsePipeline | None]) -> None:
        """Tell client and trace when the words of ``heard``, which are settled, were said; once
        ``answer`` is known and sounds, if there is one."""
        item_id = heard.item.id
        if item_id in self._withdrawn:
            return
        heard.trace.words = []
        self._due[item_id] = self._tasks.start(self._tell(heard, answer))
        self._due[item_id].add_done_callback(lambda _: self._due.pop(item_id, None))

    def withdraw(self, item_ids: Iterable[str]) -> None:
        """These turns were none."""
        for item_id in item_ids:
            self._withdrawn.add(item_id)
            if item_id in self._due:
                self._due[item_id].cancel()

    async def until_told(self) -> None:
        """Wait for those that are due, but not for long."""
        if self._due:
            limit = asyncio.create_task(self._clock.sleep(_RECORD_WAITS_S))
            told = asyncio.create_task(_all_done(list(self._due.values())))
            try:
                await asyncio.wait({limit, told}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                limit.cancel()
                told.cancel()

    async def _tell(
        self, heard: CommittedTurn, answer: asyncio.Future[ResponsePipeline | None]
    ) -> None:
        if (turn := await answer) is not None:
            await turn.until_begun()
        try:
            found = await self._located(heard)
        except RecognitionError as error:
            await self._sink(TranscriptWordsFailed(heard.item.id, error.code, error.message))
            return
        words = placed(found, heard)
        assert heard.trace.words is not None, "set at the beginning"
        heard.trace.words += map(asdict, words)
        await self._sink(TranscriptWords(heard.item.id, words))

    async def _located(self, heard: CommittedTurn) -> tuple[WordTime, ...]:
        job = self._recognition.locate(heard.settling.result().transcript)
        try:
            return await job.result
        except RecognitionError:
            raise
        except Exception as error:
            log.error("the words of a turn were not found in its sound", exc_info=error)
            message = "internal error; the server's log has the details"
            raise RecognitionError(message) from error


async def _all_done(tasks: list[asyncio.Task[None]]) -> None:
    """Whoever is cancelled in waiting leaves them running."""
    await asyncio.wait(tasks)


def placed(found: Iterable[WordTime], heard: CommittedTurn) -> tuple[SpokenWord, ...]:
    """Milliseconds of the session's input audio, inside the turn."""
    first_ms, last_ms = (
        sample * 1000 // RATE for sample in (heard.start_sample, heard.voice_end_sample)
    )

    def at_ms(second: float) -> int:
        exact = heard.words_from * 1000 / RATE + second * 1000
        return min(max(round(exact), first_ms), last_ms)

    return tuple(SpokenWord(word.word, at_ms(word.start_s), at_ms(word.end_s)) for word in found)
