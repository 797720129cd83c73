"""The loop's lag is measured, and pauses of the interpreter itself are avoided."""

from __future__ import annotations

import asyncio
import gc
import sys
import time

from app.observe.loop_lag import LoopLag
from app.server.lifecycle import favour_the_event_loop


async def test_a_blocked_loop_shows() -> None:
    lag = LoopLag()
    assert lag.percentile_ms(99) is None
    watch = asyncio.create_task(lag.run())
    await asyncio.sleep(0.03)
    before_ns = time.monotonic_ns()
    time.sleep(0.2)  # noqa: ASYNC251 - the very thing that must not happen
    await asyncio.sleep(0.03)
    watch.cancel()
    worst = lag.percentile_ms(100, before_ns)
    assert worst is not None and worst >= 150
    assert lag.percentile_ms(99, time.monotonic_ns()) is None


def test_a_server_leaves_what_it_has_loaded_out_of_garbage_collections() -> None:
    interval_s = sys.getswitchinterval()
    try:
        favour_the_event_loop()
        assert len(gc.get_objects()) < 1000  # of more than 100,000
        assert sys.getswitchinterval() < interval_s
        kept = [[number] for number in range(2000)]
        assert len(gc.get_objects()) > len(kept)  # what comes later is looked at
    finally:
        gc.unfreeze()
        sys.setswitchinterval(interval_s)
