"""The words of the caller's turn, tried early and settled at its end.

When the voice pauses, the turn may be over. Transcribing at once, in hope, takes the recogniser off
the critical path: if the pause turns out to be the end, the words are there already.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from app.clock import Clock
from app.errors import RecognitionError
from audio.asr import Recognizer, Transcript
from audio.errors import AudioError
from audio.frame import Samples


@dataclass(frozen=True, slots=True)
class Settled:
    """A transcript and the instant at which it was there."""

    transcript: Transcript
    at_ns: int


class Transcriber:
    """Transcripts of one caller; the recogniser and its threads are shared."""

    def __init__(self, recognizer: Recognizer, workers: Executor, clock: Clock) -> None:
        self._recognizer = recognizer
        self._workers = workers
        self._clock = clock
        self._early: asyncio.Task[Settled] | None = None
        self._early_end: int | None = None
        self.language: str | None = None
        self.prompt: str | None = None
        self._num_dropped = 0

    def try_early(self, samples: Samples, last_voiced_sample: int) -> asyncio.Task[Settled]:
        """Start transcribing a turn that may be over. The task is cancelled if it is not."""
        self.drop()
        self._early_end = last_voiced_sample
        self._early = asyncio.create_task(self.transcribe(samples))
        # A failure matters only to whoever settles on this attempt; dropped, it is nobody's.
        self._early.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._early

    def drop(self) -> None:
        """The caller goes on: forget the early transcript."""
        if self._early is not None:
            self._num_dropped += 1
            self._early.cancel()
        self._early = self._early_end = None

    def take_num_dropped(self) -> int:
        """How many early transcripts were for nothing since the last call."""
        number, self._num_dropped = self._num_dropped, 0
        return number

    def settle(self, samples: Samples, last_voiced_sample: int | None) -> asyncio.Task[Settled]:
        """The turn's transcript, in the making. The early one serves if no voice came after it.

        The task raises RecognitionError.
        """
        early, end = self._early, self._early_end
        if early is not None and end == last_voiced_sample:
            self._early = self._early_end = None
            return early
        self.drop()
        return asyncio.create_task(self.transcribe(samples))

    async def transcribe(self, samples: Samples) -> Settled:
        """Transcribe ``samples`` float32 [n] at 16 kHz now. Raises RecognitionError."""
        loop = asyncio.get_running_loop()
        job = partial(
            self._recognizer.transcribe, samples, prompt=self.prompt, language=self.language
        )
        try:
            transcript = await loop.run_in_executor(self._workers, job)
        except AudioError as error:
            raise RecognitionError(f"speech recognition failed: {error}") from error
        return Settled(transcript, self._clock.now_ns())
