"""The typed hand-off from the scheduler to the model: what one step computes.

Rows of a batch are tokens. Each segment is a run of rows of one sequence, whose keys and values lie
in blocks of the KV pool::

    rows       | seg 0 rows ...  | seg 1 rows | ...        sum of lengths = T
    sequence   [0, start) already in KV | [start, start + length) computed by this step
    position p lies at block_ids[p // block_size] * block_size + p % block_size of the pool
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of a batch: positions ``[start, start + length)`` of a sequence.

    ``block_ids`` hold at least the positions up to the last of these. Several segments may share
    blocks that they only read; a block that is written belongs to one segment.
    """

    block_ids: tuple[int, ...]
    start: int
    length: int

    @property
    def end(self) -> int:
        """One past the last position; the blocks hold this many positions afterwards."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's input.

    ``token_ids`` is int64 [T], the segments' tokens one after another; ``segments`` are in row
    order; ``logit_rows`` is int64 [R], the rows whose logits are wanted (may be empty, as for a
    prefill chunk that is not the last).
    """

    token_ids: torch.Tensor
    segments: tuple[Segment, ...]
    logit_rows: torch.Tensor
