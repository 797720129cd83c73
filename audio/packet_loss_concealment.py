"""Packet loss concealment: repeats the last pitch period with a fade.

Waveform substitution as in ITU-T G.711 Appendix I, reduced to what a recogniser needs: a single
lost packet makes no gap for the VAD, and no hum outlasts the speech.

    history          | concealed: full level for 10 ms, faded out by 60 ms, then silence | next
    ...[pitch period] [period][period][peri...                                            cross-fade
"""

from __future__ import annotations

import numpy as np

from audio.frame import Samples, silence

_HOLD_S, _FADED_S = 0.010, 0.060
_CROSS_FADE_S = 0.005
# A voice's pitch: 66 to 400 Hz.
_MIN_PERIOD_S, _MAX_PERIOD_S = 0.0025, 0.015
_TEMPLATE_S = 0.020
# The pitch search runs at a low rate, where it is cheap.
_SEARCH_RATE = 8_000


class PacketLossConcealer:
    """Concealer of one stream. ``rate`` in Hz, a multiple of 8,000."""

    def __init__(self, rate: int) -> None:
        if rate % _SEARCH_RATE:
            raise ValueError(f"the rate must be a multiple of {_SEARCH_RATE}, got {rate}")
        self._rate = rate
        self._history = silence(round((_TEMPLATE_S + 2 * _MAX_PERIOD_S) * rate))
        self._period = silence(0)  # repeated in the current gap
        self._made = 0  # samples concealed in the current gap

    def good(self, samples: Samples) -> Samples:
        """Pass received audio through; after a gap, cross-fade from the concealment."""
        if self._made and len(samples):
            length = min(len(samples), round(_CROSS_FADE_S * self._rate))
            rising = np.linspace(0.0, 1.0, length, endpoint=False, dtype=np.float32)
            samples = samples.copy()
            samples[:length] = samples[:length] * rising + self._extend(length) * (1 - rising)
            self._made = 0
        self._remember(samples)
        return samples

    def conceal(self, num_samples: int) -> Samples:
        """Audio for a gap of ``num_samples``; consecutive calls extend the gap."""
        if not self._made:
            self._period = self._history[-self._find_period() :].copy()
        return self._extend(num_samples)

    def _extend(self, num_samples: int) -> Samples:
        at = np.arange(self._made, self._made + num_samples)
        self._made += num_samples
        hold, faded = _HOLD_S * self._rate, _FADED_S * self._rate
        gain = np.clip((faded - at) / (faded - hold), 0.0, 1.0).astype(np.float32)
        made: Samples = self._period[at % len(self._period)] * gain
        return made

    def _remember(self, samples: Samples) -> None:
        keep = len(self._history)
        self._history = np.concatenate((self._history, samples))[-keep:]

    def _find_period(self) -> int:
        """Pitch period in samples: the lag of best autocorrelation at the end of the history."""
        step = self._rate // _SEARCH_RATE
        # Block averages: a low-pass that is good enough for a pitch search.
        whole = len(self._history) // step * step
        past = self._history[-whole:].reshape(-1, step).mean(axis=1)
        length = round(_TEMPLATE_S * _SEARCH_RATE)
        shortest = round(_MIN_PERIOD_S * _SEARCH_RATE)
        longest = round(_MAX_PERIOD_S * _SEARCH_RATE)
        template = past[-length:]
        best, best_score = longest, -1.0
        for lag in range(shortest, longest + 1):
            other = past[-length - lag : -lag]
            score = float(template @ other) / (float(other @ other) ** 0.5 + 1e-9)
            if score > best_score:
                best, best_score = lag, score
        return best * step
