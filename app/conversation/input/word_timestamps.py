"""Word timestamps of user turns, for clients that ask for them.

Alignment needs the same cores as the response, so it starts when the response plays; in the
recogniser's queue only partials and files have a lower priority.
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

# The trace of a turn waits this long for its timestamps, once its response is sent.
_MAX_WAIT_S = 0.25


class WordTimestamps:
    """Word timestamps of one conversation."""

    def __init__(self, recognition: AsrScheduler, sink: Sink, clock: Clock, tasks: Tasks) -> None:
        self._recognition = recognition
        self._sink = sink
        self._clock = clock
        self._tasks = tasks
        self._due: dict[str, asyncio.Task[None]] = {}  # by the items' ids
        self._discarded: set[str] = set()

    def start(self, heard: CommittedTurn, answer: asyncio.Future[ResponsePipeline | None]) -> None:
        """Align the final transcript of ``heard`` and send the result to client and trace.

        Waits for ``answer``, and until that plays, if there is one.
        """
        item_id = heard.item.id
        if item_id in self._discarded:
            return
        heard.trace.words = []
        self._due[item_id] = self._tasks.start(self._send(heard, answer))
        self._due[item_id].add_done_callback(lambda _: self._due.pop(item_id, None))

    def discard(self, item_ids: Iterable[str]) -> None:
        """Drop the timestamps of turns that were merged into a later one."""
        for item_id in item_ids:
            self._discarded.add(item_id)
            if item_id in self._due:
                self._due[item_id].cancel()

    async def wait_until_sent(self) -> None:
        """Wait for timestamps in progress, for at most 0.25 s."""
        if self._due:
            limit = asyncio.create_task(self._clock.sleep(_MAX_WAIT_S))
            told = asyncio.create_task(_all_done(list(self._due.values())))
            try:
                await asyncio.wait({limit, told}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                limit.cancel()
                told.cancel()

    async def _send(
        self, heard: CommittedTurn, answer: asyncio.Future[ResponsePipeline | None]
    ) -> None:
        if (turn := await answer) is not None:
            await turn.until_begun()
        try:
            found = await self._align(heard)
        except RecognitionError as error:
            await self._sink(TranscriptWordsFailed(heard.item.id, error.code, error.message))
            return
        words = to_session_ms(found, heard)
        assert heard.trace.words is not None, "set at the beginning"
        heard.trace.words += map(asdict, words)
        await self._sink(TranscriptWords(heard.item.id, words))

    async def _align(self, heard: CommittedTurn) -> tuple[WordTime, ...]:
        job = self._recognition.align_words(heard.transcript_task.result().transcript)
        try:
            return await job.result
        except RecognitionError:
            raise
        except Exception as error:
            log.error("the words of a turn were not found in its sound", exc_info=error)
            message = "internal error; the server's log has the details"
            raise RecognitionError(message) from error


async def _all_done(tasks: list[asyncio.Task[None]]) -> None:
    """Cancelling the wait leaves the tasks running."""
    await asyncio.wait(tasks)


def to_session_ms(found: Iterable[WordTime], heard: CommittedTurn) -> tuple[SpokenWord, ...]:
    """Word times in ms of the session's input audio, clipped to the turn."""
    first_ms, last_ms = (
        sample * 1000 // RATE for sample in (heard.start_sample, heard.last_voiced_sample)
    )

    def at_ms(second: float) -> int:
        exact = heard.transcript_start_sample * 1000 / RATE + second * 1000
        return min(max(round(exact), first_ms), last_ms)

    return tuple(SpokenWord(word.word, at_ms(word.start_s), at_ms(word.end_s)) for word in found)
