"""The words of the caller's turn: followed while it goes on, tried early, settled at its end.

While the caller speaks the turn is transcribed again and again, as often as the recogniser has
time; words that two runs agree on are told at once. When the voice pauses, the turn may be over:
transcribing in hope takes the recogniser off the critical path, for if the pause turns out to be
the end, the words are there already.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from app.clock import Clock
from app.conversation.recognition import BusyRecognizerError, Job, Recognition, Urgency
from audio.asr import Transcript
from audio.asr_agreement import Agreement
from audio.frame import SPEECH_RATE, Samples

# Partials: not before so much of a turn is there, and no oftener than that.
_MIN_PARTIAL_S = 0.6
_PARTIAL_EVERY_S = 0.5
# The recogniser may spend one part in so many of its time on partials, all callers together.
_PARTIAL_SHARE = 3.0
# A longer turn costs too much to hear again and again.
_MAX_PARTIAL_S = 20.0


@dataclass(frozen=True, slots=True)
class Settled:
    """A transcript and the instant at which it was there."""

    transcript: Transcript
    at_ns: int


class Transcriber:
    """Transcripts of one caller; the recogniser is shared."""

    def __init__(self, recognition: Recognition, clock: Clock) -> None:
        self._recognition = recognition
        self._clock = clock
        self._early: asyncio.Task[Settled] | None = None
        self._early_job: Job | None = None
        self._early_end: int | None = None
        self._partial: asyncio.Task[None] | None = None
        self._agreement = Agreement()
        self._next_partial_s = _MIN_PARTIAL_S
        self._is_following = False
        self.language: str | None = None
        self.prompt: str | None = None
        self._num_dropped = 0

    # --- while the caller speaks ---

    @property
    def stable_text(self) -> str:
        """The beginning of the turn's words, as far as it will stay."""
        return self._agreement.stable

    def begin_turn(self) -> None:
        """A new turn: nothing of the last one is stable any more."""
        self.drop()
        self._begin_anew()

    def wants_partial(self, turn_samples: int) -> bool:
        """Whether it is time to look at a turn that is ``turn_samples`` long by now."""
        turn_s = turn_samples / SPEECH_RATE
        self._follows(turn_s <= _MAX_PARTIAL_S)
        return (
            self._next_partial_s <= turn_s <= _MAX_PARTIAL_S
            and self._partial is None
            and not self._recognition.is_busy
        )

    def follow(self, samples: Samples) -> None:
        """Look at the turn so far, so that ``stable_text`` grows."""
        self._partial = asyncio.create_task(self._follow(samples))
        self._partial.add_done_callback(self._on_partial_done)

    async def _follow(self, samples: Samples) -> None:
        try:
            transcript = await self._submit(samples, Urgency.PARTIAL).result
        except BusyRecognizerError:
            return  # somebody's turn has ended: that comes first
        cost_s = transcript.took_ms / 1000
        share = _PARTIAL_SHARE * max(1, self._recognition.num_following)
        spacing_s = max(_PARTIAL_EVERY_S, share * cost_s)
        self._next_partial_s = samples.size / SPEECH_RATE + spacing_s
        self._agreement.feed(transcript.text)

    def _on_partial_done(self, task: asyncio.Task[None]) -> None:
        if self._partial is task:
            self._partial = None
        if not task.cancelled() and task.exception() is not None:
            # The end of the turn meets the same failure and reports it.
            self._next_partial_s = float("inf")

    def _follows(self, is_following: bool) -> None:
        self._recognition.num_following += is_following - self._is_following
        self._is_following = is_following

    def _begin_anew(self) -> None:
        self._drop_partial()
        self._follows(False)
        self._agreement = Agreement()
        self._next_partial_s = _MIN_PARTIAL_S

    def _drop_partial(self) -> None:
        if self._partial is not None:
            self._partial.cancel()
            self._partial = None

    # --- when it may be over ---

    def try_early(self, samples: Samples, last_voiced_sample: int) -> asyncio.Task[Settled]:
        """Start transcribing a turn that may be over. The task is cancelled if it is not."""
        self.drop()
        self._drop_partial()
        self._early_end = last_voiced_sample
        self._early_job = self._submit(samples, Urgency.EARLY)
        self._early = asyncio.create_task(self._settled(self._early_job))
        # A failure matters only to whoever settles on this attempt; dropped, it is nobody's.
        self._early.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._early

    def drop(self) -> None:
        """The caller goes on: forget the early transcript, but for what it says of the words."""
        early = self._early
        if early is not None:
            self._num_dropped += 1
            if early.done() and not early.cancelled() and early.exception() is None:
                self._agreement.feed(early.result().transcript.text)
            early.cancel()
        self._early = self._early_job = self._early_end = None

    def take_num_dropped(self) -> int:
        """How many early transcripts were for nothing since the last call."""
        number, self._num_dropped = self._num_dropped, 0
        return number

    def settle(self, samples: Samples, last_voiced_sample: int | None) -> asyncio.Task[Settled]:
        """The turn's transcript, in the making. The early one serves if no voice came after it.

        The task raises RecognitionError.
        """
        early, job, end = self._early, self._early_job, self._early_end
        self._begin_anew()
        if early is not None and job is not None and end == last_voiced_sample:
            self._early = self._early_job = self._early_end = None
            job.urgency = Urgency.FINAL
            return early
        self.drop()
        return asyncio.create_task(self.transcribe(samples))

    async def transcribe(self, samples: Samples) -> Settled:
        """Transcribe ``samples`` float32 [n] at 16 kHz now. Raises RecognitionError."""
        return await self._settled(self._submit(samples, Urgency.FINAL))

    def close(self) -> None:
        """Forget everything."""
        self.drop()
        self._begin_anew()

    def _submit(self, samples: Samples, urgency: Urgency) -> Job:
        return self._recognition.submit(
            samples, urgency, prompt=self.prompt, language=self.language
        )

    async def _settled(self, job: Job) -> Settled:
        return Settled(await job.result, self._clock.now_ns())
