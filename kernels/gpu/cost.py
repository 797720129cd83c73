"""The work of an operation: the least that it must move and calculate.

Each kernel's module has functions that give it. Dividing by the measured ceilings of a card gives
the floor that a kernel's time is compared with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Cost:
    """``num_bytes`` read and written once each; ``num_flops`` counts a multiply-add as two."""

    num_bytes: int
    num_flops: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.num_bytes + other.num_bytes, self.num_flops + other.num_flops)

    def floor_s(self, bytes_per_s: float, flops_per_s: float) -> float:
        """Seconds that a card with these ceilings cannot go below."""
        return max(self.num_bytes / bytes_per_s, self.num_flops / flops_per_s)


def num_bytes(*tensors: torch.Tensor | None) -> int:
    """Of the tensors' elements."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
