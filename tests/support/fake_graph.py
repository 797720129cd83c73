"""A stand-in for a CUDA graph; see fakes.py for the others."""

from __future__ import annotations

from collections.abc import Callable


class RecordedRun:
    """A CUDA graph without a GPU: what was recorded is run again, on the same tensors."""

    def __init__(self, run: Callable[[], None]) -> None:
        run()  # recording launches nothing, but the warm-up before it does
        self.num_replays = 0
        self._run = run

    def replay(self) -> None:
        self.num_replays += 1
        self._run()
