"""Acoustic echo cancellation of the caller's input (WebRTC's AEC3).

For callers without echo cancellation of their own (speakerphones). The playback is the reference
signal; an adaptive filter learns its delay and the room, and subtracts the echo, so that a caller
who speaks over the playback is still heard. Works on whole frames of 10 ms; positions are samples
of the caller's input at 16 kHz.

    played     ---|##  ###  #|---------
    input      --------|##o ###oo#|ooo-    o: the caller
    cancelled  -----------|o  ooo |ooo-
"""

from __future__ import annotations

from collections import deque

import numpy as np
from pywebrtc_audio import EchoCanceller as Aec3

from audio.frame import SPEECH_RATE, Samples, silence
from audio.resample import StreamResampler

FRAME_SAMPLES = SPEECH_RATE // 100
# The playback could cause an echo if, of its last 30 frames of 10 ms, 5 are above -50 dB.
_REFERENCE_FRAMES, _MIN_LOUD_FRAMES, _LOUD = 30, 5, 1e-5
# VAD windows without an echo although the playback could cause one: from 20 (0.64 s, longer than an
# echo takes) the line is echo-free, and the count jumps to its maximum. A window with speech that
# vanishes by cancellation, an echo, takes 4 off the count.
_ECHO_FREE_FROM, _MAX_ECHO_FREE, _ECHO_WEIGHT = 20, 60, 4
# Maximum delay of an echo after its time of playback: network, the player's buffer, the room.
_TAIL_SAMPLES = SPEECH_RATE


class EchoCanceller:
    """Echo canceller of one caller."""

    def __init__(self) -> None:
        self._aec: Aec3 | None = (
            None  # created when first needed: many clients cancel echo themselves
        )
        self._played: deque[tuple[int, Samples]] = deque()  # position and samples, in order
        self._resampler = StreamResampler(SPEECH_RATE, SPEECH_RATE)
        self._ends = 0  # end of the playback noted so far
        self._sounds_until = 0
        self._loud: deque[bool] = deque(maxlen=_REFERENCE_FRAMES)
        self._num_echo_free = 0

    def add_playback(self, samples: Samples, rate: int, position: int) -> None:
        """Note that float32 [n] at ``rate`` plays at the caller's from ``position`` on.

        Audio within 10 ms of the end of the playback noted before joins it without a gap; other
        audio that overlaps it replaces the rest of it.
        """
        if rate != self._resampler.in_rate:
            self._resampler = StreamResampler(rate, SPEECH_RATE)
        if abs(position - self._ends) > FRAME_SAMPLES:  # after a pause
            self._resampler.reset()
            self._cut(position)
            self._ends = position
        at = self._ends
        piece = self._resampler.process(samples)
        if piece.size:
            self._played.append((at, piece))
            self._ends = at + piece.size
            self._sounds_until = self._ends + _TAIL_SAMPLES

    def stop_playback(self, position: int) -> None:
        """Note that nothing plays from ``position`` on."""
        self._cut(position)
        if self._ends > position:
            self._ends = position
            self._sounds_until = position + _TAIL_SAMPLES

    def discard_before(self, position: int) -> None:
        """Drop playback before ``position``; `cancel` does so as well."""
        while self._played and self._played[0][0] + self._played[0][1].size <= position:
            self._played.popleft()

    def may_echo_at(self, position: int) -> bool:
        """True when playback, or its echo, may be audible at ``position``."""
        return position < self._sounds_until

    def cancel(self, heard: Samples, position: int) -> Samples:
        """Cancel the echo in ``heard``: float32 [n], whole frames from ``position`` on."""
        if not heard.size:
            return heard
        if self._aec is None:
            self._aec = Aec3(sample_rate=SPEECH_RATE)
        played = self._take(position, heard.size)
        self._loud.extend(np.mean(np.square(played.reshape(-1, FRAME_SAMPLES)), axis=1) > _LOUD)
        cleaned: Samples = self._aec.process(heard, played)
        return cleaned

    def gate_probability(self, heard: float, cleaned: float, exit_threshold: float) -> float:
        """Speech probability of the caller in a window, from those before and after cancellation.

        Cancellation also attenuates the caller, most of all where there is no echo to adapt to
        (headsets, clients that cancel it themselves). On a line without echo for a while the
        probability before cancellation is used.
        """
        if heard < exit_threshold:
            if sum(self._loud) >= _MIN_LOUD_FRAMES:
                self._num_echo_free += 1
            if self._num_echo_free >= _ECHO_FREE_FROM:
                self._num_echo_free = _MAX_ECHO_FREE
            return heard
        is_echo_free = self._num_echo_free >= _ECHO_FREE_FROM
        if cleaned < exit_threshold:
            self._num_echo_free = max(0, self._num_echo_free - _ECHO_WEIGHT)
        return heard if is_echo_free else cleaned

    def _take(self, start: int, num: int) -> Samples:
        """Playback in [start, start + num); drops what is older."""
        out = silence(num)
        self.discard_before(start)
        for at, piece in self._played:
            if at >= start + num:
                break
            first, last = max(at, start), min(at + piece.size, start + num)
            if first < last:
                out[first - start : last - start] = piece[first - at : last - at]
        return out

    def _cut(self, position: int) -> None:
        """Drop playback from ``position`` on."""
        while self._played and self._played[-1][0] >= position:
            self._played.pop()
        if self._played:
            start, piece = self._played.pop()
            self._played.append((start, piece[: position - start]))
