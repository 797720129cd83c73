"""One recogniser for all callers: who is served next, and who is turned away.

The recogniser works on one piece of audio at a time. The end of a turn goes before a turn that may
have ended, that before the question when words were said, and that before a look at a turn that is
going on; within a kind, first come, first served. Work whose result was cancelled is given up where
the recogniser can, so that the next one waits less. A caller has at most one job of each kind in
the queue: nobody can crowd out the others.
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
from audio.asr import Recognizer, Transcript
from audio.asr_words import WordTime
from audio.errors import AudioError
from audio.frame import SPEECH_RATE, Samples

T = TypeVar("T")


class Urgency(IntEnum):
    """The smaller, the sooner."""

    FINAL = 0
    EARLY = 1
    WORDS = 2
    PARTIAL = 3


class BusyRecognizerError(RecognitionError):
    """Too many callers wait for the recogniser already."""

    code = "recognizer_busy"


@dataclass(slots=True, eq=False)
class Job(Generic[T]):
    """One piece of audio, of so many samples, on its way. ``work`` is what is done with it, in a
    worker thread. ``urgency`` may be raised while it waits."""

    work: Callable[[], T]
    num_samples: int
    urgency: Urgency
    serial: int
    result: asyncio.Future[T]

    @property
    def rank(self) -> tuple[int, int]:
        """Who is before whom."""
        return self.urgency, self.serial


class Recognition:
    """The queue. Everything but the recogniser's own work happens on the event loop."""

    def __init__(self, recognizer: Recognizer, workers: Executor, max_waiting: int = 64) -> None:
        self._recognizer = recognizer
        self._workers = workers
        self._max_waiting = max_waiting
        self._waiting: list[Job[Any]] = []
        self._running: Job[Any] | None = None
        self._serial = 0
        self.num_refused = 0
        self.num_following = 0
        """Callers whose turn is looked at while it goes on."""

    @property
    def num_waiting(self) -> int:
        """Jobs that are in the queue and not begun."""
        return len(self._waiting)

    @property
    def is_busy(self) -> bool:
        """A new job would have to wait."""
        return self._running is not None

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
        )
        return self._queue(work, len(samples), urgency)

    def locate(self, transcript: Transcript) -> Job[tuple[WordTime, ...]]:
        """Queue the question when the words of ``transcript`` were said, as ``submit`` does."""
        work = partial(self._recognizer.locate, transcript)
        return self._queue(work, round(transcript.audio_s * SPEECH_RATE), Urgency.WORDS)

    def _queue(self, work: Callable[..., T], num_samples: int, urgency: Urgency) -> Job[T]:
        self._serial += 1
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        wanted_work = partial(work, is_wanted=lambda: not result.cancelled())
        job = Job(wanted_work, num_samples, urgency, self._serial, result)
        result.add_done_callback(partial(self._on_done, job))
        self._waiting.append(job)
        running = self._running
        if running is not None and running.urgency is Urgency.PARTIAL and urgency < running.urgency:
            running.result.cancel()  # a look at a turn that goes on can be had again
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
        self._waiting.remove(job)
        self._running = job
        running = asyncio.get_running_loop().run_in_executor(self._workers, job.work)
        running.add_done_callback(partial(self._on_transcribed, job))

    def _on_transcribed(self, job: Job[T], running: asyncio.Future[T]) -> None:
        self._running = None
        error = None if running.cancelled() else running.exception()
        if not job.result.done():
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
