"""The current user turn: buffered audio, stable and early transcripts, endpointing decision.

input       ... | [start_sample, position) the current turn |
transcript  sent to the client | stable, not sent yet | partial
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace

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
from app.conversation.input.endpointing import endpointing_delay_ms
from app.conversation.input.streaming_transcriber import FinalTranscript, StreamingTranscriber
from app.conversation.input.turn_audio import TurnAudio
from app.conversation.response.pipeline import ResponsePipeline
from app.conversation.services import Services
from app.conversation.session_config import SessionConfig
from app.errors import ClientError, RecognitionError
from app.observe import TurnTrace
from audio.asr import Transcript, text_after
from audio.endpointing import VoiceEnded, VoiceEvent, find_speech_offset, is_barge_in
from audio.frame import Samples
from llm_core import ChatMessage

log = logging.getLogger(__name__)

# In manual mode audio is buffered until a commit; with turn detection `max_turn_s` limits a turn.
_MAX_BUFFER_S = 300.0
_MIN_COMMIT_SAMPLES = RATE // 10
# Fewer new words are not worth a prefill.
_MIN_NEW_WORDS = 3


@dataclass(frozen=True, slots=True)
class CommittedTurn:
    """A turn that is over. ``sent_text`` of its transcript was sent as deltas already.

    ``audio`` begins at ``start_sample`` of the session's audio, its transcript at
    ``transcript_start_sample``; the last voiced window ends at ``last_voiced_sample``.
    ``num_merged``: number of earlier turns that it includes (false endpoints).
    """

    item: Item
    trace: TurnTrace
    transcript_task: asyncio.Task[FinalTranscript]
    sent_text: str
    start_sample: int
    audio: TurnAudio
    transcript_start_sample: int
    last_voiced_sample: int
    num_merged: int

    async def await_transcript(self, clock: Clock) -> RecognitionError | None:
        """Wait for the transcript and set it in item and trace; returns the error if it failed."""
        part, trace = self.item.content[0], self.trace
        try:
            final = await self.transcript_task
        except Exception as caught:
            error = caught
            if not isinstance(error, RecognitionError):
                log.error("speech recognition failed", exc_info=error)
                error = RecognitionError("internal error; the server's log has the details")
            part.text = ""
            trace.mark("asr_final", clock.now_ns())
            trace.end("failed", clock.now_ns(), error.code)
            return error
        part.text = final.transcript.text
        trace.mark("asr_final", final.ready_ns)
        trace.note_transcript(final.transcript)
        return None

    def transcript_events(self) -> list[SessionEvent]:
        """Events for a final transcript: a delta with the rest, where it continues what was sent
        as deltas, and the whole text."""
        part = self.item.content[0]
        text = part.text or ""
        events: list[SessionEvent] = []
        if rest := text_after(self.sent_text, text):
            events.append(TranscriptionDelta(self.item.id, rest))
        events.append(TranscriptionCompleted(self.item.id, text, part.audio_ms / 1000))
        return events


class UserTurn:
    """The user's side of one conversation."""

    def __init__(self, services: Services, config: SessionConfig, clock: Clock) -> None:
        self.audio_input = AudioInput(
            services.vad,
            config,
            eager_silence_ms=services.settings.eager_silence_ms,
            max_buffer_s=_MAX_BUFFER_S,
        )
        self.item_id = new_id("item")
        """Of the user item that the current turn will become."""
        self.start_sample = 0
        """Where that item's audio begins."""
        self._services = services
        self._config = config
        self._clock = clock
        self._transcriber = StreamingTranscriber(services.recognition, clock)
        self._sent_text = ""
        self._num_prefilled_words = 0
        self._skips_deltas = False
        self._last: CommittedTurn | None = None
        self._merged_from: CommittedTurn | None = None  # the current turn continues it
        self._pause: tuple[int, int] | None = None  # last voiced sample, speech offset
        self.configure(config)

    # --- settings ---

    def configure(self, config: SessionConfig) -> None:
        """Apply a changed configuration from now on."""
        self._config = config
        self._transcriber.language = config.language
        self._transcriber.prompt = config.transcription_prompt
        self._transcriber.keep_encoder_output = config.word_timestamps

    # --- the turn goes on ---

    @property
    def turn_s(self) -> float:
        """Length of the current turn in seconds."""
        return (self.audio_input.position - self.start_sample) / RATE

    def begin_turn(self, start_sample: int) -> int:
        """Start a turn; returns its start in ms of the session's audio."""
        if self._merged_from is None:
            self.start_sample = max(start_sample, self.audio_input.kept_from)
        self._reset_transcript()
        return self.start_sample * 1000 // RATE

    @property
    def last(self) -> CommittedTurn | None:
        """The last committed turn, as long as the current one can be merged with it."""
        return self._last

    def merge_with_last(self) -> None:
        """Continue the last turn, whose endpoint was false."""
        assert self._last is not None
        self._last.transcript_task.cancel()
        self._merged_from, self._last = self._last, None
        self.start_sample = self._merged_from.start_sample
        has_sent = bool(self._sent_text)
        self._reset_transcript()
        # Deltas of the second half cannot be taken back, nor be sent twice.
        self._skips_deltas = has_sent

    def _read_audio(self, end_sample: int | None = None) -> TurnAudio:
        """The current turn."""
        first = self._merged_from
        if first is None:
            return self.audio_input.read_turn(self.start_sample, end_sample)
        rest_start = first.start_sample + first.audio.num_samples
        return first.audio.followed_by(self.audio_input.read_turn(rest_start, end_sample))

    def _read_paused_audio(self, last_voiced_sample: int) -> TurnAudio:
        """The current turn with its speech offset, which is found once for each pause."""
        audio = self._read_audio()
        if self._pause is None or self._pause[0] != last_voiced_sample:
            voiced_len = last_voiced_sample - self.start_sample
            offset = self.start_sample + find_speech_offset(audio.samples, voiced_len)
            self._pause = last_voiced_sample, offset
        return replace(audio, speech_offset=self._pause[1] - self.start_sample)

    def update_partial(self) -> None:
        """While the caller speaks: start a partial transcript if one is due."""
        # Waiting speech synthesis comes first.
        if not self._services.settings.partial_transcripts or self._services.speaking.num_waiting:
            return
        turn_len = self.audio_input.position - self.start_sample
        if self._transcriber.wants_partial(turn_len):
            self._transcriber.start_partial(self._read_audio())
        elif self._transcriber.wants_partial_in_pause(turn_len):
            self._transcriber.start_partial_in_pause(self._read_audio())

    def take_stable_text(self) -> str:
        """Stable words of the turn since the last call."""
        if self._skips_deltas:
            return ""
        new = self._transcriber.stable_text[len(self._sent_text) :]
        self._sent_text += new
        return new

    def is_barge_in(self, response: ResponsePipeline | None, words: str | None = None) -> bool:
        """True when ``words`` (None: the stable words so far) should interrupt ``response``."""
        reply = response.text if response is not None else ""
        return is_barge_in(self._sent_text if words is None else words, reply)

    def take_prefill_text(self) -> str:
        """The stable words, if enough of them are new since the last call; else ""."""
        num_words = len(self._sent_text.split())
        if num_words < self._num_prefilled_words + _MIN_NEW_WORDS:
            return ""
        self._num_prefilled_words = num_words
        return self._sent_text

    def note_playback(self, samples: Samples, rate: int, sounds_ns: int) -> None:
        """Note that our audio, float32 [n] at ``rate``, plays at the caller's from ``sounds_ns``
        on."""
        ahead = (sounds_ns - self._clock.now_ns()) * RATE // 1_000_000_000
        echo, position = self.audio_input.echo, self.audio_input.position
        echo.add_playback(samples, rate, position + ahead)
        echo.discard_before(position - RATE)  # the VAD lags by far less

    def note_playback_stopped(self) -> None:
        """Note that our audio stops playing now."""
        self.audio_input.echo.stop_playback(self.audio_input.position)

    # --- the turn may be over ---

    def start_early_transcript(self, last_voiced_sample: int) -> asyncio.Task[FinalTranscript]:
        """Start the transcript of a turn that may be over since ``last_voiced_sample``."""
        audio = self._read_paused_audio(last_voiced_sample)
        return self._transcriber.start_early(audio, last_voiced_sample)

    async def decide_endpointing_delay(
        self, messages: list[ChatMessage], last_voiced_sample: int, transcript: Transcript
    ) -> tuple[list[VoiceEvent], int]:
        """Set the silence that ends the turn, from what was said.

        ``messages`` end with the caller's words so far, those of ``transcript``. Returns the end of
        the turn if that has passed already, and the ms left until it.
        """
        detection = self._config.turn_detection
        if detection is None or detection.kind != "semantic_vad":
            return [], 0
        audio = self._read_paused_audio(last_voiced_sample)
        delay_ms = await endpointing_delay_ms(
            self._services, detection, messages, audio, transcript
        )
        events = self.audio_input.set_endpointing_delay(last_voiced_sample, delay_ms)
        return events, delay_ms - self.audio_input.silence_ms

    def discard_early_transcript(self) -> None:
        """The caller goes on: the early transcript is void."""
        self._transcriber.discard_early()

    def take_num_discarded(self) -> int:
        """Number of early transcripts discarded since the last call."""
        return self._transcriber.take_num_discarded()

    # --- the turn is over ---

    def commit_turn(self, voice_end: VoiceEnded | None, session_id: str) -> CommittedTurn:
        """Turn the current turn into an item and start the next. ``voice_end`` None: manually."""
        now_ns = self._clock.now_ns()
        audio_input, merged_from = self.audio_input, self._merged_from
        start = self.start_sample if voice_end or merged_from else audio_input.kept_from
        end = voice_end.at_sample if voice_end else audio_input.position
        last_voiced = (voice_end or audio_input).last_voiced_sample
        audio = self._read_audio(end) if merged_from else audio_input.read_turn(start, end)
        # The early transcript begins with the speech; a manual commit may include more before it.
        has_early = self._transcriber.has_early(last_voiced)
        transcript_start = self.start_sample if has_early else start
        transcript_task = self._transcriber.start_final(audio, last_voiced)
        audio = replace(audio, speech_offset=final_speech_offset(audio, start, last_voiced))
        trace = self._new_trace(audio, start, now_ns, session_id)
        part = Part("input_audio", None, audio.num_samples * 1000 / RATE)
        num_merged = 0 if merged_from is None else merged_from.num_merged + 1
        if num_merged:
            trace.facts["rejoined"] = num_merged
        committed = CommittedTurn(
            Item(self.item_id, "user", [part]),
            trace,
            transcript_task,
            self._sent_text,
            start,
            audio,
            transcript_start,
            voice_end.last_voiced_sample if voice_end else start + audio.num_samples,
            num_merged,
        )
        audio_input.clear(end)
        self._next_item()
        self._last = committed if voice_end else None
        return committed

    def _new_trace(self, audio: TurnAudio, start: int, now_ns: int, session_id: str) -> TurnTrace:
        assert audio.speech_offset is not None, "the turn is over"
        trace = TurnTrace(new_id("turn"), session_id, spoken=True)
        trace.mark("speech_end", self.audio_input.captured_at_ns(start + audio.speech_offset))
        trace.mark("endpoint", now_ns)
        if self._services.settings.record:
            trace.record(audio.samples, audio.speech_offset)
        return trace

    def commit_silence(self, silence_ms: float) -> tuple[Item, int]:
        """A silence as an item without words, and its end in ms of the session's audio."""
        item = Item(self.item_id, "user", [Part("input_audio", "", silence_ms)])
        self._next_item()
        return item, self.audio_input.position * 1000 // RATE

    def discard(self) -> None:
        """Discard the current turn; the next one cannot be merged with the last."""
        self._reset_transcript()
        self._merged_from = self._last = None
        self.start_sample = self.audio_input.position

    def discard_turn(self) -> int:
        """Discard a backchannel; returns the end of its speech in ms of the session's audio."""
        end = self.audio_input.last_voiced_sample or self.audio_input.position
        self.audio_input.clear()
        self.discard()
        return end * 1000 // RATE

    def force_end(self) -> VoiceEnded:
        """The end of a turn that no silence ended."""
        position = self.audio_input.position
        return VoiceEnded(self.audio_input.last_voiced_sample or position, position)

    def check_commit(self) -> None:
        """Raises ClientError when there is nothing to commit manually."""
        kept = self.audio_input.kept_samples
        if kept < _MIN_COMMIT_SAMPLES:
            raise ClientError(
                f"the input audio buffer holds {kept * 1000 // RATE} ms of audio; a commit needs "
                "at least 100 ms",
                code="input_audio_buffer_commit_empty",
            )

    def close(self) -> None:
        """Cancel all work."""
        self._transcriber.close()

    def _next_item(self) -> None:
        self.item_id = new_id("item")
        self._merged_from = None
        self._reset_sent_text()

    def _reset_transcript(self) -> None:
        self._transcriber.begin_turn()
        self._reset_sent_text()

    def _reset_sent_text(self) -> None:
        self._sent_text = ""
        self._num_prefilled_words = 0
        self._skips_deltas = False


def final_speech_offset(audio: TurnAudio, start_sample: int, last_voiced_sample: int | None) -> int:
    """Sample of a committed turn's ``audio`` at which its speech ended; latencies count from it.

    ``start_sample``: of the audio in the session. ``last_voiced_sample``: the VAD's, in the
    session; None without any. Not the offset found when speech paused: with all of the silence the
    noise floor is known better, which moves one offset in five.
    """
    num_voiced = audio.num_samples
    if last_voiced_sample is not None:
        num_voiced = last_voiced_sample - start_sample
    return find_speech_offset(audio.samples, num_voiced)
