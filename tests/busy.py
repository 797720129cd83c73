"""How long this process has waited for a core: what bounds on wall time must forgive.

A test that bounds how long something takes means the time that we take, not that which other
programs take from us. Linux counts it for each thread (``/proc/.../schedstat``, second figure).
"""

from __future__ import annotations

import time
from pathlib import Path


def _waited_s() -> float:
    """Seconds that the threads of this process were ready to run and had no core; 0 if unknown."""
    waited_ns = 0
    for task in Path("/proc/self/task").glob("*/schedstat"):
        try:
            waited_ns += int(task.read_text(encoding="ascii").split()[1])
        except OSError:  # the thread has ended
            continue
    return waited_ns / 1e9


class Stopwatch:
    """Wall time since it was made, less the time that a busy machine has cost us."""

    def __init__(self) -> None:
        self._began_s, self._waited_s = time.monotonic(), _waited_s()

    def lost_s(self) -> float:
        """Seconds that other programs have taken from us."""
        return max(0.0, _waited_s() - self._waited_s)

    def took_s(self) -> float:
        """Seconds that we have taken, waiting for timers and sockets included."""
        return time.monotonic() - self._began_s - self.lost_s()
