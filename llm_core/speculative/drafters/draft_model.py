"""Drafts by a smaller model with the same tokens (Leviathan et al. 2022, arXiv 2211.17192); also by
a pruned copy of the target, as `parley distill` makes it.

The draft model has a KV pool of its own, some blocks for each sequence. What it has read of a text
is kept as far as the text went on as drafted; the rest is read again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llm_core.batch import ForwardBatch, Segment
from llm_core.model import ModelRunner
from llm_core.scheduling import EMPTY, BlockCopy, DraftTree, TokenSequence, common_prefix_len
from llm_core.speculative.drafters.base import ComputedRows, DraftRequest
from llm_core.speculative.drafters.tree_expansion import (
    OF_ANOTHER,
    DraftPlace,
    Nearness,
    TreeExpander,
)
from llm_core.speculative.heads.base import HeadResult

_LARGEST_CHUNK = 256  # rows of a prompt in one forward
_TREE_ROWS = 64  # rows of a tree that is followed, for each sequence


class _Text:
    """What the draft model has of one sequence: the tokens whose KV lie in its blocks."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.block_ids: list[int] = []


class DraftModelDrafter:
    """See ``Drafter``. Sequences for which there are no blocks are not drafted for."""

    feature_layers: tuple[int, ...] = ()

    def __init__(
        self, runner: ModelRunner, *, vocab_size: int, nearness: Nearness = OF_ANOTHER
    ) -> None:
        """``vocab_size``: tokens of the target; the draft model's vocabulary begins with them.
        ``nearness``: of their distributions."""
        self.name = "draft model"
        self._runner = runner
        self._nearness = nearness
        self._target_ids = range(vocab_size)
        self._free = list(range(runner.num_blocks))
        self._texts: dict[int, _Text] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        trees = [EMPTY] * len(requests)
        able = [i for i, request in enumerate(requests) if self._reserve(request)]
        if not able:
            return trees
        chosen = [requests[index] for index in able]
        grower = TreeExpander(
            chosen, self._read(chosen), self._places(chosen), self._target_ids, self._nearness
        )
        while (batch := grower.next_batch()) is not None:
            grower.take(self._forward(batch.token_ids, batch.segments, batch.output_rows))
        for index, tree in zip(able, grower.trees(), strict=True):
            trees[index] = tree
        for request, read in zip(chosen, grower.chains_read(), strict=True):
            self._texts[request.sequence.seq_id].token_ids += read
        return trees

    def copied(self, copies: Sequence[BlockCopy]) -> None:
        pass

    def observe(self, rows: Sequence[ComputedRows]) -> None:
        pass

    def truncate(self, sequence: TokenSequence, length: int) -> None:
        pass

    def close(self, sequence: TokenSequence) -> None:
        text = self._texts.pop(sequence.seq_id, None)
        if text is not None:
            self._free += text.block_ids

    def _reserve(self, request: DraftRequest) -> bool:
        """Blocks for a text and what may be drafted behind it, within the model's context."""
        end = len(request.sequence.token_ids) + _TREE_ROWS
        if end > self._runner.max_context:
            return False
        text = self._texts.setdefault(request.sequence.seq_id, _Text())
        missing = -(-end // self._runner.block_size) - len(text.block_ids)
        if missing > len(self._free):
            return False
        text.block_ids += [self._free.pop() for _ in range(missing)]
        return True

    def _read(self, requests: Sequence[DraftRequest]) -> HeadResult:
        """Reads what is new of each text; what the model says after the last token of each."""
        tokens: list[int] = []
        segments: list[Segment] = []
        for request in requests:
            text, token_ids = self._texts[request.sequence.seq_id], request.sequence.token_ids
            kept = min(common_prefix_len(text.token_ids, token_ids), len(token_ids) - 1)
            while len(token_ids) - kept > _LARGEST_CHUNK:
                part = torch.tensor(token_ids[kept : kept + _LARGEST_CHUNK])
                segment = Segment(tuple(text.block_ids), kept, _LARGEST_CHUNK)
                self._forward(part, (segment,), torch.empty(0, dtype=torch.int64))
                kept += _LARGEST_CHUNK
            tokens += token_ids[kept:]
            segments.append(Segment(tuple(text.block_ids), kept, len(token_ids) - kept))
            text.token_ids = list(token_ids)
        ends = torch.tensor([segment.length for segment in segments]).cumsum(0) - 1
        return self._forward(torch.tensor(tokens), tuple(segments), ends)

    def _places(self, requests: Sequence[DraftRequest]) -> list[DraftPlace]:
        return [
            DraftPlace(
                tuple(self._texts[request.sequence.seq_id].block_ids),
                len(request.sequence.token_ids),
                _TREE_ROWS,
            )
            for request in requests
        ]

    def _forward(
        self, token_ids: torch.Tensor, segments: tuple[Segment, ...], rows: torch.Tensor
    ) -> HeadResult:
        """A step of the model in the place of a head's: it needs no states."""
        logits = self._runner.forward(ForwardBatch(token_ids, segments, rows)).logits
        return HeadResult(logits[:, : len(self._target_ids)], torch.empty(len(rows), 0))
