"""Prompt lookup decoding (Saxena 2023): drafts the continuation of an earlier n-gram match.

Needs no model. Useful where a reply repeats its prompt (summaries, quotes, code, JSON), of little
use in free conversation.
"""

from __future__ import annotations

from collections.abc import Sequence

from llm_core.scheduling import EMPTY, BlockCopy, DraftTree, TokenSequence
from llm_core.speculative.drafters.base import ComputedTokens, DraftRequest

_MAX_NGRAM, _MIN_NGRAM = 4, 2
# Initial acceptance rate by length of the match; the controller calibrates it.
_PROBABILITIES = {2: 0.35, 3: 0.5, 4: 0.65}


class _NgramIndex:
    """For each n-gram of a text, the position after its last occurrence that has a next token."""

    def __init__(self) -> None:
        self._next_position: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0  # tokens

    def extend(self, token_ids: list[int]) -> None:
        """Indexes the tokens beyond those already indexed."""
        for end in range(max(self._num_indexed, 1), len(token_ids)):
            for length in range(_MIN_NGRAM, min(_MAX_NGRAM, end) + 1):
                self._next_position[tuple(token_ids[end - length : end])] = end
        self._num_indexed = max(self._num_indexed, len(token_ids))

    def longest_match(self, token_ids: list[int]) -> tuple[int, int] | None:
        """(position after the match, its length) for the longest n-gram at the end of the text."""
        for length in range(min(_MAX_NGRAM, len(token_ids)), _MIN_NGRAM - 1, -1):
            position = self._next_position.get(tuple(token_ids[-length:]))
            if position is not None:
                return position, length
        return None


class NgramDrafter:
    """Proposes chains of the tokens that followed the longest match."""

    name = "ngram"
    feature_layers: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._indices: dict[int, _NgramIndex] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return [self._propose_chain(request) for request in requests]

    def _propose_chain(self, request: DraftRequest) -> DraftTree:
        token_ids = request.sequence.token_ids
        index = self._indices.setdefault(request.sequence.seq_id, _NgramIndex())
        index.extend(token_ids)
        match = index.longest_match(token_ids)
        if match is None:
            return EMPTY
        position, length = match
        probability = _PROBABILITIES[length]
        limit = min(request.shape.max_drafts, request.shape.max_depth)
        drafts: list[int] = []
        while len(drafts) < limit:  # the continuation may reach into the drafts themselves
            beyond = position + len(drafts) - len(token_ids)
            drafts.append(token_ids[position + len(drafts)] if beyond < 0 else drafts[beyond])
        return DraftTree.chain(drafts, [probability] * len(drafts))

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        pass

    def observe_computed(self, computed: Sequence[ComputedTokens]) -> None:
        pass

    def truncate_sequence(self, sequence: TokenSequence, length: int) -> None:
        self._indices.pop(sequence.seq_id, None)

    def close_sequence(self, sequence: TokenSequence) -> None:
        self._indices.pop(sequence.seq_id, None)
