"""The words of the caller's turn: followed while it goes on, tried early, settled at its end.

While the caller speaks the turn is transcribed again and again, as often as the recogniser has
time; words that two runs agree on are told at once. When the voice pauses, the turn may be over:
transcribing in hope takes the recogniser off the critical path, for if the pause turns out to be
the end, the words are there already.

The best moment for a look is a dip: a few hundredths of a second without sound. If it was the end,
that look has heard all of the voice, long before the VAD lets go of it, and serves as the early
transcript; if not, it is as good as any other look.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from app.clock import Clock
from app.conversation.speech.asr_scheduler import AsrScheduler, BusyRecognizerError, Job, Urgency
from audio.asr import Agreement, Transcript
from audio.endpointing import find_dip, find_voice_end
from audio.frame import SPEECH_RATE, Samples

# Partials: not before so much of a turn is there, and no oftener than that.
_MIN_PARTIAL_S = 0.6
_PARTIAL_EVERY_S = 0.5
# The recogniser may spend one part in so many of its time on partials, all callers together.
_PARTIAL_SHARE = 3.0
# A longer turn costs too much to hear again and again.
_MAX_PARTIAL_S = 20.0
# Silence that makes a dip: stops inside a word close the mouth for 50 to 100 ms, so it is often
# none, but a shorter look is a look too. A look in a dip has heard the voice's end and a bit more.
_DIP_SAMPLES = SPEECH_RATE * 60 // 1000
_BEHIND_VOICE_SAMPLES = SPEECH_RATE * 30 // 1000
# Looks in dips may take up to half of the recogniser's time, all callers together: this many times
# their cost lies between them.
_DIP_SHARE = 1.0


@dataclass(frozen=True, slots=True)
class FinalTranscript:
    """A transcript and the instant at which it was there."""

    transcript: Transcript
    at_ns: int


class StreamingTranscriber:
    """Transcripts of one caller; the recogniser is shared."""

    def __init__(self, recognition: AsrScheduler, clock: Clock) -> None:
        self._recognition = recognition
        self._clock = clock
        self._early: asyncio.Task[FinalTranscript] | None = None
        self._early_job: Job[Transcript] | None = None
        self._early_end: int | None = None
        self._partial: asyncio.Task[None] | None = None
        self._look: Job[Transcript] | None = None  # the latest partial of this turn
        self._next_dip_s = _MIN_PARTIAL_S
        self._agreement = Agreement()
        self._next_partial_s = _MIN_PARTIAL_S
        self._is_following = False
        self.language: str | None = None
        self.prompt: str | None = None
        self.keeps_sound = False
        """When the words were said will be asked."""
        self._num_dropped = 0

    # --- while the caller speaks ---

    @property
    def stable_text(self) -> str:
        """The beginning of the turn's words, as far as it will stay."""
        return self._agreement.stable

    def begin_turn(self) -> None:
        """A new turn: nothing of the last one is stable any more."""
        self.drop()
        self._forget_looks()

    def wants_partial(self, turn_samples: int) -> bool:
        """Whether it is time to look at a turn that is ``turn_samples`` long by now."""
        turn_s = turn_samples / SPEECH_RATE
        self._follows(turn_s <= _MAX_PARTIAL_S)
        return (
            self._next_partial_s <= turn_s <= _MAX_PARTIAL_S
            and self._partial is None
            and not self._recognition.is_busy
        )

    def wants_dip(self, turn_samples: int) -> bool:
        """Whether a look would be welcome if the voice dips now."""
        is_ours = self._partial is not None
        return self._next_dip_s <= turn_samples / SPEECH_RATE <= _MAX_PARTIAL_S and (
            is_ours or not self._recognition.is_busy
        )

    def follow_dip(self, samples: Samples) -> None:
        """Look at the turn so far if its voice dips at the end, unless that was done already."""
        quiet = find_dip(samples)
        if quiet < _DIP_SAMPLES or self._look_behind(samples.size - quiet) is not None:
            return
        self._drop_partial()  # it has heard less
        self.follow(samples)

    def follow(self, samples: Samples) -> None:
        """Look at the turn so far, so that ``stable_text`` grows."""
        self._look = self._submit(samples, Urgency.PARTIAL)
        self._partial = asyncio.create_task(self._follow(self._look, self._agreement))
        self._partial.add_done_callback(self._on_partial_done)

    async def _follow(self, look: Job[Transcript], agreement: Agreement) -> None:
        try:
            transcript = await look.result
        except BusyRecognizerError:
            return  # somebody's turn has ended: that comes first
        if agreement is not self._agreement:
            return  # so has this one
        cost_s = transcript.took_ms / 1000
        num_callers = max(1, self._recognition.num_following)
        turn_s = look.num_samples / SPEECH_RATE
        spacing_s = max(_PARTIAL_EVERY_S, _PARTIAL_SHARE * num_callers * cost_s)
        self._next_partial_s = turn_s + spacing_s
        self._next_dip_s = turn_s + (1 + _DIP_SHARE * num_callers) * cost_s
        agreement.feed(transcript.text)

    def _on_partial_done(self, task: asyncio.Task[None]) -> None:
        if self._partial is task:
            self._partial = None
        if not task.cancelled() and task.exception() is not None:
            # The end of the turn meets the same failure and reports it.
            self._next_partial_s = self._next_dip_s = float("inf")

    def _look_behind(self, voice_end: int) -> Job[Transcript] | None:
        """The look that has heard the voice to its end, made or in the making; None: there is none.

        ``voice_end`` counts in samples of the turn.
        """
        look = self._look
        if look is None or look.num_samples < voice_end + _BEHIND_VOICE_SAMPLES:
            return None
        done = look.result
        is_void = done.cancelled() or (done.done() and done.exception() is not None)
        return None if is_void else look

    def _follows(self, is_following: bool) -> None:
        if is_following != self._is_following:
            self._recognition.note_following(is_following - self._is_following)
        self._is_following = is_following

    def _drop_partial(self) -> None:
        if self._partial is not None:
            self._partial.cancel()
            self._partial = None

    def _forget_looks(self) -> None:
        self._follows(False)
        self._drop_partial()
        self._look = None
        self._agreement = Agreement()
        self._next_partial_s = self._next_dip_s = _MIN_PARTIAL_S

    # --- when it may be over ---

    def try_early(
        self, samples: Samples, last_voiced_sample: int, voiced_len: int
    ) -> asyncio.Task[FinalTranscript]:
        """Start transcribing a turn that may be over. The task is cancelled if it is not.

        ``samples``: the turn, of which the VAD calls the first ``voiced_len`` voice. A look that
        has heard all of the voice serves.
        """
        self.drop()
        look = self._look_behind(find_voice_end(samples, voiced_len))
        if look is None:
            self._drop_partial()
            look = self._submit(samples, Urgency.EARLY)
        else:
            look.urgency = min(look.urgency, Urgency.EARLY)
        self._early_end = last_voiced_sample
        self._early_job = look
        self._early = asyncio.create_task(self._settled(self._early_job))
        # A failure matters only to whoever settles on this attempt; dropped, it is nobody's.
        self._early.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._early

    def drop(self) -> None:
        """The caller goes on: forget the early transcript, but for what it says of the words."""
        early = self._early
        if early is not None:
            self._num_dropped += 1
            is_look = self._early_job is self._look  # its words are taken already
            is_heard = early.done() and not early.cancelled() and early.exception() is None
            if is_heard and not is_look:
                self._agreement.feed(early.result().transcript.text)
            early.cancel()
            if is_look:
                self._partial = None  # cancelled with it
        self._early = self._early_job = self._early_end = None

    def take_num_dropped(self) -> int:
        """How many early transcripts were for nothing since the last call."""
        number, self._num_dropped = self._num_dropped, 0
        return number

    def has_early(self, last_voiced_sample: int | None) -> bool:
        """Whether the early transcript will do for a turn whose voice ended there."""
        return self._early is not None and self._early_end == last_voiced_sample

    def settle(
        self, samples: Samples, last_voiced_sample: int | None
    ) -> asyncio.Task[FinalTranscript]:
        """The turn's transcript, in the making. The early one serves if no voice came after it.

        The task raises RecognitionError.
        """
        early, job = self._early, self._early_job
        if early is not None and job is not None and self.has_early(last_voiced_sample):
            if job is self._look:
                self._partial = None  # else its words would be cancelled
            self._forget_looks()
            self._early = self._early_job = self._early_end = None
            job.urgency = Urgency.FINAL
            return early
        self._forget_looks()
        self.drop()
        return asyncio.create_task(self.transcribe(samples))

    async def transcribe(self, samples: Samples) -> FinalTranscript:
        """Transcribe ``samples`` float32 [n] at 16 kHz now. Raises RecognitionError."""
        return await self._settled(self._submit(samples, Urgency.FINAL))

    def close(self) -> None:
        """Forget everything."""
        self.drop()
        self._forget_looks()

    def _submit(self, samples: Samples, urgency: Urgency) -> Job[Transcript]:
        return self._recognition.submit(
            samples,
            urgency,
            prompt=self.prompt,
            language=self.language,
            keeps_sound=self.keeps_sound,
        )

    async def _settled(self, job: Job[Transcript]) -> FinalTranscript:
        return FinalTranscript(await job.result, self._clock.now_ns())
