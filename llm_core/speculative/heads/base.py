"""What a draft head computes: one layer that reads the target's hidden states.

Pairs of EAGLE (arXiv 2401.15077): the row at position i takes the state of position i and the token
x_(i+1), and says what x_(i+2) may be. Its keys and values have a ``KvCache`` of their own, of one
layer, with the block ids of the target's: position i of a sequence is kept at the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from llm_core.batch import Segment
from llm_core.model import KvCache
from llm_core.scheduling import DraftTree
from llm_core.speculative.drafters.base import DraftRequest


@dataclass(frozen=True, slots=True)
class HeadBatch:
    """Rows for a head. ``token_ids`` int64 [T]; ``states`` float32: where ``is_real`` the target's
    features [T, K * hidden_size], else the head's own outputs [T, hidden_size] of the rows before;
    ``segments`` as in ``ForwardBatch`` (trees among them); ``output_rows`` int64 [R]: those whose
    outputs are wanted, possibly none."""

    token_ids: torch.Tensor
    states: torch.Tensor
    is_real: bool
    segments: tuple[Segment, ...]
    output_rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class HeadResult:
    """``logits`` float32 [R, draft vocabulary] and ``states`` float32 [R, hidden_size] of the
    batch's ``output_rows``; the states are what rows that follow them take."""

    logits: torch.Tensor
    states: torch.Tensor


class DraftHead(Protocol):
    """An EAGLE head, in torch or compiled."""

    @property
    def feature_layers(self) -> tuple[int, ...]: ...

    @property
    def target_ids(self) -> torch.Tensor:
        """int64 [draft vocabulary], ascending: which token of the target each draft word is."""

    def make_cache(self, num_blocks: int, block_size: int) -> KvCache:
        """Keys and values for as many blocks, zero: what was never written does no harm."""

    def forward(self, batch: HeadBatch, cache: KvCache) -> HeadResult:
        """Writes the rows' keys and values. Called under inference mode."""


@runtime_checkable
class ChainHead(DraftHead, Protocol):
    """A head that goes on from its own drafts without coming back in between."""

    def draft_chains(
        self, batch: HeadBatch, cache: KvCache, requests: Sequence[DraftRequest]
    ) -> list[DraftTree]:
        """What ``grow.Grower`` would make of shapes of width 1: runs the batch's rows, one segment
        a request, and goes on from the last of each; ``output_rows`` must be these. What it reads
        of its drafts it keeps behind the segments, and it stops where a segment's blocks end."""
