"""Sound for audio that never came: the last pitch period again and again, fading out.

The idea of ITU-T G.711 Appendix I (waveform substitution), shortened to what a recogniser needs: no
hole for the voice detector to fall into at one lost packet, and no hum that outlives the voice.

    history          | made up: 10 ms as loud as before, fading until 60 ms, then silence | next
    ...[pitch period] [period][period][peri...                                             mixed in
"""

from __future__ import annotations

import numpy as np

from audio.frame import Samples, silence

_HOLD_S, _FADED_S = 0.010, 0.060
_CROSS_FADE_S = 0.005
# A voice's pitch: 66 to 400 Hz.
_MIN_PERIOD_S, _MAX_PERIOD_S = 0.0025, 0.015
_TEMPLATE_S = 0.020
# The pitch is looked for at a rate at which that is cheap.
_SEARCH_RATE = 8_000


class PacketLossConcealer:
    """One stream's. ``rate`` in samples per second, a multiple of 8,000."""

    def __init__(self, rate: int) -> None:
        if rate % _SEARCH_RATE:
            raise ValueError(f"the rate must be a multiple of {_SEARCH_RATE}, got {rate}")
        self._rate = rate
        self._history = silence(round((_TEMPLATE_S + 2 * _MAX_PERIOD_S) * rate))
        self._period = silence(0)  # what is repeated in the running gap
        self._made = 0  # samples of the running gap

    def good(self, samples: Samples) -> Samples:
        """Audio that came. Behind a gap its beginning is joined to what was made up."""
        if self._made and len(samples):
            length = min(len(samples), round(_CROSS_FADE_S * self._rate))
            rising = np.linspace(0.0, 1.0, length, endpoint=False, dtype=np.float32)
            samples = samples.copy()
            samples[:length] = samples[:length] * rising + self._extend(length) * (1 - rising)
            self._made = 0
        self._remember(samples)
        return samples

    def conceal(self, num_samples: int) -> Samples:
        """Audio for a gap of ``num_samples``; gaps behind one another are one gap."""
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
        """Samples after which the end of the history resembles itself most."""
        step = self._rate // _SEARCH_RATE
        # Averages of ``step`` samples: a low-pass that is good enough to find a period.
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
