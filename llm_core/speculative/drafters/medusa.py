"""Drafts by Medusa heads (Cai et al. 2024, arXiv 2401.10774): each guesses one place further.

The heads do not know each other's words, so a tree is all combinations, the likeliest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import torch

from llm_core.scheduling import EMPTY, BlockCopy, DraftTree, TokenSequence
from llm_core.speculative.drafters.base import ComputedRows, DraftRequest
from llm_core.speculative.drafters.tree_expansion import OF_ANOTHER, likely_words
from llm_core.speculative.heads.medusa import MedusaHeads


class MedusaDrafter:
    """See ``Drafter``. Keeps of each sequence the hidden state of its last computed row."""

    name = "medusa"

    def __init__(self, heads: MedusaHeads) -> None:
        self.feature_layers = heads.feature_layers
        self._heads = heads
        self._target_ids: list[int] = heads.target_ids.tolist()
        self._last: dict[int, tuple[int, torch.Tensor]] = {}  # (computed length, hidden [H])

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        able = [
            index
            for index, request in enumerate(requests)
            if self._last.get(request.sequence.seq_id, (-1,))[0] == request.sequence.computed_len
        ]
        trees = [EMPTY] * len(requests)
        if able:
            hidden = torch.stack([self._last[requests[i].sequence.seq_id][1] for i in able])
            with torch.inference_mode():
                logits = self._heads.logits(hidden)
            for index, rows in zip(able, logits, strict=True):
                trees[index] = self._tree(requests[index], rows)
        return trees

    def _tree(self, request: DraftRequest, rows: torch.Tensor) -> DraftTree:
        """rows [num_heads, draft vocabulary] -> the likeliest combinations, parents first."""
        shape = request.shape
        levels = [
            likely_words(row, request, depth, OF_ANOTHER)
            for depth, row in enumerate(rows[: shape.max_depth])
        ]
        tokens: list[int] = []
        parents: list[int] = []
        probabilities: list[float] = []
        # (-path's probability, serial, level, choice at it, parent draft, its path's probability)
        heap: list[tuple[float, int, int, int, int, float]] = []
        serial = 0

        def push(level: int, choice: int, parent: int, before: float) -> None:
            nonlocal serial
            if level < len(levels) and choice < len(levels[level]):
                path = before * levels[level][choice][1]
                if path >= shape.least_probability:
                    serial += 1
                    heappush(heap, (-path, serial, level, choice, parent, before))

        push(0, 0, -1, 1.0)
        while heap and len(tokens) < shape.max_drafts:
            path, _, level, choice, parent, before = heappop(heap)
            word, probability = levels[level][choice]
            tokens.append(self._target_ids[word])
            parents.append(parent)
            probabilities.append(probability)
            push(level, choice + 1, parent, before)
            push(level + 1, 0, len(tokens) - 1, -path)
        return DraftTree(tuple(tokens), tuple(parents), tuple(probabilities))

    def copied(self, copies: Sequence[BlockCopy]) -> None:
        pass

    def observe(self, rows: Sequence[ComputedRows]) -> None:
        for row in rows:
            if row.features is None:
                self.close(row.sequence)
            elif row.sequence.generates:
                end = row.start + row.length
                self._last[row.sequence.seq_id] = end, row.features[row.rows[-1]].clone()

    def truncate(self, sequence: TokenSequence, length: int) -> None:
        self.close(sequence)

    def close(self, sequence: TokenSequence) -> None:
        self._last.pop(sequence.seq_id, None)
