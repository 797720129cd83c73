"""The stopwatch counts our own time, and not what others take."""

from __future__ import annotations

import time

from tests.busy import Stopwatch


def test_own_time_counts() -> None:
    watch = Stopwatch()
    time.sleep(0.05)
    begun_s = time.thread_time()
    while time.thread_time() - begun_s < 0.05:
        pass
    assert watch.took_s() > 0.09
    assert watch.lost_s() >= 0.0
