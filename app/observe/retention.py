"""What is kept of the past, and whether the clock may be believed that says what is old."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

_DAY_S = 86_400.0
# Wall clocks are corrected by less than this; it is little beside any age at which things go.
_TOLERANCE_S = 300.0


@dataclass(frozen=True, slots=True)
class Retention:
    """What is kept; None: no limit. ``max_bytes`` is the size of the data in the file."""

    max_age_s: float | None = None
    max_bytes: int | None = None
    max_turns: int | None = None


class RetentionClock:
    """The time by which things are too old: wall time, unless it may be wrong.

    A machine whose clock is set a year ahead, by mistake and for a minute, would delete all it has.
    So nothing is too old for a day (or the age itself, if it is less) after the clock was seen to
    jump; if it jumps back within that day, nothing happened. A clock that is a whole age ahead of
    the newest thing that is kept, at the start, is met in the same way. Limits on sizes hold all
    the time.
    """

    def __init__(
        self,
        max_age_s: float,
        newest_s: float | None,
        *,
        wall_s: Callable[[], float] | None = None,
        running_s: Callable[[], float] | None = None,
    ) -> None:
        """``newest_s``: Unix time of the newest thing that is kept; None: there is nothing.
        ``wall_s`` is Unix time, ``running_s`` a clock that nobody sets."""
        self._wall_s = wall_s or _unix_s
        self._running_s = running_s or _since_boot_s
        self._doubt_s = min(_DAY_S, max_age_s)
        # Wall time less running time: what is believed; what is not yet, and until when.
        self._believed_s: float | None = self._offset_s
        self._doubted: tuple[float, float] | None = None
        if newest_s is not None and self._wall_s() - newest_s > max_age_s:
            self._believed_s = None
            self._doubt("the newest trace is older than what is to be kept")

    def now_s(self) -> float | None:
        """Unix time; None while it is not believed."""
        offset_s = self._offset_s
        if self._doubted is not None:
            doubted_s, until_s = self._doubted
            if _is_near(offset_s, doubted_s) and self._running_s() >= until_s:
                self._believed_s = offset_s
        if self._believed_s is not None and _is_near(offset_s, self._believed_s):
            self._believed_s, self._doubted = offset_s, None  # slowly it may drift anywhere
            return self._wall_s()
        last_s = self._doubted[0] if self._doubted is not None else self._believed_s
        if last_s is not None and not _is_near(offset_s, last_s):
            self._doubt(f"the clock was set by {offset_s - last_s:+,.0f} s")
        return None

    def _doubt(self, why: str) -> None:
        self._doubted = (self._offset_s, self._running_s() + self._doubt_s)
        log.warning("%s: for %.0f s nothing is deleted for its age", why, self._doubt_s)

    @property
    def _offset_s(self) -> float:
        return self._wall_s() - self._running_s()


def _is_near(one_s: float, other_s: float) -> bool:
    return abs(one_s - other_s) <= _TOLERANCE_S


def _unix_s() -> float:
    return time.time()


def _since_boot_s() -> float:
    """Also counts while the machine sleeps, as the wall clock does, where there is such a clock."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
