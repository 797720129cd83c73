"""The interface of a draft head: one transformer layer on the target's hidden states.

As in EAGLE (arXiv 2401.15077) the input at position i is the pair of the target's features of
position i and the embedding of token i + 1; the output predicts token i + 2. The head's ``KvCache``
has one layer and uses the block ids of the target's cache.
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
    """Input of a head. ``token_ids`` int64 [T]: the token after each position. ``states`` float32:
    the target's features [T, K * hidden_size] where ``from_target``, else the head's own outputs
    [T, hidden_size] at the positions before. ``segments`` as in ``ForwardBatch`` (trees among
    them). ``output_rows`` int64 [R]: rows whose output is returned, possibly none."""

    token_ids: torch.Tensor
    states: torch.Tensor
    from_target: bool
    segments: tuple[Segment, ...]
    output_rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class HeadResult:
    """``logits`` float32 [R, draft vocabulary] and ``states`` float32 [R, hidden_size] of the
    batch's ``output_rows``; the states are the input of the drafts after them."""

    logits: torch.Tensor
    states: torch.Tensor


class DraftHead(Protocol):
    """An EAGLE head, in PyTorch or compiled."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The target's layers whose hidden states are the features, concatenated."""

    @property
    def target_ids(self) -> torch.Tensor:
        """int64 [draft vocabulary], ascending: the target's token for each draft token."""

    def make_cache(self, num_blocks: int, block_size: int) -> KvCache:
        """A KV cache of zeros: a position that was never computed does little harm."""

    def forward(self, batch: HeadBatch, cache: KvCache) -> HeadResult:
        """Computes a batch and writes its KV to the cache. Call under inference mode."""


@runtime_checkable
class ChainHead(DraftHead, Protocol):
    """A head that drafts whole chains in one call."""

    def draft_chains(
        self, batch: HeadBatch, cache: KvCache, requests: Sequence[DraftRequest]
    ) -> list[DraftTree]:
        """What ``TreeExpander`` would return for shapes of width 1, and siblings: computes the
        batch, one segment a request, and goes on from the last row of each, which ``output_rows``
        must name. KV of drafts are written after the segments; a chain ends where its segment's
        blocks end."""
