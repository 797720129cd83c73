"""Judges by an engine's signs of life whether it hangs.

The engine sends at least one a second, and says how long it has been at what it does. The judge
counts only time in which its own program ran: after a suspension of both, or of ours alone, the
engine is given the time to be heard. What may take longer than the limit has a limit of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from llm_core.progress import Doing

_PERIOD_S = 1.0
_LEAST_IN_LIMIT = 5  # beats

# A prompt's first chunk on a slow machine with a large model, or kernels that are compiled when
# they are first needed.
_LONG_S: dict[Doing, float] = {"model": 120.0, "guide": 60.0}
_NAMES: dict[Doing, str] = {
    "nothing": "nothing",
    "commands": "taking requests",
    "step": "a step",
    "model": "computing",
    "guide": "compiling a guide",
}


def period_s(limit_s: float) -> float:
    """Of signs of life, and of looking for them, where an engine may be silent for ``limit_s``."""
    return min(_PERIOD_S, limit_s / _LEAST_IN_LIMIT) if limit_s > 0 else _PERIOD_S


class Heartbeat:
    """One engine's. ``limit_s``: how long it may be silent, or busy with one thing; 0: for ever."""

    def __init__(self, limit_s: float) -> None:
        self.period_s = period_s(limit_s)
        self._limit_s = limit_s
        self._silent_s = 0.0
        self._stuck = ""

    def heard(self) -> None:
        """Anything has come from the engine."""
        self._silent_s = 0.0

    def beat(self, threads: Iterable[tuple[Doing, float]]) -> None:
        """The engine has said what its threads are doing, and for how many seconds."""
        self._stuck = ""
        for doing, busy_s in threads:
            allowed_s = max(self._limit_s, _LONG_S.get(doing, 0.0))
            if busy_s > allowed_s and self._limit_s > 0:
                self._stuck = f"it has been busy with {_NAMES[doing]} for {busy_s:.0f} s"

    def tick(self, elapsed_s: float) -> str:
        """``elapsed_s`` seconds, which should be ``period_s``, have passed since the last tick.
        Returns why the engine must be considered to hang, "" if it need not be."""
        # More than that has not been waited: this program did not run.
        self._silent_s += min(elapsed_s, 2 * self.period_s)
        if self._silent_s > self._limit_s > 0:
            return f"it has not answered for {self._limit_s:g} s"
        return self._stuck
