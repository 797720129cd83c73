"""Is there time for work that may be for nothing?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from app.conversation.speech.asr_scheduler import AsrScheduler


class EagerAdmission:
    """How much all callers together ask of recogniser and model right now."""

    def __init__(self, recognition: AsrScheduler, max_generating: int) -> None:
        """``max_generating``: with so many answers in the making, none is begun in hope."""
        self._recognition = recognition
        self._max_generating = max_generating
        self.num_generating = 0
        self.num_skipped = 0
        """How often there was no time for an answer in hope, since the start."""

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Around the making of an answer's words."""
        self.num_generating += 1
        try:
            yield
        finally:
            self.num_generating -= 1

    def may_speculate(self) -> bool:
        """Whether an answer may be begun before it is certain that it is wanted."""
        is_free = self.num_generating < self._max_generating and not self._recognition.num_waiting
        self.num_skipped += not is_free
        return is_free
