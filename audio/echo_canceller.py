"""Our own voice, taken out of what the caller's microphone hears (WebRTC's AEC3).

For callers without echo cancellation (speakerphones). What was played is known; an adaptive filter
learns how it comes back, however late and through whatever room, and takes it away, so that who
speaks over it is still heard. Works on whole frames of 10 ms; positions are samples of the caller's
input at 16 kHz.

    played    ---|##  ###  #|---------
    heard     --------|##o ###oo#|ooo-    o: the caller
    cleaned   -----------|o  ooo |ooo-
"""

from __future__ import annotations

from collections import deque

import numpy as np
from pywebrtc_audio import EchoCanceller as Aec3

from audio.frame import SPEECH_RATE, Samples, silence
from audio.resample import StreamResampler

FRAME = SPEECH_RATE // 100
# Of what was played in the last 0.3 s, so many frames of 10 ms must be above -50 dB for the
# microphone to have had something to hear.
_HEARABLE_FRAMES, _LOUD_FRAMES, _LOUD = 30, 5, 1e-5
# Windows in which it had and nothing was heard: so many (0.64 s, later than echoes come), and it
# does not hear us, which then counts like the most. One where a voice was heard that is gone once
# ours is taken away weighs as much as several of them.
_DEAF, _MOST_DEAF, _ECHO_WEIGHT = 20, 60, 4
# An echo comes at most so much later than the clock says that it was played: network, the player's
# buffer, the room.
_TAIL_SAMPLES = SPEECH_RATE


class EchoCanceller:
    """One caller's."""

    def __init__(self) -> None:
        self._aec: Aec3 | None = None  # most calls end before it is needed, or have their own
        self._played: deque[tuple[int, Samples]] = deque()  # where it sounds, in order
        self._resampler = StreamResampler(SPEECH_RATE, SPEECH_RATE)
        self._ends = 0  # of what was played, in its own samples' count
        self._sounds_until = 0
        self._loud: deque[bool] = deque(maxlen=_HEARABLE_FRAMES)
        self._num_deaf = 0

    def play(self, samples: Samples, rate: int, position: int) -> None:
        """Note that float32 [n] at ``rate`` sounds at the caller's from ``position`` on.

        What follows closely on what was noted before is taken to join it without a gap; what else
        begins before the end of that takes its place.
        """
        if rate != self._resampler.in_rate:
            self._resampler = StreamResampler(rate, SPEECH_RATE)
        if abs(position - self._ends) > FRAME:  # after a pause
            self._resampler.reset()
            self._cut(position)
            self._ends = position
        at = self._ends
        piece = self._resampler.process(samples)
        if piece.size:
            self._played.append((at, piece))
            self._ends = at + piece.size
            self._sounds_until = self._ends + _TAIL_SAMPLES

    def stop(self, position: int) -> None:
        """Nothing is played from ``position`` on."""
        self._cut(position)
        if self._ends > position:
            self._ends = position
            self._sounds_until = position + _TAIL_SAMPLES

    def forget(self, position: int) -> None:
        """Nothing before ``position`` will be asked for; to be told now and then, since who minds
        no echo never asks."""
        while self._played and self._played[0][0] + self._played[0][1].size <= position:
            self._played.popleft()

    def is_sounding(self, position: int) -> bool:
        """Something that was played may be heard at ``position``, or will be."""
        return position < self._sounds_until

    def clean(self, heard: Samples, position: int) -> Samples:
        """``heard`` float32 [n], whole frames from ``position`` on, without our own voice."""
        if not heard.size:
            return heard
        if self._aec is None:
            self._aec = Aec3(sample_rate=SPEECH_RATE)
        played = self._take(position, heard.size)
        self._loud.extend(np.mean(np.square(played.reshape(-1, FRAME)), axis=1) > _LOUD)
        cleaned: Samples = self._aec.process(heard, played)
        return cleaned

    def judge(self, heard: float, cleaned: float, is_voice_from: float) -> float:
        """The probability of the caller's voice in a window: as heard, and without our own voice.

        Cancelling costs some of the caller's voice as well, most of all where there is no echo that
        could be learned from (headsets, clients that cancel it themselves). So a microphone that
        has not heard us for a while is believed.
        """
        if heard < is_voice_from:
            if sum(self._loud) >= _LOUD_FRAMES:
                self._num_deaf += 1
            if self._num_deaf >= _DEAF:
                self._num_deaf = _MOST_DEAF
            return heard
        is_deaf = self._num_deaf >= _DEAF
        if cleaned < is_voice_from:
            self._num_deaf = max(0, self._num_deaf - _ECHO_WEIGHT)
        return heard if is_deaf else cleaned

    def _take(self, start: int, num: int) -> Samples:
        """What was played in [start, start + num); older things are forgotten."""
        out = silence(num)
        self.forget(start)
        for at, piece in self._played:
            if at >= start + num:
                break
            first, last = max(at, start), min(at + piece.size, start + num)
            if first < last:
                out[first - start : last - start] = piece[first - at : last - at]
        return out

    def _cut(self, position: int) -> None:
        """Take back what sounds from ``position`` on."""
        while self._played and self._played[-1][0] >= position:
            self._played.pop()
        if self._played:
            start, piece = self._played.pop()
            self._played.append((start, piece[: position - start]))
