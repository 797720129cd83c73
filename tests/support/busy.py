"""How long this process has waited for a core: what bounds on wall time must forgive.

A test that bounds how long something takes means the time that we take, not that which other
programs take from us. Linux counts it for each thread (``/proc/.../schedstat``, second figure), and
for the whole machine (``/proc/pressure/cpu``), where other processes of ours are what is timed.
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


def _machine_waited_s() -> float:
    """Seconds in which any program of this machine was ready to run and had no core; or 0."""
    pressure = Path("/proc/pressure/cpu")
    if not pressure.exists():
        return 0.0
    some = pressure.read_text(encoding="ascii").splitlines()[0]
    return int(some.rpartition("total=")[2]) / 1e6


class Stopwatch:
    """Wall time since it was made, less the time that a busy machine has cost us.

    ``of_machine``: for what other processes do. It forgives more: any wait, whoever waits.
    """

    def __init__(self, *, of_machine: bool = False) -> None:
        self._waited = _machine_waited_s if of_machine else _waited_s
        self._began_s, self._waited_s = time.monotonic(), self._waited()

    def lost_s(self) -> float:
        """Seconds that other programs have taken from us."""
        return max(0.0, self._waited() - self._waited_s)

    def took_s(self) -> float:
        """Seconds that we have taken, waiting for timers and sockets included."""
        return time.monotonic() - self._began_s - self.lost_s()
