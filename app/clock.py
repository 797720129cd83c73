"""The one clock. Code that measures or waits takes it as an argument, so that tests never sleep."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic time and waiting."""

    def now_ns(self) -> int:
        """Nanoseconds of a monotonic clock shared by all processes of this machine."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait; not shorter than asked."""
        ...


class MonotonicClock:
    """The real clock (``time.monotonic_ns``)."""

    def now_ns(self) -> int:
        """See ``Clock``."""
        return time.monotonic_ns()

    async def sleep(self, seconds: float) -> None:
        """See ``Clock``."""
        await asyncio.sleep(seconds)
