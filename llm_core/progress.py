"""The current operation of a thread and its start: tells a long step from one that hangs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

Doing = Literal["nothing", "commands", "step", "model", "guide"]
"""``commands``: taking requests; ``step``: all of a step but ``model``, the model's computing;
``guide``: compiling one."""


class Progress:
    """Written by one thread, read by any."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._state: tuple[Doing, int] = ("nothing", clock())

    def turn_to(self, doing: Doing) -> None:
        """Something else begins now."""
        self._state = (doing, self._clock())

    @contextmanager
    def at(self, doing: Doing) -> Iterator[None]:
        """``doing`` during the block, then again what was done before."""
        before = self._state[0]
        self.turn_to(doing)
        try:
            yield
        finally:
            self.turn_to(before)

    def now(self) -> tuple[Doing, int]:
        """What is done, and for how many nanoseconds; of nothing, 0."""
        doing, since_ns = self._state
        return doing, 0 if doing == "nothing" else self._clock() - since_ns
