"""From voice probabilities to turns: when a caller starts, pauses, goes on, and has finished.

Pure bookkeeping without I/O or clock: time is counted in samples at 16 kHz. A run of windows is
voice from the first probability at or above the entry threshold until one falls below the exit
threshold; a run counts once it is ``min_speech_ms`` long, so that a click starts, resumes and
prolongs nothing.

    SILENT --VoiceStarted--> SPEAKING --VoicePaused--> PAUSED --VoiceEnded--> SILENT
                                 ^-----VoiceResumed------'

How much silence ends a turn is fixed (`server_vad`) or judged at each pause (`semantic_vad`): then
whoever knows what was said calls ``wait_for`` while the caller pauses, see
``audio.endpointing.semantic``.

    samples  [start, onset) padding | [onset, last_voiced) voice | [last_voiced, at) silence
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from audio.frame import SPEECH_RATE


@dataclass(frozen=True, slots=True)
class ServerVadConfig:
    """When voice counts and when silence ends a turn. Raises ValueError on impossible values.

    ``min_speech_ms`` 64 (two windows): on our recordings no spoken word makes a shorter run, and
    11 of 14 noise recordings start no turn (of the others one is a crowd of voices). Faint noises
    that look like a distant voice for longer than the shortest word cannot be told apart here; the
    recogniser's guard answers them with an empty transcript.
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
        """Voice goes on down to this probability: 0.15 below the entry, at least half of it."""
        return max(self.threshold - 0.15, self.threshold / 2)


@dataclass(frozen=True, slots=True)
class VoiceStarted:
    """The caller speaks since ``onset_sample``; ``start_sample`` is earlier by the padding."""

    onset_sample: int
    start_sample: int


@dataclass(frozen=True, slots=True)
class VoicePaused:
    """Silence for ``eager_silence_ms``: perhaps the turn ended at ``last_voiced_sample``."""

    last_voiced_sample: int


@dataclass(frozen=True, slots=True)
class VoiceResumed:
    """The pause was only a pause; the voice came back at ``sample``."""

    sample: int


@dataclass(frozen=True, slots=True)
class VoiceEnded:
    """Silence for ``silence_ms``: decided at ``at_sample``, voice ended at the other one."""

    last_voiced_sample: int
    at_sample: int


VoiceEvent = VoiceStarted | VoicePaused | VoiceResumed | VoiceEnded


class VoiceState(Enum):
    """Where the caller's turn stands."""

    SILENT = "silent"
    SPEAKING = "speaking"
    PAUSED = "paused"


class Endpointer:
    """One caller's turn state. ``config`` may be replaced at any time, also within a turn."""

    def __init__(self, config: ServerVadConfig) -> None:
        self.config = config
        self.reset()

    def reset(self) -> None:
        """Forgets everything; a turn in progress ends without an event."""
        self.state = VoiceState.SILENT
        self._run_start: int | None = None
        self._last_voiced: int | None = None
        self._floor: int | None = None
        self._judged: int | None = None  # end of the last window
        self._end_silence_ms: int | None = None  # as configured

    def wait_for(self, silence_ms: int) -> list[VoiceEvent]:
        """In this pause ``silence_ms`` end the turn; returns its end when they are over already.

        Forgotten when the voice comes back. Without a pause, nothing happens.
        """
        if self.state is not VoiceState.PAUSED or self._judged is None:
            return []
        self._end_silence_ms = silence_ms
        return [] if self._run_start is not None else self._on_silence(self._judged)

    @property
    def last_voiced_sample(self) -> int | None:
        """End of the latest voice, this turn's or the last one's; None before any."""
        return self._last_voiced

    def feed(
        self, probability: float, window_start_sample: int, window_end_sample: int
    ) -> list[VoiceEvent]:
        """Takes the probability of voice in [start, end); returns what follows from it, in order.

        Windows must follow one another in time. Their length is free.
        """
        if self._floor is None:
            self._floor = window_start_sample
        self._judged = window_end_sample
        self._track_run(probability, window_start_sample)
        if self._run_start is None:
            return self._on_silence(window_end_sample)
        if window_end_sample - self._run_start < _samples(self.config.min_speech_ms):
            return []  # maybe voice: the next windows decide, and until then nothing ends
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
            self._floor = self._last_voiced
            events.append(VoiceEnded(self._last_voiced, now))
        return events

    def _padded(self, onset: int) -> int:
        """Start of the turn's audio: never before the stream, never inside the last turn."""
        floor = 0 if self._floor is None else self._floor
        return max(floor, onset - _samples(self.config.prefix_padding_ms))


def _samples(duration_ms: int) -> int:
    return duration_ms * SPEECH_RATE // 1000
