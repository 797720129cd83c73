"""Audio front end: decoding, resampling to 16 kHz, echo and noise suppression, VAD, input buffer.

Positions are samples of the session's 16 kHz input, counted from its start; they never restart.

    input   dropped | [kept_from, position) buffered
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from app.conversation.input.turn_audio import TurnAudio
from app.conversation.session_config import SessionConfig
from app.errors import AudioInputError
from audio.codecs import decode
from audio.echo_canceller import FRAME_SAMPLES, EchoCanceller
from audio.endpointing import (
    ENDPOINTING_DELAYS,
    Endpointer,
    ServerVadConfig,
    VoiceEvent,
    VoiceState,
)
from audio.errors import AudioError
from audio.frame import SPEECH_RATE, Samples, silence
from audio.noise_suppressor import NoiseReducer
from audio.resample import StreamResampler
from audio.vad import WINDOW_SAMPLES, VadModel, VadStream, VadWindows

RATE = SPEECH_RATE
# Buffered while nobody speaks: more than the largest prefix padding.
_IDLE_KEEP_SAMPLES = 6 * RATE
_MIN_SPEECH_OVER_PLAYBACK_MS = 128
_NS = 1_000_000_000
_CHUNK_SAMPLES = RATE // 10
# Slices of less than 5 ms get no timestamp of their own: no microphone sends as often.
_TIMED_SAMPLES = RATE // 200
# A message was late if the stream was ahead of it shortly before and has caught up shortly after.
_STEADY_BEFORE = RATE
_CAUGHT_UP_WITHIN_NS = 1_000_000_000
_CAUGHT_UP_NS = 20_000_000


class AudioInput:
    """Audio in, voice events out.

    Without turn detection the VAD still runs, for the recogniser and for the trace's speech offset,
    but ``process_audio`` yields no events and everything is buffered until ``clear``.
    """

    def __init__(
        self, vad: VadModel, config: SessionConfig, *, eager_silence_ms: int, max_buffer_s: float
    ) -> None:
        self._vad = VadStream(vad)
        self._eager_silence_ms = eager_silence_ms
        self._max_buffer_samples = int(max_buffer_s * RATE)
        self.echo = EchoCanceller()
        self._reducer: NoiseReducer | None = None
        self._unprocessed_vad: VadStream | None = None  # exists while an echo is possible
        self._pending = silence(0)  # not seen by the VAD yet
        self._probabilities: list[float] = []  # of the windows from `_first_window` on
        self._first_window = 0
        self._chunks: deque[Samples] = deque()
        self._kept_from = 0
        self._position = 0
        # Ends of slices, and when they were captured; for `captured_at_ns`.
        self._ends: deque[int] = deque()
        self._captured: deque[int] = deque()
        self.configure(config)

    def configure(self, config: SessionConfig) -> None:
        """Apply a changed session configuration. Turn detection restarts."""
        detection = config.turn_detection
        self._detects = detection is not None
        # Plain server VAD reports any speech. A headset picks up no echo.
        self._suppresses_echo = (
            detection is not None
            and detection.kind == "semantic_vad"
            and config.noise_reduction != "near_field"
        )
        vad_config = ServerVadConfig()
        if detection is not None:
            silence_ms = detection.silence_duration_ms
            if detection.kind == "semantic_vad":  # until the transcript is known
                silence_ms = ENDPOINTING_DELAYS[detection.eagerness].no_transcript_ms
            vad_config = ServerVadConfig(
                threshold=detection.threshold,
                prefix_padding_ms=detection.prefix_padding_ms,
                silence_ms=silence_ms,
                eager_silence_ms=min(self._eager_silence_ms, silence_ms),
            )
        self._endpointer = Endpointer(vad_config)
        # During playback, speech must last longer to start a turn: some echo may remain.
        self._vad_config = self._playback_vad_config = vad_config
        if self._suppresses_echo:
            self._playback_vad_config = replace(
                vad_config, min_speech_ms=_MIN_SPEECH_OVER_PLAYBACK_MS
            )
        if config.noise_reduction != (self._reducer.microphone if self._reducer else None):
            self._pending = self._unseen_by_vad()
            kind = config.noise_reduction
            self._reducer = None if kind is None else NoiseReducer(kind)
        self._format = config.input_format
        self._resampler = StreamResampler(self._format.rate, RATE)
        self._num_in = self._num_resampled = 0  # samples into and out of the resampler

    @property
    def position(self) -> int:
        """Number of samples received so far."""
        return self._position

    @property
    def kept_from(self) -> int:
        """First sample in the buffer."""
        return self._kept_from

    @property
    def kept_samples(self) -> int:
        """Number of samples in the buffer."""
        return self._position - self._kept_from

    @property
    def silence_ms(self) -> int:
        """Time since the last voiced window; 0 before any speech."""
        last = self.last_voiced_sample
        return 0 if last is None else (self._position - last) * 1000 // RATE

    @property
    def last_voiced_sample(self) -> int | None:
        """End of the last voiced window since the last ``clear``; None without one."""
        return self._endpointer.last_voiced_sample

    def decode(self, payload: bytes) -> list[Samples]:
        """Decode the client's bytes to float samples at its own rate, in slices of at most 200 ms.

        Slices, because processing a long append at once would delay every other caller.
        Raises AudioInputError when the payload does not fit the session's input format.
        """
        try:
            samples = decode(payload, self._format)
        except AudioError as error:
            raise AudioInputError(str(error), param="audio") from error
        step = self._format.rate // 5
        return [samples[i : i + step] for i in range(0, len(samples), step)]

    def process_audio(self, client_samples: Samples, received_ns: int) -> Iterator[VoiceEvent]:
        """Process a slice of audio [n] at the client's rate; yield its voice events, in order."""
        samples = self._resampler.process(client_samples)
        self._num_in += len(client_samples)
        self._num_resampled += len(samples)
        if not len(samples):
            return
        resampler_delay_ns = (
            self._num_in * _NS // self._format.rate - self._num_resampled * _NS // RATE
        )
        self._buffer(samples, received_ns - resampler_delay_ns)
        start = self._vad.num_samples_scored
        for i, probability in enumerate(self._score(samples)):
            window_start = start + i * WINDOW_SAMPLES
            is_silent = self._endpointer.state is VoiceState.SILENT
            over_playback = is_silent and self.echo.may_echo_at(window_start)
            self._endpointer.config = (
                self._playback_vad_config if over_playback else self._vad_config
            )
            events = self._endpointer.process_window(
                probability, window_start, window_start + WINDOW_SAMPLES
            )
            if self._detects:
                yield from events
        if self._detects and self._endpointer.state is VoiceState.SILENT:
            self._drop_before(self._position - _IDLE_KEEP_SAMPLES)

    def _score(self, samples: Samples) -> list[float]:
        """Probabilities of the caller's speech in the windows that the buffered ``samples``
        complete: without echo, and with noise suppressed if the client wants that.

        Both suppressors work on whole frames, so that some samples wait for the next call. The
        windows that go with the audio to the recogniser are those of the echo too: it hears it.
        """
        pending = np.concatenate((self._pending, samples))
        start = self._position - pending.size
        may_echo = self._suppresses_echo and self.echo.may_echo_at(start)
        num_whole = pending.size
        if may_echo or self._reducer is not None:
            num_whole -= pending.size % FRAME_SAMPLES
        self._pending = pending[num_whole:]
        heard = cleaned = pending[:num_whole]
        if may_echo:
            cleaned = self.echo.cancel(heard, start)
        if self._reducer is not None:
            cleaned = self._reducer.process(cleaned)
        if not may_echo or self._reducer is not None:
            self._unprocessed_vad = None
            probabilities = self._vad.detect(cleaned)
            self._probabilities += probabilities
            return probabilities
        if self._unprocessed_vad is None:
            self._unprocessed_vad = self._vad.copy()
        with_echo, without = self._unprocessed_vad.detect(heard), self._vad.detect(cleaned)
        self._probabilities += with_echo
        exit_threshold = self._vad_config.exit_threshold
        return [
            self.echo.gate_probability(one, other, exit_threshold)
            for one, other in zip(with_echo, without, strict=True)
        ]

    def _unseen_by_vad(self) -> Samples:
        """Input that the VAD has not seen yet: pending, or inside the noise suppressor."""
        seen = self._vad.num_samples_seen
        kept = self.read(seen)
        return np.concatenate((silence(self._position - seen - kept.size), kept))

    def set_endpointing_delay(self, last_voiced_sample: int, silence_ms: int) -> list[VoiceEvent]:
        """End the turn once the pause since ``last_voiced_sample`` lasts ``silence_ms``.

        Returns the end if that has passed already. No effect when speech has resumed since.
        """
        if last_voiced_sample != self.last_voiced_sample:
            return []
        return self._endpointer.set_endpointing_delay(silence_ms)

    def read(self, start_sample: int, end_sample: int | None = None) -> Samples:
        """Samples [start, end) as far as they are buffered; ``end`` None: up to the position."""
        kept = np.concatenate(self._chunks) if self._chunks else np.zeros(0, np.float32)
        end = self._position if end_sample is None else end_sample
        lo, hi = max(0, start_sample - self._kept_from), max(0, end - self._kept_from)
        return kept[lo:hi]

    def read_turn(self, start_sample: int, end_sample: int | None = None) -> TurnAudio:
        """The same with its VAD windows, unless those are of audio without its noise."""
        samples = self.read(start_sample, end_sample)
        if self._reducer is not None:
            return TurnAudio(samples, None)
        start = max(start_sample, self._kept_from)
        known = self._probabilities[start // WINDOW_SAMPLES - self._first_window :]
        windows = VadWindows(np.array(known, np.float32), start % WINDOW_SAMPLES)
        return TurnAudio(samples, windows.fit(samples.size))

    def clear(self, end_sample: int | None = None) -> None:
        """Empty the buffer up to ``end_sample`` (None: all of it) and restart turn detection."""
        self._drop_before(self._position if end_sample is None else end_sample)
        self._endpointer.reset()

    def captured_at_ns(self, sample: int) -> int:
        """Time at which the sample before ``sample`` was captured, estimated from arrivals.

        A message is sent when its last sample has been captured; earlier samples were captured
        earlier by their distance. A message that was delayed, by the network or a busy event loop,
        is timed by its neighbours: if the stream was ahead of it before and has caught up since, it
        was late. A stream that stays behind was paused; one that only gets ahead was not sent in
        real time. (Each slice of a longer message counts as a message.)
        """
        index = min(bisect_right(self._ends, sample - 1), len(self._ends) - 1)
        first = bisect_right(self._ends, self._ends[index] - _STEADY_BEFORE)
        before = [self._ahead_ns(i) for i in range(first, index)]
        after = [
            self._ahead_ns(i)
            for i in range(index + 1, len(self._ends))
            if self._captured[i] - self._captured[index] <= _CAUGHT_UP_WITHIN_NS
        ]
        late_ns = 0
        if before and after and max(after) > max(before) - _CAUGHT_UP_NS:
            late_ns = max(0, min(max(before), max(after)) - self._ahead_ns(index))
        since_ns = max(0, self._ends[index] - sample) * _NS // RATE
        return self._captured[index] - late_ns - since_ns

    def _ahead_ns(self, index: int) -> int:
        """Lead of a slice's samples over its time of capture: constant in a steady stream."""
        return self._ends[index] * _NS // RATE - self._captured[index]

    def _buffer(self, samples: Samples, captured_at_ns: int) -> None:
        if self.kept_samples + len(samples) > self._max_buffer_samples:
            limit_s = self._max_buffer_samples / RATE
            raise AudioInputError(
                f"the input audio buffer is full: it holds at most {limit_s:g} s of audio; "
                "commit or clear it",
                code="input_audio_buffer_full",
                param="audio",
            )
        # Small slices are joined: a session's cost must depend on its audio, not on its messages.
        if self._chunks and len(self._chunks[-1]) + len(samples) <= _CHUNK_SAMPLES:
            self._chunks[-1] = np.concatenate((self._chunks[-1], samples))
        else:
            self._chunks.append(samples)
        self._position += len(samples)
        if len(self._ends) > 1 and self._position - self._ends[-2] <= _TIMED_SAMPLES:
            self._ends[-1], self._captured[-1] = self._position, captured_at_ns
        else:
            self._ends.append(self._position)
            self._captured.append(captured_at_ns)

    def _drop_before(self, sample: int) -> None:
        while self._chunks and self._kept_from < sample:
            head = self._chunks.popleft()
            unused = max(0, self._kept_from + len(head) - sample)
            self._kept_from += len(head) - unused
            if unused:
                self._chunks.appendleft(head[-unused:])
        num_windows = self._kept_from // WINDOW_SAMPLES - self._first_window
        num_windows = min(max(0, num_windows), len(self._probabilities))
        del self._probabilities[:num_windows]
        self._first_window += num_windows
        # Times outlive the audio a little: the turn just committed still asks for them.
        while len(self._ends) > 1 and self._ends[0] < sample - _IDLE_KEEP_SAMPLES:
            self._ends.popleft()
            self._captured.popleft()
