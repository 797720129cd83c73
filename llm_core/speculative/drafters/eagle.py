"""Drafts of an EAGLE head, which reads the target's hidden states and then its own outputs.

The head's KV cache uses the block ids of the target's, so prefixes that sequences share, copy or
leave in the prefix cache are shared for the head too; ``_CachedLengths`` tracks how much of each
block the head has computed. The head's input at a position includes the next token, so the last
position of a shared prefix was computed with the token that followed it there. That is one position
in a text, and only drafts depend on it.

Where the beginning of a text was not computed by the head (the target found it in the prefix cache,
or hidden states were not captured), the head starts at the next block and does without what lies
before; RoPE encodes relative positions only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from llm_core.batch import Segment
from llm_core.scheduling import EMPTY, BlockCopy, DraftTree, TokenSequence
from llm_core.speculative.drafters.base import ComputedTokens, DraftRequest, select_rows
from llm_core.speculative.drafters.tree_expansion import ScratchSlots, TreeExpander
from llm_core.speculative.heads.base import ChainHead, DraftHead, HeadBatch

_MAX_CHUNK = 256  # tokens of a prompt in one forward pass of the head
_MAX_PENDING = 4096  # tokens whose features are kept for a sequence without drafts
_MAX_GAP = 2  # positions computed for another continuation that are used as they are
_MAX_PENDING_AT_CLOSE = 8  # tokens that are still computed when a sequence ends
_MAX_SHARED_ROWS = 64  # of a step whose features sequences reference together
_MAX_SHARED_STEPS = 64  # referenced by one sequence; then its rows are copied
_MIN_SHARE = 8  # larger steps are referenced by sequences with at least 1 / 8 of the rows
_SCRATCH_TOKENS = 64  # of an expanded tree, for each sequence

# A segment of one sequence, its features, and the token after each of its positions.
_Part = tuple[Segment, torch.Tensor, list[int]]


class _CachedLengths:
    """For each block, the number of leading positions whose KV the head has computed."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._lens = [0] * num_blocks

    def copy_block(self, copy: BlockCopy) -> None:
        """Follows a copy between blocks."""
        self._lens[copy.target] = min(self._lens[copy.source], copy.num_rows)

    def invalidate(self, block_ids: Sequence[int], start: int, end: int) -> None:
        """Positions [start, end) have new content in the target's cache."""
        first, inside = divmod(start, self._block_size)
        for index in range(first, (end - 1) // self._block_size + 1):
            block = block_ids[index]
            if self._lens[block] > inside:
                self._lens[block] = inside
            inside = 0

    def mark_computed(self, block_ids: Sequence[int], start: int, end: int) -> None:
        """Positions [start, end) were computed, and those before them in the same block."""
        size = self._block_size
        for index in range(start // size, (end - 1) // size + 1):
            self._lens[block_ids[index]] = min(size, end - index * size)

    def num_leading(self, block_ids: Sequence[int], limit: int) -> int:
        """Number of computed positions from the first one on, at most ``limit``."""
        count = 0
        for block in block_ids:
            count += self._lens[block]
            if self._lens[block] < self._block_size or count >= limit:
                break
        return min(count, limit)


class _HeadProgress:
    """The head's progress in a sequence: positions [base, num_computed) are in its KV cache, and
    the features of [num_computed, end) are pending. ``base`` is the first position of a block."""

    def __init__(self, base: int, num_computed: int) -> None:
        self.base = base
        self.num_computed = num_computed
        self.num_pending = 0
        self._parts: list[tuple[torch.Tensor, Sequence[int]]] = []  # features, and which rows
        self._num_owned = 0  # leading parts that hold no rows of other sequences

    @property
    def end(self) -> int:
        return self.num_computed + self.num_pending

    def add_features(self, features: torch.Tensor, rows: Sequence[int]) -> None:
        """Adds rows of a step's features, by reference: most are never used while drafting
        rests."""
        num_rows = features.shape[0]
        if num_rows > _MAX_SHARED_ROWS and len(rows) * _MIN_SHARE < num_rows:
            self._copy_shared()
            self._parts.append((select_rows(features, rows).clone(), range(len(rows))))
            self._num_owned += 1
        else:
            self._parts.append((features, rows))
        self.num_pending += len(rows)
        if len(self._parts) - self._num_owned >= _MAX_SHARED_STEPS:
            self._copy_shared()

    def pop_features(self, count: int) -> torch.Tensor:
        """Removes and returns the features of the first ``count`` pending positions."""
        is_all = count == self.num_pending
        rows = self._joined(0)
        self._set_pending(rows[count:])
        self.num_computed += count
        return rows if is_all else rows[:count]

    def truncate(self, length: int) -> None:
        """Drops positions from ``length`` on."""
        if length <= self.num_computed:
            self.num_computed = max(self.base, length)
            self._set_pending(None)
        elif length < self.end:
            self._set_pending(self._joined(0)[: length - self.num_computed])

    def _set_pending(self, rows: torch.Tensor | None) -> None:
        self.num_pending = 0 if rows is None else len(rows)
        self._parts = []
        if rows is not None and self.num_pending:
            self._parts.append((rows, range(self.num_pending)))
        self._num_owned = len(self._parts)

    def _copy_shared(self) -> None:
        """Copies the own rows of shared features, so that those can be freed."""
        if len(self._parts) > self._num_owned:
            own = self._joined(self._num_owned)
            self._parts[self._num_owned :] = [(own, range(len(own)))]
            self._num_owned += 1

    def _joined(self, first: int) -> torch.Tensor:
        """The rows of the parts from ``first`` on."""
        rows = [select_rows(features, rows) for features, rows in self._parts[first:]]
        return rows[0] if len(rows) == 1 else torch.cat(rows)


class EagleDrafter:
    """A ``Drafter``: chains where ``width`` is 1, else EAGLE-2's dynamic trees."""

    def __init__(
        self,
        head: DraftHead,
        *,
        num_blocks: int,
        block_size: int,
        max_sequences: int,
        name: str = "eagle",
    ) -> None:
        """``num_blocks`` of ``block_size`` positions are those of the target's KV cache;
        ``max_sequences`` can have drafts in one step."""
        self.name = name
        self.feature_layers = head.feature_layers
        self._head = head
        self._has_chains = isinstance(head, ChainHead)  # once: checks of protocols are slow
        self._block_size = block_size
        self._num_scratch = -(-_SCRATCH_TOKENS // block_size)
        self._first_scratch = num_blocks
        self._max_sequences = max_sequences
        self._cache = head.make_cache(num_blocks + max_sequences * self._num_scratch, block_size)
        self._cached_lengths = _CachedLengths(num_blocks, block_size)
        self._progress: dict[int, _HeadProgress] = {}
        self._without_features: set[int] = set()  # sequences whose last positions had none
        self._target_ids: list[int] = head.target_ids.tolist()

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            self._cached_lengths.copy_block(copy)
            with torch.inference_mode():
                self._cache.copy_rows(copy.source, copy.target, copy.num_rows)

    def observe_computed(self, computed: Sequence[ComputedTokens]) -> None:
        for part in computed:
            if part.features is not None:
                self._add_features(part.sequence, part.start, part.rows, part.features)
            else:
                self._progress.pop(part.sequence.seq_id, None)
                self._without_features.add(part.sequence.seq_id)
                end = part.start + part.length
                self._cached_lengths.invalidate(part.sequence.block_ids, part.start, end)

    def truncate_sequence(self, sequence: TokenSequence, length: int) -> None:
        progress = self._progress.get(sequence.seq_id)
        if progress is not None:
            progress.truncate(length)

    def close_sequence(self, sequence: TokenSequence) -> None:
        """Computes the pending positions if they are few: the prefix cache may continue from here.

        Where drafting rests, the whole text is pending, and computing it would cost what resting
        saves (5% of the time with 16 sequences): a continuation does without.
        """
        self._without_features.discard(sequence.seq_id)
        progress = self._progress.pop(sequence.seq_id, None)
        if (
            progress is not None
            and sequence.block_ids
            and progress.num_pending <= _MAX_PENDING_AT_CLOSE
        ):
            self._prefill_pending(sequence, progress)

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        able: dict[int, _HeadProgress] = {}
        for index, request in enumerate(requests[: self._max_sequences]):
            progress = self._progress.get(request.sequence.seq_id)
            if (
                progress is not None
                and progress.num_pending > 0
                and progress.end == request.sequence.computed_len
            ):
                able[index] = progress
        trees = [EMPTY] * len(requests)
        if not able:
            return trees
        chosen = [requests[index] for index in able]
        with torch.inference_mode():
            drafted = self._draft(chosen, list(able.values()))
        for index, tree in zip(able, drafted, strict=True):
            trees[index] = tree
        return trees

    def _draft(
        self, requests: Sequence[DraftRequest], progresses: Sequence[_HeadProgress]
    ) -> list[DraftTree]:
        tables = [
            self._draft_table(index, request.sequence, progress)
            for index, (request, progress) in enumerate(zip(requests, progresses, strict=True))
        ]
        parts, last_rows = self._pending_parts(requests, progresses, tables)
        head = self._head
        if self._has_chains and all(r.shape.width == 1 for r in requests):
            assert isinstance(head, ChainHead)
            return head.draft_chains(self._batch(parts, last_rows), self._cache, requests)
        result = head.forward(self._batch(parts, last_rows), self._cache)
        slots = [
            ScratchSlots(table, segment.end, len(table) * self._block_size - segment.end)
            for table, (segment, _, _) in zip(tables, parts, strict=True)
        ]
        expander = TreeExpander(requests, result, slots, self._target_ids)
        while (batch := expander.next_batch()) is not None:
            expander.add_candidates(head.forward(batch, self._cache))
        return expander.best_trees()

    def _add_features(
        self, sequence: TokenSequence, start: int, rows: Sequence[int], features: torch.Tensor
    ) -> None:
        progress = self._progress.get(sequence.seq_id)
        if progress is not None and start != progress.end:
            # A prefilled prompt computes its last position once more when it is answered; a
            # preempted sequence starts with cached blocks again.
            progress.truncate(start)
            if progress.end != start or start < sequence.prompt_len - 1:
                progress = None
        if progress is None:
            progress = self._open_sequence(sequence, start)
            self._progress[sequence.seq_id] = progress
        self._cached_lengths.invalidate(sequence.block_ids, start, start + len(rows))
        skip = max(0, progress.base - start)
        if skip < len(rows):
            progress.add_features(features, rows[skip:] if skip else rows)
        if not sequence.generates or progress.num_pending > _MAX_PENDING:
            self._prefill_pending(sequence, progress)

    def _open_sequence(self, sequence: TokenSequence, start: int) -> _HeadProgress:
        """The progress in a sequence whose first ``start`` positions came from the prefix cache, or
        were computed without features."""
        max_gap = 0 if sequence.seq_id in self._without_features else _MAX_GAP
        self._without_features.discard(sequence.seq_id)
        if start - self._cached_lengths.num_leading(sequence.block_ids, start) <= max_gap:
            return _HeadProgress(0, start)
        base = -(-start // self._block_size) * self._block_size
        return _HeadProgress(base, base)

    def _prefill_pending(self, sequence: TokenSequence, progress: _HeadProgress) -> None:
        """Computes all pending positions whose next token is known."""
        count = min(progress.end, len(sequence.token_ids) - 1) - progress.num_computed
        with torch.inference_mode():
            while count > 0:
                length = min(count, _MAX_CHUNK)
                self._forward([self._pop_part(sequence, progress, length)], torch.arange(0))
                count -= length

    def _pending_parts(
        self,
        requests: Sequence[DraftRequest],
        progresses: Sequence[_HeadProgress],
        tables: Sequence[tuple[int, ...]],
    ) -> tuple[list[_Part], torch.Tensor]:
        """The pending positions of each sequence, at most a chunk, and int64 [len(requests)]: the
        row of each sequence's last position."""
        parts: list[_Part] = []
        last_rows: list[int] = []
        num_rows = 0
        for request, progress, table in zip(requests, progresses, tables, strict=True):
            while progress.num_pending > _MAX_CHUNK:
                part = self._pop_part(request.sequence, progress, _MAX_CHUNK)
                self._forward([part], torch.arange(0))
            parts.append(self._pop_part(request.sequence, progress, progress.num_pending, table))
            num_rows += parts[-1][0].length
            last_rows.append(num_rows - 1)
        return parts, torch.from_numpy(np.array(last_rows, dtype=np.int64))

    def _pop_part(
        self,
        sequence: TokenSequence,
        progress: _HeadProgress,
        length: int,
        table: tuple[int, ...] | None = None,
    ) -> _Part:
        """The first ``length`` pending positions; ``table`` None: in the sequence's own blocks."""
        start, end = progress.num_computed, progress.num_computed + length
        if table is None:
            table = tuple(sequence.block_ids[progress.base // self._block_size :])
        self._cached_lengths.mark_computed(sequence.block_ids, start, end)
        segment = Segment(table, start - progress.base, length)
        return segment, progress.pop_features(length), sequence.token_ids[start + 1 : end + 1]

    def _forward(self, parts: Sequence[_Part], output_rows: torch.Tensor) -> None:
        self._head.forward(self._batch(parts, output_rows), self._cache)

    def _batch(self, parts: Sequence[_Part], output_rows: torch.Tensor) -> HeadBatch:
        tokens = [token for _, _, tokens in parts for token in tokens]
        states = [features for _, features, _ in parts]
        return HeadBatch(
            # Through numpy: faster than torch.tensor, and this runs in every step.
            token_ids=torch.from_numpy(np.array(tokens, dtype=np.int64)),
            states=states[0] if len(states) == 1 else torch.cat(states),
            from_target=True,
            segments=tuple(segment for segment, _, _ in parts),
            output_rows=output_rows,
        )

    def _draft_table(
        self, index: int, sequence: TokenSequence, progress: _HeadProgress
    ) -> tuple[int, ...]:
        """The blocks of a sequence up to its last token, then scratch blocks for its drafts, which
        are reused in the next step."""
        size = self._block_size
        own = sequence.block_ids[progress.base // size : -(-len(sequence.token_ids) // size)]
        first = self._first_scratch + index * self._num_scratch
        return (*own, *range(first, first + self._num_scratch))
