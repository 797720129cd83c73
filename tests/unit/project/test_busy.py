"""The stopwatch counts our own time, and not what others take."""

from __future__ import annotations

import time

from tests.support.busy import Stopwatch


def test_own_time_counts() -> None:
    watch = Stopwatch()
    time.sleep(0.05)
    begun_s = time.thread_time()
    while time.thread_time() - begun_s < 0.05:
        pass
    assert watch.took_s() > 0.09
    assert watch.lost_s() >= 0.0


def test_no_more_is_lost_on_the_machine_than_time_has_passed() -> None:
    began_s, watch = time.monotonic(), Stopwatch(of_machine=True)
    time.sleep(0.05)
    lost_s = watch.lost_s()
    # The kernel's sum is a little behind.
    assert 0.0 <= lost_s < time.monotonic() - began_s + 0.1
