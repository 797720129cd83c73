"""What a server still holds when its callers have gone: objects of ours, and resident memory."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
from collections import Counter
from pathlib import Path

PATIENCE_S = 10.0
# Of callers and their connections. What is kept on purpose is not counted: traces, and how much of
# its limits a key or account has used (both have a limit of their own).
_PACKAGE = "app"
_KEPT = ("app.observe", "app.access.rate_limits")
# Pools, caches and fragmentation: a session that is left behind costs more than this in 50.
MAX_GROWTH_MB = 8.0


def _live_objects() -> Counter[str]:
    gc.collect()
    counts: Counter[str] = Counter()
    for thing in gc.get_objects():
        kind = type(thing)
        module = getattr(kind, "__module__", None)
        if not isinstance(module, str) or module.partition(".")[0] != _PACKAGE:
            continue
        if not module.startswith(_KEPT):
            counts[f"{module}.{kind.__qualname__}"] += 1
    return counts


def _resident_mb() -> float:
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # what is free and was not given back is no leak
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / 1e6


class Memory:
    """What there is now. Make it after a few callers, so that pools and caches are there."""

    def __init__(self) -> None:
        self._objects, self._resident_mb = _live_objects(), _resident_mb()

    def left(self) -> dict[str, int]:
        """Objects that were not there, by class."""
        return dict(_live_objects() - self._objects)

    async def assert_returned(self, max_growth_mb: float = MAX_GROWTH_MB) -> None:
        """Waits until no object is left; fails with what is, or with memory that is not freed."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while self.left():  # noqa: ASYNC110 - what is waited for sets no event
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise AssertionError(f"objects left: {self.left()}") from None
        grown_mb = _resident_mb() - self._resident_mb
        print(f"resident memory: {grown_mb:+.1f} MB")
        assert grown_mb < max_growth_mb
