"""The loop's lag is seen, and a loop that is not blocked shows little of it."""

from __future__ import annotations

import asyncio
import time

from app.observe.loop_lag import LoopLag


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
