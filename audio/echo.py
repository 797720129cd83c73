"""Is the voice in the microphone our own, coming back from the caller's loudspeaker?

For callers without echo cancellation (speakerphones). What was played is known; an echo of it is
the same sound, later and through a room, so its rise and fall in each band of frequencies follows
that of what was played, while another voice does not. No signal is subtracted: the question is only
whether a voice may count as the caller's.

    played    ---|##  ###  #|---------        per band, on a grid of 16 ms
    heard     --------|##  ###  #|----        the same, some delay later: an echo
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from audio.frame import SPEECH_RATE, Samples

Bands = NDArray[np.float32]

_HOP = 256
_WINDOW = 512
_EDGES_HZ = (200, 350, 500, 700, 950, 1_250, 1_600, 2_000, 2_500, 3_100, 3_700)
_NUM_BANDS = len(_EDGES_HZ) - 1
_FLOOR = 1e-9
# Below this share of a band's mean power lies noise, or silence; it must not weigh.
_RELATIVE_FLOOR = 0.03
# Compared: the last 0.4 s of what was heard. An echo comes at most so much later than the clock
# says that it was played: network, the player's buffer, the room.
_COMPARED_HOPS = 26
_MAX_DELAY_HOPS = 45
_EARLIEST_HOPS = 3
# Correlation with another real voice: 0.3, at the 90th percentile 0.45; with an echo: 0.75, at the
# 10th 0.48. Smoothed over a few windows the two are apart.
_SIMILAR = 0.5
_SMOOTHING = 0.35
# A caller whose microphone has heard us for so many windows will hear us again: less is asked then,
# and the first moments of an answer, which cannot be compared yet, are not taken for a voice.
_KNOWN_WINDOWS = 6
_SIMILAR_KNOWN = 0.4
_MIN_LOUD_HOPS = 4
_LOUD = 1e-4


class EchoGuard:
    """What was played and what is heard, of one caller. Positions are samples at 16 kHz."""

    def __init__(self) -> None:
        self._played: dict[int, Bands] = {}  # by hop
        self._heard: deque[tuple[int, Bands]] = deque(maxlen=_COMPARED_HOPS)
        self._last = np.zeros(_HOP, np.float32)
        self._smooth = 0.0
        self._num_echoes = 0

    def play(self, samples: Samples, rate: int, position: int) -> None:
        """Note that float32 [n] at ``rate`` sounds at the caller's from ``position`` on."""
        hop, window = rate * _HOP // SPEECH_RATE, rate * _WINDOW // SPEECH_RATE
        first = position // _HOP
        padded = np.concatenate((np.zeros(hop, np.float32), samples))
        for index in range(samples.size // hop):
            piece = padded[index * hop : index * hop + window]
            self._played[first + index] = _bands(piece, rate)

    def stop(self, position: int) -> None:
        """Nothing sounds from ``position`` on."""
        for hop in [hop for hop in self._played if hop * _HOP >= position - _HOP]:
            del self._played[hop]

    @property
    def is_sounding(self) -> bool:
        """Something was played lately, or will be."""
        return bool(self._played)

    def hear(self, window: Samples, position: int) -> None:
        """Take float32 [512] heard from ``position`` on, in order. Windows may be left out."""
        hop = position // _HOP
        if self._heard and self._heard[-1][0] != hop - 1:
            # Nobody listened for a while: what was heard before has no place beside this.
            self._heard.clear()
            self._last = np.zeros(_HOP, np.float32)
        for offset in (0, 1):
            half = window[offset * _HOP : (offset + 1) * _HOP]
            self._heard.append((hop + offset, _bands(np.concatenate((self._last, half)))))
            self._last = half
        oldest = hop - _COMPARED_HOPS - _MAX_DELAY_HOPS
        for old in [played for played in self._played if played < oldest]:
            del self._played[old]

    def is_echo(self) -> bool:
        """Whether what was heard last is what was played."""
        if not self.is_sounding or not self._heard:
            self._smooth = 0.0
            return False
        similarity = self.similarity()
        is_known = self._num_echoes >= _KNOWN_WINDOWS
        if similarity is None:
            return is_known
        if self._smooth == 0.0:
            self._smooth = similarity
        self._smooth += _SMOOTHING * (similarity - self._smooth)
        found = self._smooth >= (_SIMILAR_KNOWN if is_known else _SIMILAR)
        self._num_echoes += found
        return found

    def similarity(self) -> float | None:
        """Highest correlation of what is heard with what was played, over all delays; in [-1, 1].

        None when too little was played that could be compared.
        """
        heard = np.stack([bands for _, bands in self._heard])
        hops = [hop for hop, _ in self._heard]
        quiet = np.zeros(_NUM_BANDS, np.float32)
        start, length = hops[0] - _MAX_DELAY_HOPS, hops[-1] - hops[0] + 1
        span = _MAX_DELAY_HOPS + length + _EARLIEST_HOPS
        played = np.stack([self._played.get(start + i, quiet) for i in range(span)])
        best: float | None = None
        logs_heard = _centred(heard)
        norm_heard = float(np.linalg.norm(logs_heard))
        for at in range(span - length + 1):
            reference = played[at : at + length]
            if (reference.max(axis=1) > _LOUD).sum() < _MIN_LOUD_HOPS:
                continue
            logs = _centred(reference)
            norm = float(np.linalg.norm(logs)) * norm_heard
            if norm > 0:
                found = float((logs * logs_heard).sum()) / norm
                best = found if best is None else max(best, found)
        return best


def _centred(bands: Bands) -> Bands:
    """The changing shape of the spectrum [t, bands], in logarithms.

    Without the mean of each band, since rooms colour sounds, and without the loudness of each hop,
    since all voices come in syllables.
    """
    logs = np.log(bands + bands.mean(axis=0) * _RELATIVE_FLOOR + _FLOOR)
    logs = logs - logs.mean(axis=0)
    centred: Bands = logs - logs.mean(axis=1, keepdims=True)
    return centred


def _bands(samples: Samples, rate: int = SPEECH_RATE) -> Bands:
    """Power in each band, of a windowed piece; the same whatever the rate."""
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(samples.size))) ** 2 / samples.size**2
    edges = [edge * samples.size // rate for edge in _EDGES_HZ]
    powers = np.add.reduceat(spectrum[: edges[-1]], edges[:-1])
    return powers.astype(np.float32)
