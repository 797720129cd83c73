"""Drafts of a smaller model with the same vocabulary (Leviathan et al. 2022, arXiv 2211.17192),
such as a pruned copy of the target made by `parley distill`.

The draft model has a KV cache of its own, with blocks for each sequence. KV of tokens that turned
out as drafted are kept; the others are computed again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llm_core.batch import ForwardBatch, Segment
from llm_core.model import ModelRunner
from llm_core.scheduling import EMPTY, BlockCopy, DraftTree, TokenSequence, common_prefix_len
from llm_core.speculative.drafters.base import ComputedTokens, DraftRequest
from llm_core.speculative.drafters.tree_expansion import (
    HEAD_COUPLING,
    DrawCoupling,
    ScratchSlots,
    TreeExpander,
)
from llm_core.speculative.heads.base import HeadResult

_MAX_CHUNK = 256  # tokens of a prompt in one forward pass
_SCRATCH_TOKENS = 64  # of an expanded tree, for each sequence


class _CachedText:
    """The tokens of one sequence whose KV the draft model holds, and its blocks."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.block_ids: list[int] = []


class DraftModelDrafter:
    """A ``Drafter``. Sequences for which no blocks are free get no drafts."""

    feature_layers: tuple[int, ...] = ()

    def __init__(
        self, runner: ModelRunner, *, vocab_size: int, coupling: DrawCoupling = HEAD_COUPLING
    ) -> None:
        """``vocab_size``: of the target; the draft model's vocabulary begins with these tokens."""
        self.name = "draft model"
        self._runner = runner
        self._coupling = coupling
        self._target_ids = range(vocab_size)
        self._free_blocks = list(range(runner.num_blocks))
        self._cached: dict[int, _CachedText] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        trees = [EMPTY] * len(requests)
        able = [i for i, request in enumerate(requests) if self._reserve_blocks(request)]
        if not able:
            return trees
        chosen = [requests[index] for index in able]
        expander = TreeExpander(
            chosen, self._prefill(chosen), self._slots(chosen), self._target_ids, self._coupling
        )
        while (batch := expander.next_batch()) is not None:
            expander.add_candidates(
                self._forward(batch.token_ids, batch.segments, batch.output_rows)
            )
        for index, tree in zip(able, expander.best_trees(), strict=True):
            trees[index] = tree
        for request, tokens in zip(chosen, expander.expanded_chains(), strict=True):
            self._cached[request.sequence.seq_id].token_ids += tokens
        return trees

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        pass

    def observe_computed(self, computed: Sequence[ComputedTokens]) -> None:
        pass

    def truncate_sequence(self, sequence: TokenSequence, length: int) -> None:
        pass

    def close_sequence(self, sequence: TokenSequence) -> None:
        cached = self._cached.pop(sequence.seq_id, None)
        if cached is not None:
            self._free_blocks += cached.block_ids

    def _reserve_blocks(self, request: DraftRequest) -> bool:
        """Blocks for the sequence and its drafts; False if there are too few or the draft model's
        context is too short."""
        end = len(request.sequence.token_ids) + _SCRATCH_TOKENS
        if end > self._runner.max_context:
            return False
        cached = self._cached.setdefault(request.sequence.seq_id, _CachedText())
        missing = -(-end // self._runner.block_size) - len(cached.block_ids)
        if missing > len(self._free_blocks):
            return False
        cached.block_ids += [self._free_blocks.pop() for _ in range(missing)]
        return True

    def _prefill(self, requests: Sequence[DraftRequest]) -> HeadResult:
        """Computes the new tokens of each sequence; the logits after the last of each."""
        tokens: list[int] = []
        segments: list[Segment] = []
        for request in requests:
            cached, token_ids = self._cached[request.sequence.seq_id], request.sequence.token_ids
            start = min(common_prefix_len(cached.token_ids, token_ids), len(token_ids) - 1)
            while len(token_ids) - start > _MAX_CHUNK:
                chunk = torch.tensor(token_ids[start : start + _MAX_CHUNK])
                segment = Segment(tuple(cached.block_ids), start, _MAX_CHUNK)
                self._forward(chunk, (segment,), torch.empty(0, dtype=torch.int64))
                start += _MAX_CHUNK
            tokens += token_ids[start:]
            segments.append(Segment(tuple(cached.block_ids), start, len(token_ids) - start))
            cached.token_ids = list(token_ids)
        last_rows = torch.tensor([segment.length for segment in segments]).cumsum(0) - 1
        return self._forward(torch.tensor(tokens), tuple(segments), last_rows)

    def _slots(self, requests: Sequence[DraftRequest]) -> list[ScratchSlots]:
        return [
            ScratchSlots(
                tuple(self._cached[request.sequence.seq_id].block_ids),
                len(request.sequence.token_ids),
                _SCRATCH_TOKENS,
            )
            for request in requests
        ]

    def _forward(
        self, token_ids: torch.Tensor, segments: tuple[Segment, ...], rows: torch.Tensor
    ) -> HeadResult:
        """A step of the model in the form of a head's, without hidden states."""
        logits = self._runner.forward(ForwardBatch(token_ids, segments, rows)).logits
        return HeadResult(logits[:, : len(self._target_ids)], torch.empty(len(rows), 0))
