"""Priority queue in front of the shared speech recogniser.

The recogniser runs one job at a time, in the order of `AsrPriority`, and first come, first served
within a priority. Cancelled jobs are abandoned between steps. A running job of a file is preempted
by any job of a live turn and repeated later; while anybody speaks none is started, unless it has
waited for long. A caller, or a file, has at most one job of each priority in the queue, so none can
crowd out the others. A full queue rejects the job that would be served last.
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
from audio.errors import AbandonedError, AudioError
from audio.frame import SPEECH_RATE, Samples
from audio.vad import VadWindows

T = TypeVar("T")

# A job of a file waits this long for a moment in which nobody speaks.
_MAX_FILE_DELAY_S = 2.0


class AsrPriority(IntEnum):
    """Smaller is sooner: final and early transcripts, word timestamps, partials, files."""

    FINAL = 0
    EARLY = 1
    WORDS = 2
    PARTIAL = 3
    FILE = 4


class BusyRecognizerError(RecognitionError):
    """The queue is full."""

    code = "recognizer_busy"


@dataclass(slots=True, eq=False)
class Job(Generic[T]):
    """A piece of audio in the queue.

    ``work`` runs in a worker thread and polls ``is_wanted``. ``priority`` may be raised while the
    job waits, since ``queued_s`` (of the loop's clock). ``is_preempted``: running, to be abandoned
    and repeated later.
    """

    work: Callable[..., T]
    num_samples: int
    priority: AsrPriority
    serial: int
    result: asyncio.Future[T]
    queued_s: float
    is_preempted: bool = False

    @property
    def is_wanted(self) -> bool:
        """False when the job should be abandoned."""
        return not self.result.cancelled() and not self.is_preempted

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key of the queue."""
        return self.priority, self.serial


class AsrScheduler:
    """The queue. Only the recogniser's work runs outside of the event loop."""

    def __init__(self, recognizer: Recognizer, workers: Executor, max_waiting: int = 64) -> None:
        self._recognizer = recognizer
        self._workers = workers
        self._max_waiting = max_waiting
        self._waiting: list[Job[Any]] = []
        self._running: Job[Any] | None = None
        self._serial = 0
        self.num_refused = 0
        """Jobs rejected by a full queue, since the start."""
        self._num_following = 0
        self._retry: asyncio.TimerHandle | None = None

    @property
    def languages(self) -> tuple[str, ...]:
        """Language codes that the recogniser knows, sorted."""
        return self._recognizer.languages

    @property
    def num_live_turns(self) -> int:
        """Turns in progress that get partial transcripts."""
        return self._num_following

    def change_num_live_turns(self, change: int) -> None:
        """Add ``change``, which may be negative, to the number of live turns."""
        self._num_following += change
        self._start_next()

    @property
    def num_waiting(self) -> int:
        """Jobs of live turns that wait."""
        return sum(job.priority is not AsrPriority.FILE for job in self._waiting)

    @property
    def is_busy(self) -> bool:
        """True when a new job of a live turn would have to wait."""
        return self._running is not None and self._running.priority is not AsrPriority.FILE

    def submit(
        self,
        samples: Samples,
        priority: AsrPriority,
        *,
        windows: VadWindows | None = None,
        prompt: str | None = None,
        language: str | None = None,
        keep_encoder_output: bool = False,
    ) -> Job[Transcript]:
        """Queue the transcription of ``samples`` float32 [n] at 16 kHz.

        Await the job's ``result``, or cancel it. ``windows``: the VAD's of these samples, where a
        stream has them. ``keep_encoder_output``: the words will be aligned. The result raises
        RecognitionError, or BusyRecognizerError when the queue is full and the job the last in it.
        """
        work = partial(
            self._recognizer.transcribe,
            samples,
            windows=windows,
            prompt=prompt,
            language=language,
            keep_encoder_output=keep_encoder_output,
            skip_thorough=priority is AsrPriority.FILE,
        )
        return self._enqueue(work, len(samples), priority)

    def align_words(
        self, transcript: Transcript, priority: AsrPriority = AsrPriority.WORDS
    ) -> Job[tuple[WordTime, ...]]:
        """Queue the alignment of the words of ``transcript``, as ``submit`` does."""
        work = partial(self._recognizer.align_words, transcript)
        return self._enqueue(work, round(transcript.audio_s * SPEECH_RATE), priority)

    def _enqueue(self, work: Callable[..., T], num_samples: int, priority: AsrPriority) -> Job[T]:
        self._serial += 1
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        job = Job(work, num_samples, priority, self._serial, result, loop.time())
        result.add_done_callback(partial(self._on_done, job))
        self._waiting.append(job)
        running = self._running
        if running is not None and priority < running.priority:
            if running.priority is AsrPriority.PARTIAL:
                running.result.cancel()  # a later partial will replace it
            running.is_preempted = running.priority is AsrPriority.FILE
        self._start_next()
        if len(self._waiting) > self._max_waiting:
            self._reject(max(self._waiting, key=lambda waiting: waiting.rank))
        return job

    def _reject(self, job: Job[Any]) -> None:
        self.num_refused += 1
        self._waiting.remove(job)
        job.result.set_exception(
            BusyRecognizerError(
                f"speech recognition is overloaded: {self.num_waiting} turns wait already"
            )
        )

    def _on_done(self, job: Job[T], result: asyncio.Future[T]) -> None:
        if job in self._waiting:  # cancelled before it was started
            self._waiting.remove(job)
        if not result.cancelled():
            result.exception()  # retrieved, so that a failure nobody awaits is not logged

    def _start_next(self) -> None:
        if self._running is not None or not self._waiting:
            return
        job = min(self._waiting, key=lambda waiting: waiting.rank)
        if job.priority is AsrPriority.FILE and self._defer(job):
            return
        self._waiting.remove(job)
        self._running = job
        work = partial(job.work, is_wanted=lambda: job.is_wanted)
        running = asyncio.get_running_loop().run_in_executor(self._workers, work)
        running.add_done_callback(partial(self._on_finished, job))

    def _defer(self, job: Job[Any]) -> bool:
        """True when ``job``, of a file, should wait because somebody speaks. It is tried again when
        nobody does, or when it has waited for the maximum delay."""
        loop = asyncio.get_running_loop()
        left_s = job.queued_s + _MAX_FILE_DELAY_S - loop.time()
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if not self._num_following or left_s <= 0:
            return False
        self._retry = loop.call_later(left_s, self._start_next)
        return True

    def _on_finished(self, job: Job[T], running: asyncio.Future[T]) -> None:
        self._running = None
        error = None if running.cancelled() else running.exception()
        if job.is_preempted and isinstance(error, AbandonedError) and not job.result.done():
            job.is_preempted = False
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
        self._start_next()
