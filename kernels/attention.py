"""What attention reads: keys and values of consecutive positions, as views into a larger pool.

A sequence's cache may lie in several places; each contiguous part is one ``KvRun``, and no part is
copied to be beside another one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KvRun:
    """Consecutive positions. ``keys`` and ``values`` [num_kv_heads, L, head_dim], float32, bfloat16
    or int8; for int8, ``key_scales`` and ``value_scales`` float32 [num_kv_heads, L]: a number is
    its code times the scale of its head and position."""

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    @property
    def length(self) -> int:
        return self.keys.shape[1]


def first_visible(start: int, window: int | None) -> int:
    """The first position that the row at position ``start`` sees: of the last ``window`` positions,
    its own among them, or of all."""
    return 0 if window is None else max(0, start - window + 1)


def causal_mask(start: int, length: int, window: int | None) -> torch.Tensor:
    """bool [length, L]: True where row i (position start + i) sees the j-th position counted from
    ``first_visible(start, window)``; L reaches to the last row's own position."""
    first = first_visible(start, window)
    rows = torch.arange(start, start + length).unsqueeze(1)
    positions = torch.arange(first, start + length).unsqueeze(0)
    visible = positions <= rows
    return visible if window is None else visible & (positions > rows - window)
