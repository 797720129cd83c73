"""Views of cached keys and values, and attention masks over them.

The cache of a sequence may consist of several contiguous parts of the pool; each is a ``KvRun``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KvRun:
    """Consecutive positions. ``keys`` and ``values`` [num_kv_heads, L, head_dim], float32, bfloat16
    or int8; for int8, ``key_scales`` and ``value_scales`` float32 [num_kv_heads, L]: a value is its
    code times the scale of its head and position."""

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    @property
    def length(self) -> int:
        return self.keys.shape[1]


def first_visible(start: int, window: int | None) -> int:
    """The first position that the row at position ``start`` sees: 0 without a window, else the
    first of ``window`` positions including its own."""
    return 0 if window is None else max(0, start - window + 1)


def tree_mask(start: int, parents: Sequence[int], window: int | None) -> torch.Tensor:
    """bool [length, L], as ``causal_mask``, for a tree of rows: row r follows row ``parents[r]``
    or, with -1, the position before ``start``. A row sees the positions before ``start``, its
    ancestors and itself, if they are less than ``window`` text positions before it."""
    length = len(parents)
    first = first_visible(start, window)
    mask = torch.zeros(length, start + length - first, dtype=torch.bool)
    depths: list[int] = []
    for row, parent in enumerate(parents):
        depth = 0 if parent < 0 else depths[parent] + 1
        depths.append(depth)
        least = 0 if window is None else max(0, start + depth - window + 1)
        mask[row, max(least, first) - first : start - first] = True
        ancestor = row
        while ancestor >= 0 and start + depths[ancestor] >= least:
            mask[row, start - first + ancestor] = True
            ancestor = parents[ancestor]
    return mask


def causal_mask(start: int, length: int, window: int | None) -> torch.Tensor:
    """bool [length, L]: True where row i (position start + i) sees the j-th position counted from
    ``first_visible(start, window)``; L reaches to the last row's own position."""
    first = first_visible(start, window)
    rows = torch.arange(start, start + length).unsqueeze(1)
    positions = torch.arange(first, start + length).unsqueeze(0)
    visible = positions <= rows
    return visible if window is None else visible & (positions > rows - window)
