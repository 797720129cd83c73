"""Pinned staging buffers for asynchronous copies between host and device.

A ring of two: one step's input may still be copied when the next one's is written. Acquiring a
buffer waits for the copy that last used it, two steps before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

_NUM_SLOTS = 2
_LEAST_WORDS = 4096


class Event(Protocol):
    """The interface of ``torch.cuda.Event``."""

    def record(self) -> None:
        """Records the event in the current stream."""

    def synchronize(self) -> None:
        """Waits for the recorded work; returns at once if nothing was recorded."""


@dataclass(slots=True)
class _Slot:
    words: torch.Tensor
    used: Event | None


class StagingRing:
    """A ring of int32 buffers."""

    def __init__(self, *, is_pinned: bool, make_event: Callable[[], Event] | None) -> None:
        """``make_event`` None: copies are synchronous, as on a CPU."""
        self._is_pinned = is_pinned
        self._slots = [
            _Slot(torch.empty(0, dtype=torch.int32), None if make_event is None else make_event())
            for _ in range(_NUM_SLOTS)
        ]
        self._next = 0

    @classmethod
    def of(cls, device: torch.device) -> StagingRing:
        """A ring for copies to and from ``device``."""
        if device.type != "cuda":
            return cls(is_pinned=False, make_event=None)
        return cls(is_pinned=True, make_event=torch.cuda.Event)

    def acquire(self, num_words: int) -> torch.Tensor:
        """A free buffer int32 [num_words], valid until the ring wraps around."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % _NUM_SLOTS
        if slot.used is not None:
            slot.used.synchronize()
        if slot.words.shape[0] < num_words:
            size = max(_LEAST_WORDS, 1 << (num_words - 1).bit_length())
            slot.words = torch.empty(size, dtype=torch.int32, pin_memory=self._is_pinned)
        return slot.words[:num_words]

    def record_copy(self, words: torch.Tensor) -> None:
        """Records that a copy of ``words`` (of ``acquire``) was enqueued in the current stream."""
        for slot in self._slots:
            if slot.used is not None and slot.words.data_ptr() == words.data_ptr():
                slot.used.record()
