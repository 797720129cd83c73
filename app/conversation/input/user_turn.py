"""What the caller is saying: the audio of the turn at hand, its words as far as they are known, and
whether it sounds finished.

    input   ... | [start_sample, position) the turn at hand |
    words   told to the client | stable, not told yet | not certain
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import numpy as np

from app.clock import Clock
from app.conversation.events import (
    Item,
    Part,
    SessionEvent,
    TranscriptionCompleted,
    TranscriptionDelta,
)
from app.conversation.ids import new_id
from app.conversation.input.audio_input import RATE, AudioInput
from app.conversation.input.endpointing import silence_ms
from app.conversation.input.streaming_transcriber import FinalTranscript, StreamingTranscriber
from app.conversation.response.pipeline import ResponsePipeline
from app.conversation.services import Services
from app.conversation.session_config import SessionConfig
from app.errors import ClientError, RecognitionError
from app.observe import TurnTrace
from audio.asr import Transcript, rest_after
from audio.endpointing import VoiceEnded, VoiceEvent, find_voice_end, means_to_stop
from audio.frame import Samples
from llm_core import ChatMessage

log = logging.getLogger(__name__)

# Manual mode holds what the client sends until it commits; with turn detection `max_turn_s` rules.
_MAX_BUFFER_S = 300.0
_MIN_COMMIT_SAMPLES = RATE // 10
# Fewer new words are not worth a prompt of their own.
_WORDS_TO_READ = 3


@dataclass(frozen=True, slots=True)
class CommittedTurn:
    """A turn that is over. ``settling`` gives its words, of which ``told`` are told already.

    ``samples`` float32 [n] lie at ``start_sample`` of the session's audio; the transcript is of
    those from ``words_from`` on, and the voice ends at ``voice_end_sample``. ``num_rejoined``: how
    often it had been taken for over before.
    """

    item: Item
    trace: TurnTrace
    settling: asyncio.Task[FinalTranscript]
    told: str
    start_sample: int
    samples: Samples
    words_from: int
    voice_end_sample: int
    num_rejoined: int

    async def settle(self, clock: Clock) -> RecognitionError | None:
        """Wait for the words: item and trace have them then, or the error is returned."""
        part, trace = self.item.content[0], self.trace
        try:
            settled = await self.settling
        except Exception as caught:
            error = caught
            if not isinstance(error, RecognitionError):
                log.error("speech recognition failed", exc_info=error)
                error = RecognitionError("internal error; the server's log has the details")
            part.text = ""
            trace.mark("asr_final", clock.now_ns())
            trace.end("failed", clock.now_ns(), error.code)
            return error
        part.text = settled.transcript.text
        trace.mark("asr_final", settled.at_ns)
        trace.note_transcript(settled.transcript)
        return None

    def transcript_events(self) -> list[SessionEvent]:
        """What the client has not been told yet of the words, once they are settled: the rest, if
        that can be added to what was told, and all of them."""
        part = self.item.content[0]
        text = part.text or ""
        events: list[SessionEvent] = []
        if rest := rest_after(self.told, text):
            events.append(TranscriptionDelta(self.item.id, rest))
        events.append(TranscriptionCompleted(self.item.id, text, part.audio_ms / 1000))
        return events


class UserTurn:
    """The caller's side of one conversation."""

    def __init__(self, services: Services, config: SessionConfig, clock: Clock) -> None:
        self.listener = AudioInput(
            services.vad,
            config,
            eager_silence_ms=services.settings.eager_silence_ms,
            max_buffer_s=_MAX_BUFFER_S,
        )
        self.item_id = new_id("item")
        """Of the user item that the turn will become."""
        self.start_sample = 0
        """Where that item's audio begins."""
        self._services = services
        self._config = config
        self._clock = clock
        self._transcriber = StreamingTranscriber(services.recognition, clock)
        self._told = ""
        self._num_read_words = 0
        self._is_told_apart = False
        self._last: CommittedTurn | None = None
        self._rejoined: CommittedTurn | None = None  # what the turn at hand goes on with
        self.follow(config)

    # --- settings ---

    def follow(self, config: SessionConfig) -> None:
        """Use a changed configuration from now on."""
        self._config = config
        self._transcriber.language = config.language
        self._transcriber.prompt = config.transcription_prompt
        self._transcriber.keeps_sound = config.word_timestamps

    # --- a turn goes on ---

    @property
    def turn_s(self) -> float:
        """Length of the turn at hand."""
        return (self.listener.position - self.start_sample) / RATE

    def begin(self, start_sample: int) -> int:
        """A turn begins; returns its start in ms of the session's audio."""
        if self._rejoined is None:
            self.start_sample = max(start_sample, self.listener.kept_from)
        self._begin_words()
        return self.start_sample * 1000 // RATE

    @property
    def last(self) -> CommittedTurn | None:
        """The turn that ended last, while it can be gone on with."""
        return self._last

    def rejoin(self) -> None:
        """The turn that ended last had not ended: what comes and came since belongs to it."""
        assert self._last is not None
        self._last.settling.cancel()
        self._rejoined, self._last = self._last, None
        self.start_sample = self._rejoined.start_sample
        told = self._told
        self._begin_words()
        # What of the second half was told already cannot be taken back, nor be told twice.
        self._is_told_apart = bool(told)

    def _audio(self, end_sample: int | None = None) -> Samples:
        """The turn at hand, float32 [n]."""
        before = self._rejoined
        if before is None:
            return self.listener.take(self.start_sample, end_sample)
        behind = before.start_sample + before.samples.size
        return np.concatenate((before.samples, self.listener.take(behind, end_sample)))

    def follow_words(self) -> None:
        """While the caller speaks: have a look at the words so far, if the recogniser has time."""
        # Somebody waits for a voice: that comes first.
        if not self._services.settings.partial_transcripts or self._services.speaking.num_waiting:
            return
        turn_len = self.listener.position - self.start_sample
        if self._transcriber.wants_partial(turn_len):
            self._transcriber.follow(self._audio())
        elif self._transcriber.wants_dip(turn_len):
            self._transcriber.follow_dip(self._audio())

    def take_stable(self) -> str:
        """Words of the turn that are certain and were not taken yet."""
        if self._is_told_apart:
            return ""
        new = self._transcriber.stable_text[len(self._told) :]
        self._told += new
        return new

    def means_to_stop(self, answer: ResponsePipeline | None, words: str | None = None) -> bool:
        """Whether ``words`` (None: those taken so far) are meant to stop ``answer``."""
        reply = answer.text if answer is not None else ""
        return means_to_stop(self._told if words is None else words, reply)

    def take_prompt(self) -> str:
        """The stable words, if enough have come since the last time to be worth reading; or ""."""
        num_words = len(self._told.split())
        if num_words < self._num_read_words + _WORDS_TO_READ:
            return ""
        self._num_read_words = num_words
        return self._told

    def note_sound(self, samples: Samples, rate: int, sounds_ns: int) -> None:
        """Our own voice, float32 [n], sounds at the caller's from ``sounds_ns`` on."""
        ahead = (sounds_ns - self._clock.now_ns()) * RATE // 1_000_000_000
        echo = self.listener.echo
        echo.play(samples, rate, self.listener.position + ahead)
        echo.forget(self.listener.position - RATE)  # some of it waits for the VAD, far less

    def note_silence(self) -> None:
        """Our own voice stops now."""
        self.listener.echo.stop(self.listener.position)

    # --- it may be over ---

    def try_words(self, last_voiced_sample: int) -> asyncio.Task[FinalTranscript]:
        """The words of a turn that may be over since ``last_voiced_sample``, in the making."""
        samples = self._audio()
        voiced_len = last_voiced_sample - self.start_sample
        return self._transcriber.try_early(samples, last_voiced_sample, voiced_len)

    async def judge_pause(
        self, said: list[ChatMessage], last_voiced_sample: int, heard: Transcript
    ) -> tuple[list[VoiceEvent], int]:
        """Let what was said decide how long the pause may last.

        ``said`` ends with the caller's words so far, which are those of ``heard``. Returns the end
        of the turn, if it has come by now, and the ms that are left until it does.
        """
        detection = self._config.turn_detection
        if detection is None or detection.kind != "semantic_vad":
            return [], 0
        samples = self._audio()
        voiced_len = last_voiced_sample - self.start_sample
        wait_ms = await silence_ms(self._services, detection, said, samples, voiced_len, heard)
        events = self.listener.end_after(last_voiced_sample, wait_ms)
        return events, wait_ms - self.listener.silence_ms

    def drop_words(self) -> None:
        """The caller goes on: what was tried is void."""
        self._transcriber.drop()

    def take_num_dropped(self) -> int:
        """How many transcripts were for nothing since the last call."""
        return self._transcriber.take_num_dropped()

    # --- it is over ---

    def take(self, heard_end: VoiceEnded | None, session_id: str) -> CommittedTurn:
        """The turn at hand becomes an item; the next one begins. ``heard_end`` None: by hand."""
        now_ns = self._clock.now_ns()
        listener, rejoined = self.listener, self._rejoined
        start = self.start_sample if heard_end or rejoined else listener.kept_from
        end = heard_end.at_sample if heard_end else listener.position
        last_voiced = heard_end.last_voiced_sample if heard_end else listener.last_voiced_sample
        samples = self._audio(end) if rejoined else listener.take(start, end)
        # What was tried early began with the voice; by hand more may have been committed.
        words_from = self.start_sample if self._transcriber.has_early(last_voiced) else start
        settling = self._transcriber.settle(samples, last_voiced)
        trace = TurnTrace(new_id("turn"), session_id, spoken=True)
        place = place_of_end(listener, samples, start, last_voiced)
        trace.mark("speech_end", place.spoken_ns)
        trace.mark("endpoint", now_ns)
        if self._services.settings.record:
            trace.record(samples, place.sample - start)
        part = Part("input_audio", None, len(samples) * 1000 / RATE)
        num_rejoined = 0 if rejoined is None else rejoined.num_rejoined + 1
        if num_rejoined:
            trace.facts["rejoined"] = num_rejoined
        item = Item(self.item_id, "user", [part])
        heard = CommittedTurn(
            item,
            trace,
            settling,
            self._told,
            start,
            samples,
            words_from,
            heard_end.last_voiced_sample if heard_end else start + len(samples),
            num_rejoined,
        )
        listener.forget(end)
        self._next_item()
        self._last = heard if heard_end else None
        return heard

    def take_silence(self, silence_ms: float) -> tuple[Item, int]:
        """A silence as an item without words, and its end in ms of the session's audio."""
        item = Item(self.item_id, "user", [Part("input_audio", "", silence_ms)])
        self._next_item()
        return item, self.listener.position * 1000 // RATE

    def forget(self) -> None:
        """Throw the turn at hand away: it is not the caller's, or nobody wants it."""
        self._begin_words()
        self._rejoined = self._last = None
        self.start_sample = self.listener.position

    def drop_turn(self) -> int:
        """It was no turn; returns where its voice ended, in ms of the session's audio."""
        end = self.listener.last_voiced_sample or self.listener.position
        self.listener.forget()
        self.forget()
        return end * 1000 // RATE

    def end_now(self) -> VoiceEnded:
        """The end of a turn in which no silence was heard."""
        position = self.listener.position
        return VoiceEnded(self.listener.last_voiced_sample or position, position)

    def check_commit(self) -> None:
        """Raises ClientError when there is nothing to commit by hand."""
        kept = self.listener.kept_samples
        if kept < _MIN_COMMIT_SAMPLES:
            raise ClientError(
                f"the input audio buffer holds {kept * 1000 // RATE} ms of audio; a commit needs "
                "at least 100 ms",
                code="input_audio_buffer_commit_empty",
            )

    def close(self) -> None:
        """Stop all work."""
        self._transcriber.close()

    def _next_item(self) -> None:
        self.item_id = new_id("item")
        self._rejoined = None
        self._forget_told()

    def _begin_words(self) -> None:
        self._transcriber.begin_turn()
        self._forget_told()

    def _forget_told(self) -> None:
        self._told = ""
        self._num_read_words = 0
        self._is_told_apart = False


@dataclass(frozen=True, slots=True)
class VoicePlace:
    """The end of a voice: a position of the session's audio, and when it was spoken."""

    sample: int
    spoken_ns: int


def place_of_end(
    listener: AudioInput, samples: Samples, start_sample: int, last_voiced_sample: int | None
) -> VoicePlace:
    """Where the voice in ``samples``, float32 [n] of the listener from ``start_sample`` on, ended;
    the VAD says ``last_voiced_sample``, None: nothing."""
    voiced_len = len(samples) if last_voiced_sample is None else last_voiced_sample - start_sample
    sample = start_sample + find_voice_end(samples, voiced_len)
    return VoicePlace(sample, listener.spoken_ns(sample))
