"""State machine from VAD probabilities to turn events: started, paused, resumed, ended.

No I/O and no clock: time is counted in samples at 16 kHz. A run of windows is voiced from the first
probability at or above the entry threshold until one falls below the exit threshold. A run counts
once it is ``min_speech_ms`` long, so that clicks neither start nor prolong a turn.

    SILENT --VoiceStarted--> SPEAKING --VoicePaused--> PAUSED --VoiceEnded--> SILENT
                                 ^-----VoiceResumed------'

The silence that ends a turn is fixed (`server_vad`) or set at each pause (`semantic_vad`) by
``set_endpointing_delay``; see ``audio.endpointing.semantic``.

    samples  [start, onset) padding | [onset, last_voiced) voice | [last_voiced, at) silence
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from audio.frame import SPEECH_RATE


@dataclass(frozen=True, slots=True)
class ServerVadConfig:
    """Thresholds and durations of the endpointer. Raises ValueError for values out of range.

    ``min_speech_ms`` 64 (two windows): in our recordings no spoken word makes a shorter run, and
    11 of 14 noise recordings start no turn (one of the others is a crowd of voices). Noise that
    resembles distant speech for longer than that starts a turn; the recogniser's hallucination
    filter then returns an empty transcript.
    """

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_ms: int = 500
    eager_silence_ms: int = 160
    min_speech_ms: int = 64

    def __post_init__(self) -> None:
        if not 0.0 < self.threshold <= 1.0:
            raise ValueError(f"threshold must be in (0, 1], got {self.threshold}")
        for name in ("prefix_padding_ms", "silence_ms", "eager_silence_ms", "min_speech_ms"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")

    @property
    def exit_threshold(self) -> float:
        """A voiced run ends below this: the entry threshold less 0.15, but at least half of it."""
        return max(self.threshold - 0.15, self.threshold / 2)


@dataclass(frozen=True, slots=True)
class VoiceStarted:
    """Speech began at ``onset_sample``; ``start_sample`` is earlier by the prefix padding."""

    onset_sample: int
    start_sample: int


@dataclass(frozen=True, slots=True)
class VoicePaused:
    """Silence for ``eager_silence_ms``: the turn may have ended at ``last_voiced_sample``."""

    last_voiced_sample: int


@dataclass(frozen=True, slots=True)
class VoiceResumed:
    """Speech resumed at ``sample``: the turn goes on."""

    sample: int


@dataclass(frozen=True, slots=True)
class VoiceEnded:
    """The turn, voiced until ``last_voiced_sample``, was found to be over at ``at_sample``."""

    last_voiced_sample: int
    at_sample: int


VoiceEvent = VoiceStarted | VoicePaused | VoiceResumed | VoiceEnded


class VoiceState(Enum):
    """State of the caller's turn."""

    SILENT = "silent"
    SPEAKING = "speaking"
    PAUSED = "paused"


class Endpointer:
    """Turn state of one caller. ``config`` may be replaced at any time, also within a turn."""

    def __init__(self, config: ServerVadConfig) -> None:
        self.config = config
        self.reset()

    def reset(self) -> None:
        """Clear all state; a turn in progress ends without an event."""
        self.state = VoiceState.SILENT
        self._run_start: int | None = None
        self._last_voiced: int | None = None
        self._min_start: int | None = None
        self._now: int | None = None  # end of the last window
        self._end_silence_ms: int | None = None  # as configured

    def set_endpointing_delay(self, silence_ms: int) -> list[VoiceEvent]:
        """End the turn after ``silence_ms`` of this pause; returns its end if that has passed.

        Applies to the current pause only. No effect outside a pause.
        """
        if self.state is not VoiceState.PAUSED or self._now is None:
            return []
        self._end_silence_ms = silence_ms
        return [] if self._run_start is not None else self._on_silence(self._now)

    @property
    def last_voiced_sample(self) -> int | None:
        """End of the latest voiced window, of this turn or the last; None before any speech."""
        return self._last_voiced

    def process_window(
        self, probability: float, window_start_sample: int, window_end_sample: int
    ) -> list[VoiceEvent]:
        """Advance by one VAD window [start, end); returns the events that follow, in order.

        Windows must be given in order of time; their length is free.
        """
        if self._min_start is None:
            self._min_start = window_start_sample
        self._now = window_end_sample
        self._track_run(probability, window_start_sample)
        if self._run_start is None:
            return self._on_silence(window_end_sample)
        if window_end_sample - self._run_start < _samples(self.config.min_speech_ms):
            return []  # undecided: too short a run so far
        return self._on_voice(self._run_start, window_end_sample)

    def _track_run(self, probability: float, window_start: int) -> None:
        if self._run_start is None and probability >= self.config.threshold:
            self._run_start = window_start
        elif probability < self.config.exit_threshold:
            self._run_start = None

    def _on_voice(self, run_start: int, now: int) -> list[VoiceEvent]:
        before, self.state = self.state, VoiceState.SPEAKING
        self._last_voiced = now
        self._end_silence_ms = None  # as configured
        if before is VoiceState.SILENT:
            return [VoiceStarted(run_start, self._padded(run_start))]
        if before is VoiceState.PAUSED:
            return [VoiceResumed(run_start)]
        return []

    def _on_silence(self, now: int) -> list[VoiceEvent]:
        if self.state is VoiceState.SILENT or self._last_voiced is None:
            return []
        events: list[VoiceEvent] = []
        silence = now - self._last_voiced
        wait_ms = self._end_silence_ms
        end_silence = _samples(self.config.silence_ms if wait_ms is None else wait_ms)
        eager_silence = min(_samples(self.config.eager_silence_ms), end_silence)
        if self.state is VoiceState.SPEAKING and silence >= eager_silence:
            self.state = VoiceState.PAUSED
            events.append(VoicePaused(self._last_voiced))
        if self.state is VoiceState.PAUSED and silence >= end_silence:
            self.state = VoiceState.SILENT
            self._min_start = self._last_voiced
            events.append(VoiceEnded(self._last_voiced, now))
        return events

    def _padded(self, onset: int) -> int:
        """Start of the turn's audio, within the stream and after the end of the last turn."""
        min_start = 0 if self._min_start is None else self._min_start
        return max(min_start, onset - _samples(self.config.prefix_padding_ms))


def _samples(duration_ms: int) -> int:
    return duration_ms * SPEECH_RATE // 1000
