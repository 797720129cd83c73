"""Streaming sample-rate conversion without seams and with little delay.

A windowed sinc (Kaiser; Oppenheim and Schafer, "Discrete-Time Signal Processing", 7.5.3) that is
evaluated only where an output sample lies. Flat to 0.9 of the lower Nyquist frequency, 96 dB down
from 1.1 of it; the band between aliases around the Nyquist frequency, where speech has next to no
energy. The delay of a live stream is half the filter's length, in ms:

    rates            here   libsoxr, variable rate   libsoxr HQ
     8000 -> 16000    3.9            30              12 to 115
    22050 ->  8000    3.9            27              13 to 80
    24000 -> 16000    2.0            10               6 to 37
    48000 -> 16000    2.0            12.5             6 to 37
    22050 -> 24000    1.5            11               5 to 42

The delay adds to every response, so it matters more than a steeper edge.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, gcd, pi

import numpy as np

from audio.frame import Samples, silence

_ATTENUATION_DB = 96.0
# Pass-band and stop-band edges as fractions of the lower Nyquist frequency.
_PASS, _STOP = 0.9, 1.1
# Outputs per block: bounds the memory of long chunks.
_BLOCK = 4096
# Up to this many phases, each phase's outputs are a strided matrix product, without gathering.
_FEW_PHASES = 4


def resample(samples: Samples, in_rate: int, out_rate: int) -> Samples:
    """Convert a recording [n] to another rate: [n * out_rate / in_rate, rounded up]."""
    resampler = StreamResampler(in_rate, out_rate)
    return np.concatenate((resampler.process(samples), resampler.flush()))


class StreamResampler:
    """Converter of one stream; a new one per packet would make a seam per packet."""

    def __init__(self, in_rate: int, out_rate: int) -> None:
        """Rates in samples per second. Raises ValueError unless both are positive."""
        if in_rate <= 0 or out_rate <= 0:
            raise ValueError(f"sample rates must be positive, got {in_rate} and {out_rate}")
        self.in_rate = in_rate
        self.out_rate = out_rate
        divisor = gcd(in_rate, out_rate)
        self._up, self._down = out_rate // divisor, in_rate // divisor
        self._taps = _taps(self._up, self._down)
        self._half = self._taps.shape[1] // 2
        self.reset()

    def process(self, samples: Samples) -> Samples:
        """Output [m] that the input [n] completes; the last few ms are held back."""
        if self.in_rate == self.out_rate or samples.size == 0:
            return samples
        self._num_in += samples.size
        num_whole = ceil((self._num_in - self._half) * self._up / self._down)
        return self._until(max(0, num_whole), samples)

    def flush(self) -> Samples:
        """The rest of the output; resets the converter.

        In total the output of ``n`` samples is ``n * out_rate / in_rate`` long, rounded up.
        """
        if self.in_rate == self.out_rate:
            return silence(0)
        rest = self._until(ceil(self._num_in * self._up / self._down), silence(self._half))
        self.reset()
        return rest

    def reset(self) -> None:
        """Drop what is held back, ready for an unrelated stream."""
        self._num_in = 0
        self._num_out = 0
        # Input from `_first` on that future outputs need; silence before the stream.
        self._kept = silence(self._half - 1)
        self._first = 1 - self._half

    def _until(self, end: int, samples: Samples) -> Samples:
        """Outputs [_num_out, end), with ``samples`` appended to the kept input."""
        kept = np.concatenate((self._kept, samples), dtype=np.float32)
        blocks = [
            self._outputs(kept, start, min(start + _BLOCK, end))
            for start in range(self._num_out, end, _BLOCK)
        ]
        self._num_out = end
        unused = max(0, self._window_at(end) - self._first)
        self._kept = kept[unused:].copy()
        self._first += unused
        return np.concatenate(blocks) if blocks else silence(0)

    def _window_at(self, output: int) -> int:
        """First input sample that ``output`` depends on."""
        return int(output * self._down // self._up - self._half + 1)

    def _outputs(self, kept: Samples, start: int, end: int) -> Samples:
        windows = np.lib.stride_tricks.sliding_window_view(kept, self._taps.shape[1])
        if self._up <= _FEW_PHASES:
            out = np.empty(end - start, np.float32)
            for offset in range(min(self._up, end - start)):
                first = start + offset
                part = out[offset :: self._up]
                rows = windows[self._window_at(first) - self._first :: self._down][: part.size]
                part[:] = np.ascontiguousarray(rows) @ self._taps[first * self._down % self._up]
            return out
        outputs = np.arange(start, end)
        at = outputs * self._down // self._up - self._half + 1 - self._first
        taps = self._taps[outputs * self._down % self._up]
        gathered: Samples = np.einsum("nt,nt->n", windows[at], taps)
        return gathered


@lru_cache(maxsize=16)
def _taps(up: int, down: int) -> Samples:
    """The filter at each of its phases [up, 2 * half]: an output ``p / up`` after an input sample
    is the product of row ``p`` with the inputs from ``half - 1`` before that sample on.
    """
    # In units of the input's rate: its Nyquist frequency is 0.5.
    nyquist = 0.5 * min(1.0, up / down)
    width = (_STOP - _PASS) * nyquist
    half = ceil((_ATTENUATION_DB - 7.95) / (2.285 * 2 * pi * width) / 2)
    beta = 0.1102 * (_ATTENUATION_DB - 8.7)
    phases = np.arange(up)[:, None] / up
    distance = phases - np.arange(1 - half, half + 1)[None, :]
    window = np.i0(beta * np.sqrt(np.clip(1 - (distance / half) ** 2, 0, None))) / np.i0(beta)
    taps = 2 * nyquist * np.sinc(2 * nyquist * distance) * window
    taps /= taps.sum(axis=1, keepdims=True)  # unit gain at DC
    return taps.astype(np.float32)
