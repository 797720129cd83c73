"""Roofline model: the minimum memory traffic and arithmetic of an operation.

Each kernel's module has a cost function. Dividing by the measured peaks of a GPU gives the lower
bound that benchmarks compare a kernel's time with.
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
        """Lower bound of the time in seconds on a GPU with these peaks."""
        return max(self.num_bytes / bytes_per_s, self.num_flops / flops_per_s)


def num_bytes(*tensors: torch.Tensor | None) -> int:
    """Bytes of all elements of the tensors."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
