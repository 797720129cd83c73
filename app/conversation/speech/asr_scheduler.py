"""One recogniser for all callers: who is served next, and who is turned away.

The recogniser works on one piece of audio at a time. The end of a turn goes before a turn that may
have ended, that before the question when words were said, that before a look at a turn that is
going on, and all of them before a piece of a file; within a kind, first come, first served. Work
whose result was cancelled is given up where the recogniser can, so that the next one waits less; so
is a piece of a file when somebody who speaks comes, and it is done again later. While somebody
speaks, whose words will be wanted at once, none is begun, unless it has waited long. A caller, or a
file, has at most one job of each kind in the queue: nobody can crowd out the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, Generic, TypeVar

from app.errors import RecognitionError
from audio.asr import Recognizer, Transcript, WordTime
from audio.errors import AudioError, NotWantedError
from audio.frame import SPEECH_RATE, Samples

T = TypeVar("T")

# A piece of a file waits so long for a moment in which nobody speaks.
_FILE_PATIENCE_S = 2.0


class Urgency(IntEnum):
    """The smaller, the sooner."""

    FINAL = 0
    EARLY = 1
    WORDS = 2
    PARTIAL = 3
    FILE = 4


class BusyRecognizerError(RecognitionError):
    """Too many callers wait for the recogniser already."""

    code = "recognizer_busy"


@dataclass(slots=True, eq=False)
class Job(Generic[T]):
    """One piece of audio, of so many samples, on its way. ``work`` is what is done with it, in a
    worker thread; it is given a way to ask whether to go on. ``urgency`` may be raised while it
    waits, ``queued_s`` (of the loop's clock) is when it began to. ``gives_way``: it is running, and
    shall be done again later."""

    work: Callable[..., T]
    num_samples: int
    urgency: Urgency
    serial: int
    result: asyncio.Future[T]
    queued_s: float
    gives_way: bool = False

    @property
    def is_wanted(self) -> bool:
        """Whether to go on with it now."""
        return not self.result.cancelled() and not self.gives_way

    @property
    def rank(self) -> tuple[int, int]:
        """Who is before whom."""
        return self.urgency, self.serial


class AsrScheduler:
    """The queue. Everything but the recogniser's own work happens on the event loop."""

    def __init__(self, recognizer: Recognizer, workers: Executor, max_waiting: int = 64) -> None:
        self._recognizer = recognizer
        self._workers = workers
        self._max_waiting = max_waiting
        self._waiting: list[Job[Any]] = []
        self._running: Job[Any] | None = None
        self._serial = 0
        self.num_refused = 0
        """Jobs that gave way to others in a full queue, since the start."""
        self._num_following = 0
        self._retry: asyncio.TimerHandle | None = None

    @property
    def languages(self) -> tuple[str, ...]:
        """The codes of those that the recogniser knows, in order."""
        return self._recognizer.languages

    @property
    def num_following(self) -> int:
        """Callers whose turn is looked at while it goes on."""
        return self._num_following

    def note_following(self, change: int) -> None:
        """So many more callers, or less, are followed from now on."""
        self._num_following += change
        self._begin_next()

    @property
    def num_waiting(self) -> int:
        """Jobs of those who speak that are in the queue and not begun."""
        return sum(job.urgency is not Urgency.FILE for job in self._waiting)

    @property
    def is_busy(self) -> bool:
        """A new job of somebody who speaks would have to wait."""
        return self._running is not None and self._running.urgency is not Urgency.FILE

    def submit(
        self,
        samples: Samples,
        urgency: Urgency,
        *,
        prompt: str | None = None,
        language: str | None = None,
        keeps_sound: bool = False,
    ) -> Job[Transcript]:
        """Queue ``samples`` float32 [n] at 16 kHz; await the job's ``result``, or cancel it.

        ``keeps_sound``: the words will have to be located. The result raises RecognitionError;
        BusyRecognizerError when the queue is full. The least urgent job, if need be this one, gives
        way.
        """
        work = partial(
            self._recognizer.transcribe,
            samples,
            prompt=prompt,
            language=language,
            keeps_sound=keeps_sound,
            is_brief=urgency is Urgency.FILE,
        )
        return self._queue(work, len(samples), urgency)

    def locate(
        self, transcript: Transcript, urgency: Urgency = Urgency.WORDS
    ) -> Job[tuple[WordTime, ...]]:
        """Queue the question when the words of ``transcript`` were said, as ``submit`` does."""
        work = partial(self._recognizer.locate, transcript)
        return self._queue(work, round(transcript.audio_s * SPEECH_RATE), urgency)

    def _queue(self, work: Callable[..., T], num_samples: int, urgency: Urgency) -> Job[T]:
        self._serial += 1
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        job = Job(work, num_samples, urgency, self._serial, result, loop.time())
        result.add_done_callback(partial(self._on_done, job))
        self._waiting.append(job)
        running = self._running
        if running is not None and urgency < running.urgency:
            if running.urgency is Urgency.PARTIAL:
                running.result.cancel()  # a look at a turn that goes on can be had again
            running.gives_way = running.urgency is Urgency.FILE
        self._begin_next()
        if len(self._waiting) > self._max_waiting:
            self._refuse(max(self._waiting, key=lambda waiting: waiting.rank))
        return job

    def _refuse(self, job: Job[Any]) -> None:
        self.num_refused += 1
        self._waiting.remove(job)
        job.result.set_exception(
            BusyRecognizerError(
                f"speech recognition is overloaded: {self.num_waiting} turns wait already"
            )
        )

    def _on_done(self, job: Job[T], result: asyncio.Future[T]) -> None:
        if job in self._waiting:  # cancelled before its turn came
            self._waiting.remove(job)
        if not result.cancelled():
            result.exception()  # a failure matters only to whoever still wants the words

    def _begin_next(self) -> None:
        if self._running is not None or not self._waiting:
            return
        job = min(self._waiting, key=lambda waiting: waiting.rank)
        if job.urgency is Urgency.FILE and self._must_wait(job):
            return
        self._waiting.remove(job)
        self._running = job
        work = partial(job.work, is_wanted=lambda: job.is_wanted)
        running = asyncio.get_running_loop().run_in_executor(self._workers, work)
        running.add_done_callback(partial(self._on_transcribed, job))

    def _must_wait(self, job: Job[Any]) -> bool:
        """Whether somebody speaks and ``job``, a piece of a file, can still wait; it is tried again
        when nobody does, or when it cannot."""
        loop = asyncio.get_running_loop()
        left_s = job.queued_s + _FILE_PATIENCE_S - loop.time()
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if not self._num_following or left_s <= 0:
            return False
        self._retry = loop.call_later(left_s, self._begin_next)
        return True

    def _on_transcribed(self, job: Job[T], running: asyncio.Future[T]) -> None:
        self._running = None
        error = None if running.cancelled() else running.exception()
        if job.gives_way and isinstance(error, NotWantedError) and not job.result.done():
            job.gives_way = False
            job.queued_s = asyncio.get_running_loop().time()
            self._waiting.append(job)
        elif not job.result.done():
            if running.cancelled():
                job.result.cancel()
            elif isinstance(error, AudioError):
                failure = RecognitionError(f"speech recognition failed: {error}")
                failure.__cause__ = error
                job.result.set_exception(failure)
            elif error is not None:
                job.result.set_exception(error)
            else:
                job.result.set_result(running.result())
        self._begin_next()
