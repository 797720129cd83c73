"""How late the event loop is. A late loop delays every caller, so it is measured all the time."""

from __future__ import annotations

import asyncio
import time
from collections import deque

_PERIOD_S = 0.01
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
            await asyncio.sleep(_PERIOD_S)
            now_ns = time.monotonic_ns()
            self._samples.append((now_ns, max(0, now_ns - asked_ns - int(_PERIOD_S * 1e9))))

    def percentile_ms(self, percent: float, since_ns: int = 0) -> float | None:
        """The lag that ``percent`` of the samples since ``since_ns`` do not exceed; None: none."""
        lags = sorted(lag for at, lag in self._samples if at >= since_ns)
        if not lags:
            return None
        return lags[min(len(lags) - 1, int(len(lags) * percent / 100))] / 1e6
