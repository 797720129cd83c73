"""Streaming transcription of a user turn: partial hypotheses, an early and a final transcript.

While the caller speaks, the turn is transcribed again as often as the recogniser has time; the
words that two consecutive hypotheses agree on are stable. When speech pauses, the turn may be over:
an early transcript is started at once, so that it is ready if the pause turns out to be the end.

The best moment for a partial is a short pause of a few hundredths of a second. If it is the end of
the turn, that partial covers all of the speech, long before the VAD reports silence, and serves as
the early transcript; otherwise it is as good as any other.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from app.clock import Clock
from app.conversation.input.turn_audio import TurnAudio
from app.conversation.speech.asr_scheduler import (
    AsrPriority,
    AsrScheduler,
    BusyRecognizerError,
    Job,
)
from audio.asr import LocalAgreement, Transcript
from audio.endpointing import trailing_silence_len
from audio.frame import SPEECH_RATE

# Partials: first and minimum spacing, in seconds of the turn.
_MIN_PARTIAL_S = 0.6
_PARTIAL_EVERY_S = 0.5
# Partials of all callers together take at most one part in (1 + this) of the recogniser's time.
_PARTIAL_SHARE = 3.0
# Repeated transcription of a longer turn costs too much.
_MAX_PARTIAL_S = 20.0
# Silence that counts as a short pause. Plosives close the mouth for 50 to 100 ms, so it is often
# none; that partial is still useful. A partial covers the speech if it reaches past its offset.
_PAUSE_SAMPLES = SPEECH_RATE * 60 // 1000
_PAST_OFFSET_SAMPLES = SPEECH_RATE * 30 // 1000
# Partials in pauses of all callers together may take half of the recogniser's time: this many times
# the cost of one lies between two of them.
_PAUSE_PARTIAL_SHARE = 1.0


@dataclass(frozen=True, slots=True)
class FinalTranscript:
    """A transcript and the time at which it was ready."""

    transcript: Transcript
    ready_ns: int


class StreamingTranscriber:
    """Transcripts of one caller's turns; the recogniser is shared."""

    def __init__(self, recognition: AsrScheduler, clock: Clock) -> None:
        self._recognition = recognition
        self._clock = clock
        self._early: asyncio.Task[FinalTranscript] | None = None
        self._early_job: Job[Transcript] | None = None
        self._early_end: int | None = None
        self._partial: asyncio.Task[None] | None = None
        self._partial_job: Job[Transcript] | None = None  # the latest of this turn, done or not
        self._next_pause_partial_s = _MIN_PARTIAL_S
        self._agreement = LocalAgreement()
        self._next_partial_s = _MIN_PARTIAL_S
        self._is_live = False
        self.language: str | None = None
        self.prompt: str | None = None
        self.keep_encoder_output = False
        """Word timestamps will be asked for."""
        self._num_discarded = 0

    # --- partial hypotheses ---

    @property
    def stable_text(self) -> str:
        """The stable prefix of the turn's transcript."""
        return self._agreement.stable

    def begin_turn(self) -> None:
        """Start a new turn without any stable text."""
        self.discard_early()
        self._discard_partials()

    def wants_partial(self, turn_samples: int) -> bool:
        """True when a partial of a turn of ``turn_samples`` is due and the recogniser is free."""
        turn_s = turn_samples / SPEECH_RATE
        self._set_live(turn_s <= _MAX_PARTIAL_S)
        return (
            self._next_partial_s <= turn_s <= _MAX_PARTIAL_S
            and self._partial is None
            and not self._recognition.is_busy
        )

    def wants_partial_in_pause(self, turn_samples: int) -> bool:
        """True when a partial would be useful if speech pauses now."""
        is_ours = self._partial is not None
        return self._next_pause_partial_s <= turn_samples / SPEECH_RATE <= _MAX_PARTIAL_S and (
            is_ours or not self._recognition.is_busy
        )

    def start_partial_in_pause(self, audio: TurnAudio) -> None:
        """Start a partial if the audio ends in a pause that no partial covers yet."""
        silence_len = trailing_silence_len(audio.samples)
        if silence_len < _PAUSE_SAMPLES:
            return
        if self._partial_covering(audio.num_samples - silence_len) is not None:
            return
        self._cancel_partial()  # it covers less
        self.start_partial(audio)

    def start_partial(self, audio: TurnAudio) -> None:
        """Transcribe the turn so far, so that ``stable_text`` grows."""
        self._partial_job = self._submit(audio, AsrPriority.PARTIAL)
        self._partial = asyncio.create_task(self._add_partial(self._partial_job, self._agreement))
        self._partial.add_done_callback(self._on_partial_done)

    async def _add_partial(self, job: Job[Transcript], agreement: LocalAgreement) -> None:
        try:
            transcript = await job.result
        except BusyRecognizerError:
            return  # rejected in favour of a turn that has ended
        if agreement is not self._agreement:
            return  # this turn has ended meanwhile
        cost_s = transcript.took_ms / 1000
        num_callers = max(1, self._recognition.num_live_turns)
        turn_s = job.num_samples / SPEECH_RATE
        spacing_s = max(_PARTIAL_EVERY_S, _PARTIAL_SHARE * num_callers * cost_s)
        self._next_partial_s = turn_s + spacing_s
        self._next_pause_partial_s = turn_s + (1 + _PAUSE_PARTIAL_SHARE * num_callers) * cost_s
        agreement.add_hypothesis(transcript.text)

    def _on_partial_done(self, task: asyncio.Task[None]) -> None:
        if self._partial is task:
            self._partial = None
        if not task.cancelled() and task.exception() is not None:
            # The final transcript meets the same failure and reports it.
            self._next_partial_s = self._next_pause_partial_s = float("inf")

    def _partial_covering(self, speech_offset: int) -> Job[Transcript] | None:
        """The latest partial, finished or running, if its audio reaches past ``speech_offset``
        (a sample of the turn); else None."""
        job = self._partial_job
        if job is None or job.num_samples < speech_offset + _PAST_OFFSET_SAMPLES:
            return None
        done = job.result
        has_failed = done.cancelled() or (done.done() and done.exception() is not None)
        return None if has_failed else job

    def _set_live(self, is_live: bool) -> None:
        if is_live != self._is_live:
            self._recognition.change_num_live_turns(is_live - self._is_live)
        self._is_live = is_live

    def _cancel_partial(self) -> None:
        if self._partial is not None:
            self._partial.cancel()
            self._partial = None

    def _discard_partials(self) -> None:
        self._set_live(False)
        self._cancel_partial()
        self._partial_job = None
        self._agreement = LocalAgreement()
        self._next_partial_s = self._next_pause_partial_s = _MIN_PARTIAL_S

    # --- early and final transcripts ---

    def start_early(
        self, audio: TurnAudio, last_voiced_sample: int
    ) -> asyncio.Task[FinalTranscript]:
        """Start the transcript of a turn that may be over; the task is cancelled if it is not.

        ``audio`` has its speech offset. A partial that covers all of the speech is used instead of
        a new transcription.
        """
        self.discard_early()
        assert audio.speech_offset is not None, "speech has paused"
        job = self._partial_covering(audio.speech_offset)
        if job is None:
            self._cancel_partial()
            job = self._submit(audio, AsrPriority.EARLY)
        else:
            job.priority = min(job.priority, AsrPriority.EARLY)
        self._early_end = last_voiced_sample
        self._early_job = job
        self._early = asyncio.create_task(self._finish(job))
        # Its failure matters only to a final transcript that uses it.
        self._early.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._early

    def discard_early(self) -> None:
        """The caller goes on: drop the early transcript, and use it as one more hypothesis."""
        early = self._early
        if early is not None:
            self._num_discarded += 1
            is_partial = self._early_job is self._partial_job  # its words are counted already
            has_words = early.done() and not early.cancelled() and early.exception() is None
            if has_words and not is_partial:
                self._agreement.add_hypothesis(early.result().transcript.text)
            early.cancel()
            if is_partial:
                self._partial = None  # cancelled with it
        self._early = self._early_job = self._early_end = None

    def take_num_discarded(self) -> int:
        """Number of early transcripts discarded since the last call."""
        number, self._num_discarded = self._num_discarded, 0
        return number

    def has_early(self, last_voiced_sample: int | None) -> bool:
        """True when the early transcript covers a turn whose last voiced window ends there."""
        return self._early is not None and self._early_end == last_voiced_sample

    def start_final(
        self, audio: TurnAudio, last_voiced_sample: int | None
    ) -> asyncio.Task[FinalTranscript]:
        """End the turn and start its transcript; the early one is used if it covers the turn.

        The task raises RecognitionError.
        """
        early, job = self._early, self._early_job
        if early is not None and job is not None and self.has_early(last_voiced_sample):
            if job is self._partial_job:
                self._partial = None  # cancelling it would cancel the job
            self._discard_partials()
            self._early = self._early_job = self._early_end = None
            job.priority = AsrPriority.FINAL
            return early
        self._discard_partials()
        self.discard_early()
        return asyncio.create_task(self._finish(self._submit(audio, AsrPriority.FINAL)))

    def close(self) -> None:
        """Cancel all work."""
        self.discard_early()
        self._discard_partials()

    def _submit(self, audio: TurnAudio, priority: AsrPriority) -> Job[Transcript]:
        return self._recognition.submit(
            audio.samples,
            priority,
            windows=audio.windows,
            prompt=self.prompt,
            language=self.language,
            keep_encoder_output=self.keep_encoder_output,
        )

    async def _finish(self, job: Job[Transcript]) -> FinalTranscript:
        return FinalTranscript(await job.result, self._clock.now_ns())
