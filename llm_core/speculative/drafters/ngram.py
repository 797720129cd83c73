"""Prompt lookup: what followed the last time that the same tokens stood at the end.

Free of any model; good where a reply repeats its prompt (summaries, quotes, code, JSON), and of
little use in free talk (Saxena 2023, prompt lookup decoding).
"""

from __future__ import annotations

from collections.abc import Sequence

from llm_core.scheduling import EMPTY, BlockCopy, DraftTree, TokenSequence
from llm_core.speculative.drafters.base import ComputedRows, DraftRequest

_LONGEST, _SHORTEST = 4, 2
# How likely a draft is right, by the length of what was found again; the controller learns better.
_PROBABILITIES = {2: 0.35, 3: 0.5, 4: 0.65}


class _Index:
    """Where each run of ``_SHORTEST`` to ``_LONGEST`` tokens of a text was followed last."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, ...], int] = {}
        self._len = 0  # tokens of which all runs that have something after them are known

    def grow(self, token_ids: list[int]) -> None:
        for end in range(max(self._len, 1), len(token_ids)):
            for length in range(_SHORTEST, min(_LONGEST, end) + 1):
                self._last[tuple(token_ids[end - length : end])] = end
        self._len = max(self._len, len(token_ids))

    def find(self, token_ids: list[int]) -> tuple[int, int] | None:
        """(where what follows begins, how long a run was found again)."""
        for length in range(min(_LONGEST, len(token_ids)), _SHORTEST - 1, -1):
            at = self._last.get(tuple(token_ids[-length:]))
            if at is not None:
                return at, length
        return None


class NgramDrafter:
    """A chain of what followed the longest run that is found again."""

    name = "ngram"
    feature_layers: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._indices: dict[int, _Index] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> DraftTree:
        token_ids = request.sequence.token_ids
        index = self._indices.setdefault(request.sequence.seq_id, _Index())
        index.grow(token_ids)
        found = index.find(token_ids)
        if found is None:
            return EMPTY
        at, length = found
        probability = _PROBABILITIES[length]
        limit = min(request.shape.max_drafts, request.shape.max_depth)
        drafts: list[int] = []
        while len(drafts) < limit:  # what was found may reach into what is drafted
            beyond = at + len(drafts) - len(token_ids)
            drafts.append(token_ids[at + len(drafts)] if beyond < 0 else drafts[beyond])
        return DraftTree.chain(drafts, [probability] * len(drafts))

    def copied(self, copies: Sequence[BlockCopy]) -> None:
        pass

    def observe(self, rows: Sequence[ComputedRows]) -> None:
        pass

    def truncate(self, sequence: TokenSequence, length: int) -> None:
        self._indices.pop(sequence.seq_id, None)

    def close(self, sequence: TokenSequence) -> None:
        self._indices.pop(sequence.seq_id, None)
