"""How late the event loop is. A late loop delays every caller, so it is measured all the time."""

from __future__ import annotations

import asyncio
import time
from collections import deque

_PERIOD_NS = 10_000_000
_KEPT = 6_000  # a minute


class LoopLag:
    """Sleeps 10 ms over and over and notes by how much each sleep was too long.

    Costs a wake-up every 10 ms, about 0.1% of a core.
    """

    def __init__(self) -> None:
        # (instant ns, lag ns). Overflow rule: the oldest is forgotten.
        self._samples: deque[tuple[int, int]] = deque(maxlen=_KEPT)

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            asked_ns = time.monotonic_ns()
            await asyncio.sleep(_PERIOD_NS / 1e9)
            now_ns = time.monotonic_ns()
            self._samples.append((now_ns, max(0, now_ns - asked_ns - _PERIOD_NS)))

    def percentile_ms(self, percent: float, since_ns: int = 0) -> float | None:
        """The lag not exceeded in ``percent`` of the time since ``since_ns``; None: unknown.

        A long block is one sample only, but whoever comes while it lasts waits; so each sample
        counts for as long as it took.
        """
        lags = sorted(lag for at, lag in self._samples if at >= since_ns)
        whole_ns = sum(lag + _PERIOD_NS for lag in lags)
        passed_ns = 0
        for lag in lags:
            passed_ns += lag + _PERIOD_NS
            if passed_ns >= whole_ns * percent / 100:
                return lag / 1e6
        return None
