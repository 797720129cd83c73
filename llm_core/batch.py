"""The typed hand-off from the scheduler to the model: what one step computes.

Rows of a batch are tokens. Each segment is a run of rows of one KV slot::

    rows       | seg 0 rows ...  | seg 1 rows | ...        sum of lengths = T
    slot       [0, start) already in KV | [start, start + length) computed by this step
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of a batch: positions ``[start, start + length)`` of KV slot ``slot``."""

    slot: int
    start: int
    length: int

    @property
    def end(self) -> int:
        """One past the last position; the slot holds this many positions afterwards."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's input.

    ``token_ids`` is int64 [T], the segments' tokens one after another; ``segments`` are in row
    order, and a slot occurs at most once; ``logit_rows`` is int64 [R], the rows whose logits are
    wanted (may be empty, as for a prefill chunk that is not the last).
    """

    token_ids: torch.Tensor
    segments: tuple[Segment, ...]
    logit_rows: torch.Tensor
