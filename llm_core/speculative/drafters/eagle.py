"""Drafts by an EAGLE head: it reads the target's hidden states and guesses on from its own.

The head's keys and values lie in a cache with the block ids of the target's, so what sequences
share, copy or keep for later they share, copy and keep for the head too. ``_Filled`` knows how far
each block has them. A row needs the token after it, so the last position of a shared prefix was
computed with the token that followed there: one position in a text, and only drafts depend on it.

Where the beginning of a text was never read (the target took it from the prefix cache, or computed
it where drafts rest), the head reads on from the next block and does without what lies before; RoPE
knows distances only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from llm_core.batch import Segment
from llm_core.scheduling import EMPTY, BlockCopy, DraftTree, TokenSequence
from llm_core.speculative.drafters.base import ComputedRows, DraftRequest, cut_out
from llm_core.speculative.drafters.tree_expansion import DraftPlace, TreeExpander
from llm_core.speculative.heads.base import ChainHead, DraftHead, HeadBatch

_LARGEST_CHUNK = 256  # rows of a prompt in one forward of the head
_MAX_WAITING = 4096  # features of so many rows are kept for a sequence that is not drafted for
_MAX_HOLE = 2  # positions that were computed for another continuation are taken as they are
_FEW_WAITING = 8  # what a sequence that is drafted for leaves unread at its end, at most
_LARGEST_SHARED = 64  # rows of a step that sequences keep together until they are read
_MOST_SHARED = 64  # such steps kept by one sequence; then its rows are cut out
_KEPT_SHARE = 8  # of larger steps all is kept by those that have such a part of it
_SCRATCH_ROWS = 64  # rows of a tree that is followed, for each sequence

# Rows of one sequence: their segment, features, and the tokens after them.
_Part = tuple[Segment, torch.Tensor, list[int]]


class _Filled:
    """How many positions of each block, from its first, hold the head's keys and values."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._size = block_size
        self._lens = [0] * num_blocks

    def copied(self, copy: BlockCopy) -> None:
        self._lens[copy.target] = min(self._lens[copy.source], copy.num_rows)

    def cut(self, block_ids: Sequence[int], start: int, end: int) -> None:
        """Positions from ``start`` on are others now."""
        first, inside = divmod(start, self._size)
        for index in range(first, (end - 1) // self._size + 1):
            block = block_ids[index]
            if self._lens[block] > inside:
                self._lens[block] = inside
            inside = 0

    def fill(self, block_ids: Sequence[int], start: int, end: int) -> None:
        """Positions [start, end) were computed, and those of the same block before them."""
        for index in range(start // self._size, (end - 1) // self._size + 1):
            self._lens[block_ids[index]] = min(self._size, end - index * self._size)

    def leading(self, block_ids: Sequence[int], limit: int) -> int:
        """How many positions from the first have them, ``limit`` at most."""
        count = 0
        for block in block_ids:
            count += self._lens[block]
            if self._lens[block] < self._size or count >= limit:
                break
        return min(count, limit)


class _Reading:
    """How far the head has read a sequence: positions [base, done) are in its cache, and features
    of [done, end) wait for it. ``base`` is the first of a block."""

    def __init__(self, base: int, done: int) -> None:
        self.base = base
        self.done = done
        self.num_waiting = 0
        self._parts: list[tuple[torch.Tensor, Sequence[int]]] = []  # features, and which rows
        self._num_own = 0  # leading parts that hold nobody else's rows

    @property
    def end(self) -> int:
        return self.done + self.num_waiting

    def add(self, features: torch.Tensor, rows: Sequence[int]) -> None:
        """Rows of a step. Cut out later, if at all: most are never read where drafts rest."""
        num_rows = features.shape[0]
        if num_rows > _LARGEST_SHARED and len(rows) * _KEPT_SHARE < num_rows:
            self._cut_out()
            self._parts.append((cut_out(features, rows).clone(), range(len(rows))))
            self._num_own += 1
        else:
            self._parts.append((features, rows))
        self.num_waiting += len(rows)
        if len(self._parts) - self._num_own >= _MOST_SHARED:
            self._cut_out()

    def take(self, count: int) -> torch.Tensor:
        """The first ``count`` waiting rows."""
        is_all = count == self.num_waiting
        rows = self._joined(0)
        self._keep(rows[count:])
        self.done += count
        return rows if is_all else rows[:count]

    def cut(self, length: int) -> None:
        """Positions from ``length`` on are not there any more."""
        if length <= self.done:
            self.done = max(self.base, length)
            self._keep(None)
        elif length < self.end:
            self._keep(self._joined(0)[: length - self.done])

    def _keep(self, rows: torch.Tensor | None) -> None:
        """Only these wait."""
        self.num_waiting = 0 if rows is None else len(rows)
        self._parts = []
        if rows is not None and self.num_waiting:
            self._parts.append((rows, range(self.num_waiting)))
        self._num_own = len(self._parts)

    def _cut_out(self) -> None:
        """Lets go of what other sequences computed in the same steps."""
        if len(self._parts) > self._num_own:
            own = self._joined(self._num_own)
            self._parts[self._num_own :] = [(own, range(len(own)))]
            self._num_own += 1

    def _joined(self, first: int) -> torch.Tensor:
        """Rows of the parts from ``first`` on."""
        rows = [cut_out(features, rows) for features, rows in self._parts[first:]]
        return rows[0] if len(rows) == 1 else torch.cat(rows)


class EagleDrafter:
    """See ``Drafter``. Chains where ``width`` is 1, else EAGLE-2's dynamic trees."""

    def __init__(
        self,
        head: DraftHead,
        *,
        num_blocks: int,
        block_size: int,
        max_sequences: int,
        name: str = "eagle",
    ) -> None:
        """``num_blocks`` of ``block_size`` positions are the target's; ``max_sequences`` may be
        drafted for at once."""
        self.name = name
        self.feature_layers = head.feature_layers
        self._head = head
        self._drafts_chains = isinstance(head, ChainHead)  # asking a protocol takes a while
        self._block_size = block_size
        self._num_scratch = -(-_SCRATCH_ROWS // block_size)
        self._first_scratch = num_blocks
        self._max_sequences = max_sequences
        self._cache = head.make_cache(num_blocks + max_sequences * self._num_scratch, block_size)
        self._filled = _Filled(num_blocks, block_size)
        self._readings: dict[int, _Reading] = {}
        self._unread: set[int] = set()  # sequences whose last rows were not kept
        self._target_ids: list[int] = head.target_ids.tolist()

    def copied(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            self._filled.copied(copy)
            with torch.inference_mode():
                self._cache.copy_rows(copy.source, copy.target, copy.num_rows)

    def observe(self, rows: Sequence[ComputedRows]) -> None:
        for row in rows:
            if row.features is not None:
                self._observe(row.sequence, row.start, row.rows, row.features)
            else:
                self._readings.pop(row.sequence.seq_id, None)
                self._unread.add(row.sequence.seq_id)
                self._filled.cut(row.sequence.block_ids, row.start, row.start + row.length)

    def truncate(self, sequence: TokenSequence, length: int) -> None:
        reading = self._readings.get(sequence.seq_id)
        if reading is not None:
            reading.cut(length)

    def close(self, sequence: TokenSequence) -> None:
        """Reads what is left, if that is little: somebody may go on from here by the prefix cache.

        Where drafts do not pay all of a text is left, and reading it would take the time that not
        drafting saves (5% of it with 16 streams): whoever goes on there does without.
        """
        self._unread.discard(sequence.seq_id)
        reading = self._readings.pop(sequence.seq_id, None)
        if reading is not None and sequence.block_ids and reading.num_waiting <= _FEW_WAITING:
            self._read_all(sequence, reading)

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        able: dict[int, _Reading] = {}
        for index, request in enumerate(requests[: self._max_sequences]):
            reading = self._readings.get(request.sequence.seq_id)
            if (
                reading is not None
                and reading.num_waiting > 0
                and reading.end == request.sequence.computed_len
            ):
                able[index] = reading
        trees = [EMPTY] * len(requests)
        if not able:
            return trees
        chosen = [requests[index] for index in able]
        with torch.inference_mode():
            drafted = self._drafted(chosen, list(able.values()))
        for index, tree in zip(able, drafted, strict=True):
            trees[index] = tree
        return trees

    def _drafted(
        self, requests: Sequence[DraftRequest], readings: Sequence[_Reading]
    ) -> list[DraftTree]:
        tables = [
            self._table(index, request.sequence, reading)
            for index, (request, reading) in enumerate(zip(requests, readings, strict=True))
        ]
        parts, last_rows = self._waiting_parts(requests, readings, tables)
        head = self._head
        if self._drafts_chains and all(r.shape.width == 1 for r in requests):
            assert isinstance(head, ChainHead)
            return head.draft_chains(self._batch(parts, last_rows), self._cache, requests)
        result = head.forward(self._batch(parts, last_rows), self._cache)
        places = [
            DraftPlace(table, segment.end, len(table) * self._block_size - segment.end)
            for table, (segment, _, _) in zip(tables, parts, strict=True)
        ]
        grower = TreeExpander(requests, result, places, self._target_ids)
        while (batch := grower.next_batch()) is not None:
            grower.take(head.forward(batch, self._cache))
        return grower.trees()

    def _observe(
        self, sequence: TokenSequence, start: int, rows: Sequence[int], features: torch.Tensor
    ) -> None:
        reading = self._readings.get(sequence.seq_id)
        if reading is not None and start != reading.end:
            # A prompt that was read ahead computes its last row once more when it is answered. What
            # was preempted begins with cached blocks again.
            reading.cut(start)
            if reading.end != start or start < sequence.prompt_len - 1:
                reading = None
        if reading is None:
            reading = self._open(sequence, start)
            self._readings[sequence.seq_id] = reading
        self._filled.cut(sequence.block_ids, start, start + len(rows))
        skip = max(0, reading.base - start)
        if skip < len(rows):
            reading.add(features, rows[skip:] if skip else rows)
        if not sequence.generates or reading.num_waiting > _MAX_WAITING:
            self._read_all(sequence, reading)

    def _open(self, sequence: TokenSequence, start: int) -> _Reading:
        """A sequence whose first ``start`` positions came from the prefix cache, or were computed
        while drafts rested."""
        hole = 0 if sequence.seq_id in self._unread else _MAX_HOLE
        self._unread.discard(sequence.seq_id)
        if start - self._filled.leading(sequence.block_ids, start) <= hole:
            return _Reading(0, start)
        base = -(-start // self._block_size) * self._block_size
        return _Reading(base, base)

    def _read_all(self, sequence: TokenSequence, reading: _Reading) -> None:
        """Reads all rows whose next token is known."""
        count = min(reading.end, len(sequence.token_ids) - 1) - reading.done
        with torch.inference_mode():
            while count > 0:
                length = min(count, _LARGEST_CHUNK)
                self._forward([self._segment(sequence, reading, length)], torch.arange(0))
                count -= length

    def _waiting_parts(
        self,
        requests: Sequence[DraftRequest],
        readings: Sequence[_Reading],
        tables: Sequence[tuple[int, ...]],
    ) -> tuple[list[_Part], torch.Tensor]:
        """What waits, and which rows are each sequence's last: there drafts begin."""
        parts: list[_Part] = []
        last_rows: list[int] = []
        num_rows = 0
        for request, reading, table in zip(requests, readings, tables, strict=True):
            while reading.num_waiting > _LARGEST_CHUNK:
                part = self._segment(request.sequence, reading, _LARGEST_CHUNK)
                self._forward([part], torch.arange(0))
            parts.append(self._segment(request.sequence, reading, reading.num_waiting, table))
            num_rows += parts[-1][0].length
            last_rows.append(num_rows - 1)
        return parts, torch.from_numpy(np.array(last_rows, dtype=np.int64))

    def _segment(
        self,
        sequence: TokenSequence,
        reading: _Reading,
        length: int,
        table: tuple[int, ...] | None = None,
    ) -> _Part:
        """The first ``length`` waiting rows as a segment (in the blocks ``table``, if they are not
        just the sequence's), their features, the tokens after them."""
        start, end = reading.done, reading.done + length
        if table is None:
            table = tuple(sequence.block_ids[reading.base // self._block_size :])
        self._filled.fill(sequence.block_ids, start, end)
        segment = Segment(table, start - reading.base, length)
        return segment, reading.take(length), sequence.token_ids[start + 1 : end + 1]

    def _forward(self, parts: Sequence[_Part], output_rows: torch.Tensor) -> None:
        self._head.forward(self._batch(parts, output_rows), self._cache)

    def _batch(self, parts: Sequence[_Part], output_rows: torch.Tensor) -> HeadBatch:
        tokens = [token for _, _, tokens in parts for token in tokens]
        states = [features for _, features, _ in parts]
        return HeadBatch(
            # By numpy: cheaper than torch's own way, in every step.
            token_ids=torch.from_numpy(np.array(tokens, dtype=np.int64)),
            states=states[0] if len(states) == 1 else torch.cat(states),
            is_real=True,
            segments=tuple(segment for segment, _, _ in parts),
            output_rows=output_rows,
        )

    def _table(self, index: int, sequence: TokenSequence, reading: _Reading) -> tuple[int, ...]:
        """Blocks of a sequence as far as its tokens reach, and then some of nobody's: what is
        followed there is over before the target's step."""
        size = self._block_size
        own = sequence.block_ids[reading.base // size : -(-len(sequence.token_ids) // size)]
        first = self._first_scratch + index * self._num_scratch
        return (*own, *range(first, first + self._num_scratch))
