"""The caller's audio: decoded, resampled to 16 kHz, watched by the VAD, kept until it is used.

Positions are samples of the session's 16 kHz input, counted from its start; they never restart.

    input   forgotten | [kept_from, position) kept
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from app.conversation.session_config import SessionConfig
from app.errors import AudioInputError
from audio.codecs import decode
from audio.echo_canceller import FRAME, EchoCanceller
from audio.endpointing import WAITS, Endpointer, ServerVadConfig, VoiceEvent, VoiceState
from audio.errors import AudioError
from audio.frame import SPEECH_RATE, Samples, silence
from audio.noise_suppressor import NoiseReducer
from audio.resample import StreamResampler
from audio.vad import WINDOW_SAMPLES, VadModel, VadStream

RATE = SPEECH_RATE
# With nobody speaking only this much is kept: more than the largest prefix padding.
_IDLE_KEEP_SAMPLES = 6 * RATE
_MIN_SPEECH_OVER_OURS_MS = 128
_NS = 1_000_000_000
_CHUNK_SAMPLES = RATE // 10
# Parts of less than 5 ms have no date of their own: no microphone sends so often.
_DATED_SAMPLES = RATE // 200
# A message was late if the stream was sooner in the samples before it, and soon again as soon.
_STEADY_BEFORE = RATE
_CAUGHT_UP_WITHIN_NS = 1_000_000_000
_CAUGHT_UP_NS = 20_000_000


class AudioInput:
    """Audio in, voice events out.

    Without turn detection the VAD still runs, because a trace needs to know when the voice ended,
    but ``feed`` yields no events and everything is kept until ``forget``.
    """

    def __init__(
        self, vad: VadModel, config: SessionConfig, *, eager_silence_ms: int, max_buffer_s: float
    ) -> None:
        self._vad = VadStream(vad)
        self._eager_silence_ms = eager_silence_ms
        self._max_buffer_samples = int(max_buffer_s * RATE)
        self.echo = EchoCanceller()
        self._reducer: NoiseReducer | None = None
        self._vad_with_ours: VadStream | None = None  # while our own voice sounds
        self._unwatched = silence(0)  # before what comes next, and not seen by the VAD yet
        self._chunks: deque[Samples] = deque()
        self._kept_from = 0
        self._position = 0
        # Where slices end, and when that was spoken; for `spoken_ns`.
        self._ends: deque[int] = deque()
        self._spoken: deque[int] = deque()
        self.configure(config)

    def configure(self, config: SessionConfig) -> None:
        """Follow a changed session configuration. A change of detection forgets voice in flight."""
        detection = config.turn_detection
        self._detects = detection is not None
        # Who asks for plain voice activity gets it, whosever voice it is.
        # A headset does not hear us.
        self._minds_echo = (
            detection is not None
            and detection.kind == "semantic_vad"
            and config.noise_reduction != "near_field"
        )
        vad_config = ServerVadConfig()
        if detection is not None:
            silence_ms = detection.silence_duration_ms
            if detection.kind == "semantic_vad":  # until the words are known; see `end_after`
                silence_ms = WAITS[detection.eagerness].unknown
            vad_config = ServerVadConfig(
                threshold=detection.threshold,
                prefix_padding_ms=detection.prefix_padding_ms,
                silence_ms=silence_ms,
                eager_silence_ms=min(self._eager_silence_ms, silence_ms),
            )
        self._endpointer = Endpointer(vad_config)
        # Over our own voice, what begins a turn must last a little longer: echoes may leave traces.
        self._alone = self._over_ours = vad_config
        if self._minds_echo:
            self._over_ours = replace(vad_config, min_speech_ms=_MIN_SPEECH_OVER_OURS_MS)
        if config.noise_reduction != (self._reducer.microphone if self._reducer else None):
            self._unwatched = self._not_watched()
            kind = config.noise_reduction
            self._reducer = None if kind is None else NoiseReducer(kind)
        self._format = config.input_format
        self._resampler = StreamResampler(self._format.rate, RATE)
        self._num_fed = self._num_resampled = 0  # samples into it and out of it

    @property
    def position(self) -> int:
        """Number of samples received so far."""
        return self._position

    @property
    def kept_from(self) -> int:
        """First sample that is still in the buffer."""
        return self._kept_from

    @property
    def kept_samples(self) -> int:
        """Number of samples in the buffer."""
        return self._position - self._kept_from

    @property
    def silence_ms(self) -> int:
        """How long the caller has been silent; 0 before any voice."""
        last = self.last_voiced_sample
        return 0 if last is None else (self._position - last) * 1000 // RATE

    @property
    def last_voiced_sample(self) -> int | None:
        """End of the last voiced window since the last ``forget``, if there was one."""
        return self._endpointer.last_voiced_sample

    def decode(self, payload: bytes) -> list[Samples]:
        """The client's bytes as float samples at its own rate, in slices of at most 200 ms.

        Slices, because judging a long append in one go would hold up every other caller.
        Raises AudioInputError when the payload does not fit the session's input format.
        """
        try:
            samples = decode(payload, self._format)
        except AudioError as error:
            raise AudioInputError(str(error), param="audio") from error
        step = self._format.rate // 5
        return [samples[i : i + step] for i in range(0, len(samples), step)]

    def feed(self, client_samples: Samples, received_ns: int) -> Iterator[VoiceEvent]:
        """Take a slice of the caller's audio and yield what it brings, as it is found."""
        samples = self._resampler.process(client_samples)
        self._num_fed += len(client_samples)
        self._num_resampled += len(samples)
        if not len(samples):
            return
        inside_ns = (
            self._num_fed * _NS // self._format.rate - self._num_resampled * _NS // RATE
        )  # of the voice, in the resampler
        self._keep(samples, received_ns - inside_ns)
        start = self._vad.num_samples_judged
        for i, probability in enumerate(self._judge(samples)):
            window_start = start + i * WINDOW_SAMPLES
            begins = self._endpointer.state is VoiceState.SILENT
            is_over = begins and self.echo.is_sounding(window_start)
            self._endpointer.config = self._over_ours if is_over else self._alone
            events = self._endpointer.feed(probability, window_start, window_start + WINDOW_SAMPLES)
            if self._detects:
                yield from events
        if self._detects and self._endpointer.state is VoiceState.SILENT:
            self._drop_before(self._position - _IDLE_KEEP_SAMPLES)

    def _judge(self, samples: Samples) -> list[float]:
        """Probabilities of the caller's voice in the windows that ``samples``, which are kept
        already, complete: without our own voice, and with less noise if the client wants that.

        Both work on whole frames, so that some samples wait.
        """
        watched = np.concatenate((self._unwatched, samples))
        start = self._position - watched.size
        is_echo = self._minds_echo and self.echo.is_sounding(start)
        num_whole = watched.size
        if is_echo or self._reducer is not None:
            num_whole -= watched.size % FRAME
        self._unwatched = watched[num_whole:]
        heard = cleaned = watched[:num_whole]
        if is_echo:
            cleaned = self.echo.clean(heard, start)
        if self._reducer is not None:
            self._vad_with_ours = None
            return self._vad.feed(self._reducer.process(cleaned))
        if not is_echo:
            self._vad_with_ours = None
            return self._vad.feed(heard)
        if self._vad_with_ours is None:
            self._vad_with_ours = self._vad.copy()
        both = zip(self._vad_with_ours.feed(heard), self._vad.feed(cleaned), strict=True)
        voice_from = self._alone.exit_threshold
        return [self.echo.judge(with_ours, without, voice_from) for with_ours, without in both]

    def _not_watched(self) -> Samples:
        """The end of the input that the VAD has not been given: it waits, or is in the reducer."""
        seen = self._vad.num_samples_seen
        kept = self.take(seen)
        return np.concatenate((silence(self._position - seen - kept.size), kept))

    def end_after(self, last_voiced_sample: int, silence_ms: int) -> list[VoiceEvent]:
        """The pause since ``last_voiced_sample`` ends the turn once it lasts ``silence_ms``.

        Returns the end if it has come already. Without effect when the voice came back since.
        """
        if last_voiced_sample != self.last_voiced_sample:
            return []
        return self._endpointer.wait_for(silence_ms)

    def take(self, start_sample: int, end_sample: int | None = None) -> Samples:
        """Samples [start, end) as far as they are kept; ``end`` None means all there is."""
        kept = np.concatenate(self._chunks) if self._chunks else np.zeros(0, np.float32)
        end = self._position if end_sample is None else end_sample
        lo, hi = max(0, start_sample - self._kept_from), max(0, end - self._kept_from)
        return kept[lo:hi]

    def forget(self, end_sample: int | None = None) -> None:
        """Empty the buffer up to ``end_sample`` (None: wholly): it became an item, or is void."""
        self._drop_before(self._position if end_sample is None else end_sample)
        self._endpointer.reset()

    def spoken_ns(self, sample: int) -> int:
        """When the caller had spoken the samples before ``sample``, as far as arrivals tell.

        A message is sent when its last sample has been spoken, so what lies before that in it was
        spoken so much sooner. One that was held up, on its way or by a busy loop here, is dated by
        those around it: if the stream was ahead of it before and has caught up since, it was late.
        Where the stream stays behind, the caller paused; where it only gets ahead, nobody spoke
        while it was sent. (Of a message longer than a slice, each slice counts as one.)
        """
        index = min(bisect_right(self._ends, sample - 1), len(self._ends) - 1)
        first = bisect_right(self._ends, self._ends[index] - _STEADY_BEFORE)
        before = [self._ahead_ns(i) for i in range(first, index)]
        after = [
            self._ahead_ns(i)
            for i in range(index + 1, len(self._ends))
            if self._spoken[i] - self._spoken[index] <= _CAUGHT_UP_WITHIN_NS
        ]
        late_ns = 0
        if before and after and max(after) > max(before) - _CAUGHT_UP_NS:
            late_ns = max(0, min(max(before), max(after)) - self._ahead_ns(index))
        since_ns = max(0, self._ends[index] - sample) * _NS // RATE
        return self._spoken[index] - late_ns - since_ns

    def _ahead_ns(self, index: int) -> int:
        """How far a slice's samples are ahead of its time: equal for all of a steady stream."""
        return self._ends[index] * _NS // RATE - self._spoken[index]

    def _keep(self, samples: Samples, spoken_ns: int) -> None:
        if self.kept_samples + len(samples) > self._max_buffer_samples:
            limit_s = self._max_buffer_samples / RATE
            raise AudioInputError(
                f"the input audio buffer is full: it holds at most {limit_s:g} s of audio; "
                "commit or clear it",
                code="input_audio_buffer_full",
                param="audio",
            )
        # Small pieces are joined: what a session costs must depend on its audio, not on the number
        # of messages in which that came.
        if self._chunks and len(self._chunks[-1]) + len(samples) <= _CHUNK_SAMPLES:
            self._chunks[-1] = np.concatenate((self._chunks[-1], samples))
        else:
            self._chunks.append(samples)
        self._position += len(samples)
        if len(self._ends) > 1 and self._position - self._ends[-2] <= _DATED_SAMPLES:
            self._ends[-1], self._spoken[-1] = self._position, spoken_ns
        else:
            self._ends.append(self._position)
            self._spoken.append(spoken_ns)

    def _drop_before(self, sample: int) -> None:
        while self._chunks and self._kept_from < sample:
            head = self._chunks.popleft()
            unused = max(0, self._kept_from + len(head) - sample)
            self._kept_from += len(head) - unused
            if unused:
                self._chunks.appendleft(head[-unused:])
        # Instants outlive the audio a little: the turn that was just taken still asks for them.
        while len(self._ends) > 1 and self._ends[0] < sample - _IDLE_KEEP_SAMPLES:
            self._ends.popleft()
            self._spoken.popleft()
