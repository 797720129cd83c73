"""Memory that a device copies from, and to, while the host goes on.

Pinned, so that copies need not wait, and a ring of two: one step's input may still be on its way
when the next one's is written. Whoever takes a buffer waits for the copy that last used it, which
was made two steps ago.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

_NUM_SLOTS = 2
_LEAST_WORDS = 4096


class Event(Protocol):
    """As ``torch.cuda.Event``."""

    def record(self) -> None:
        """Marks this place in the current stream."""

    def synchronize(self) -> None:
        """Waits until the device has come to the mark; not at all where there is none."""


@dataclass(slots=True)
class _Slot:
    words: torch.Tensor
    used: Event | None


class StagingRing:
    """Buffers of int32 words that take turns."""

    def __init__(self, *, is_pinned: bool, make_event: Callable[[], Event] | None) -> None:
        """``make_event`` None: copies are over when they return, as on a CPU."""
        self._is_pinned = is_pinned
        self._slots = [
            _Slot(torch.empty(0, dtype=torch.int32), None if make_event is None else make_event())
            for _ in range(_NUM_SLOTS)
        ]
        self._next = 0

    @classmethod
    def of(cls, device: torch.device) -> StagingRing:
        """For copies to and from ``device``."""
        if device.type != "cuda":
            return cls(is_pinned=False, make_event=None)
        return cls(is_pinned=True, make_event=torch.cuda.Event)

    def take(self, num_words: int) -> torch.Tensor:
        """int32 [num_words] that no copy uses any more; holds until it is taken again, which is
        when the ring has come round."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % _NUM_SLOTS
        if slot.used is not None:
            slot.used.synchronize()
        if slot.words.shape[0] < num_words:
            size = max(_LEAST_WORDS, 1 << (num_words - 1).bit_length())
            slot.words = torch.empty(size, dtype=torch.int32, pin_memory=self._is_pinned)
        return slot.words[:num_words]

    def copied(self, words: torch.Tensor) -> None:
        """A copy that uses ``words`` (of ``take``) was just put into the current stream."""
        for slot in self._slots:
            if slot.used is not None and slot.words.data_ptr() == words.data_ptr():
                slot.used.record()
