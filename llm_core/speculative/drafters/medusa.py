"""Drafts of Medusa heads (Cai et al. 2024, arXiv 2401.10774): head k predicts k + 2 tokens ahead.

The heads do not see each other's tokens, so the tree is the most likely combinations.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import torch

from llm_core.scheduling import EMPTY, BlockCopy, DraftTree, TokenSequence
from llm_core.speculative.drafters.base import ComputedTokens, DraftRequest
from llm_core.speculative.drafters.tree_expansion import HEAD_COUPLING, top_candidates
from llm_core.speculative.heads.medusa import MedusaHeads


class MedusaDrafter:
    """A ``Drafter``. Keeps the hidden state of each sequence's last computed token."""

    name = "medusa"

    def __init__(self, heads: MedusaHeads) -> None:
        self.feature_layers = heads.feature_layers
        self._heads = heads
        self._target_ids: list[int] = heads.target_ids.tolist()
        self._last_hidden: dict[int, tuple[int, torch.Tensor]] = {}  # (computed length, [H])

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        able = [
            index
            for index, request in enumerate(requests)
            if self._last_hidden.get(request.sequence.seq_id, (-1,))[0]
            == request.sequence.computed_len
        ]
        trees = [EMPTY] * len(requests)
        if able:
            hidden = torch.stack([self._last_hidden[requests[i].sequence.seq_id][1] for i in able])
            with torch.inference_mode():
                logits = self._heads.logits(hidden)
            for index, head_logits in zip(able, logits, strict=True):
                trees[index] = self._combined(requests[index], head_logits)
        return trees

    def _combined(self, request: DraftRequest, logits: torch.Tensor) -> DraftTree:
        """logits [num_medusa_heads, draft vocabulary] -> the most likely combinations, parents
        before children."""
        shape = request.shape
        candidates = [
            top_candidates(row, request, depth, HEAD_COUPLING)
            for depth, row in enumerate(logits[: shape.max_depth])
        ]
        tokens: list[int] = []
        parents: list[int] = []
        probabilities: list[float] = []
        # (-path probability, serial, depth, rank at that depth, parent draft, its path probability)
        heap: list[tuple[float, int, int, int, int, float]] = []
        serial = 0

        def push(depth: int, rank: int, parent: int, before: float) -> None:
            nonlocal serial
            if depth < len(candidates) and rank < len(candidates[depth]):
                path = before * candidates[depth][rank][1]
                if path >= shape.min_path_probability:
                    serial += 1
                    heappush(heap, (-path, serial, depth, rank, parent, before))

        push(0, 0, -1, 1.0)
        while heap and len(tokens) < shape.max_drafts:
            path, _, depth, rank, parent, before = heappop(heap)
            draft_id, probability = candidates[depth][rank]
            tokens.append(self._target_ids[draft_id])
            parents.append(parent)
            probabilities.append(probability)
            push(depth, rank + 1, parent, before)
            push(depth + 1, 0, len(tokens) - 1, -path)
        return DraftTree(tuple(tokens), tuple(parents), tuple(probabilities))

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        pass

    def observe_computed(self, computed: Sequence[ComputedTokens]) -> None:
        for part in computed:
            if part.features is None:
                self.close_sequence(part.sequence)
            elif part.sequence.generates:
                hidden = part.features[part.rows[-1]].clone()
                self._last_hidden[part.sequence.seq_id] = part.start + part.length, hidden

    def truncate_sequence(self, sequence: TokenSequence, length: int) -> None:
        self.close_sequence(sequence)

    def close_sequence(self, sequence: TokenSequence) -> None:
        self._last_hidden.pop(sequence.seq_id, None)
