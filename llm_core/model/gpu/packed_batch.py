"""A step's input packed into one int32 array, for one copy to the device or to other ranks.

    seeds [R, 2] | token_ids [T] | sources [T] | positions [T] | slots [T] | ancestors [T, 2]
    | row_starts [B + 1] | starts [B] | ends [B] | logit_rows [R] | temperature [R] | top_k [R]
    | top_p [R] | min_p [R] | places [R] | block_tables [B, W]

Each field is aligned to 16 bytes, for vector loads.

``positions`` are RoPE positions, ``slots`` positions in the KV pool; ``ancestors`` are bit masks of
the rows of the segment that a row sees including itself (row r is bit r % 32 of word r // 32), for
segments of up to 64 rows. Segment b has the rows [row_starts[b], row_starts[b + 1]) at positions
[starts[b], ends[b]). Padding rows have slot -1; padding segments have no rows and end 0.
``sources`` are those of ``batch.TokenChoices`` (-1: none). The fields per row of logits are those
of ``SamplingInputs`` (``places``: its positions; float32 as bits), greedy by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.gpu.sampling.inputs import SamplingInputs
from llm_core.batch import ForwardBatch, Segment, tree_depths

MAX_TREE_ROWS = 64
_ANCESTOR_WORDS = MAX_TREE_ROWS // 32
_ALIGNED = 4  # words

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Numbers of rows, segments and rows of logits, and width of the block tables."""

    num_rows: int
    num_segments: int
    num_logit_rows: int
    table_width: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Words of each field, in order."""
        rows, segments, wanted = self.num_rows, self.num_segments, self.num_logit_rows
        per_row = (rows, rows, rows, rows, _ANCESTOR_WORDS * rows)
        per_segment = (segments + 1, segments, segments)
        return (2 * wanted, *per_row, *per_segment, *(wanted,) * 6, segments * self.table_width)

    @property
    def num_words(self) -> int:
        return sum(map(_aligned, self.sizes))

    def split(self, words: torch.Tensor) -> list[torch.Tensor]:
        """Views of the fields of ``words`` [num_words], in order."""
        fields, at = [], 0
        for size in self.sizes:
            fields.append(words[at : at + size])
            at += _aligned(size)
        return fields


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Views into a step's words: int32 (except ``choices``), on the same device."""

    token_ids: torch.Tensor
    sources: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    ancestors: torch.Tensor
    row_starts: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    logit_rows: torch.Tensor
    block_tables: torch.Tensor
    choices: SamplingInputs

    @classmethod
    def of(cls, words: torch.Tensor, layout: StepLayout) -> StepTensors:
        """``words`` [layout.num_words]."""
        seeds, *fields = layout.split(words)
        token_ids, sources, positions, slots, ancestors, row_starts, starts, ends, *rest = fields
        logit_rows, temperature, top_k, top_p, min_p, places, tables = rest
        return cls(
            token_ids=token_ids,
            sources=sources,
            positions=positions,
            slots=slots,
            ancestors=ancestors.view(layout.num_rows, _ANCESTOR_WORDS),
            row_starts=row_starts,
            starts=starts,
            ends=ends,
            logit_rows=logit_rows,
            block_tables=tables.view(layout.num_segments, layout.table_width),
            choices=SamplingInputs(
                temperature.view(torch.float32),
                top_k,
                top_p.view(torch.float32),
                min_p.view(torch.float32),
                seeds.view(torch.int64),
                places,
            ),
        )


def layout_of(batch: ForwardBatch, block_size: int) -> StepLayout:
    """The layout of a batch without padding."""
    width = max(-(-segment.end // block_size) for segment in batch.segments)
    num_rows, num_logit_rows = int(batch.token_ids.shape[0]), int(batch.logit_rows.shape[0])
    return StepLayout(num_rows, len(batch.segments), num_logit_rows, width)


def pack(batch: ForwardBatch, layout: StepLayout, block_size: int, words: torch.Tensor) -> None:
    """Writes a batch into ``words`` int32 [layout.num_words] (CPU), padded to ``layout``.

    Padding rows of logits refer to row 0. Raises ValueError for a tree of more than 64 rows.
    """
    _, *fields, tables = [part.numpy() for part in layout.split(words)]
    token_ids, sources, positions, slots, ancestors, row_starts, starts, ends, logit_rows, *_ = (
        fields
    )
    _pack_choices(batch, StepTensors.of(words, layout).choices)
    sources[:] = -1
    if batch.choices is not None:
        sources[: len(batch.choices.sources)] = batch.choices.sources.numpy()
    ancestors = ancestors.reshape(layout.num_rows, _ANCESTOR_WORDS)
    tables = tables.reshape(layout.num_segments, layout.table_width)
    num_rows, num_wanted = batch.token_ids.shape[0], batch.logit_rows.shape[0]
    token_ids[:num_rows] = batch.token_ids.numpy()
    logit_rows[:num_wanted] = batch.logit_rows.numpy()
    for field in (token_ids, positions, slots):
        field[num_rows:] = 0
    slots[num_rows:] = -1
    ancestors[:] = 0
    logit_rows[num_wanted:] = 0
    tables[:] = 0
    row_starts[0] = at = 0
    for index, segment in enumerate(batch.segments):
        rows = slice(at, at + segment.length)
        blocks = np.array(segment.block_ids[: layout.table_width], dtype=np.int32)
        tables[index, : len(blocks)] = blocks
        where = np.arange(segment.start, segment.end, dtype=np.int32)
        slots[rows] = blocks[where // block_size] * block_size + where % block_size
        positions[rows] = where
        if segment.parents is not None and segment.is_tree:
            positions[rows] = segment.start + np.array(tree_depths(segment.parents))
        if segment.length <= MAX_TREE_ROWS or segment.is_tree:
            ancestors[rows] = ancestor_words(segment)
        starts[index], ends[index] = segment.start, segment.end
        at += segment.length
        row_starts[index + 1] = at
    num_segments = len(batch.segments)
    row_starts[num_segments + 1 :] = at
    starts[num_segments:] = 0
    ends[num_segments:] = 0


def _pack_choices(batch: ForwardBatch, into: SamplingInputs) -> None:
    num_wanted = batch.logit_rows.shape[0]
    for field, value in (
        *((into.temperature, 0), (into.top_k, 0), (into.top_p, 1), (into.min_p, 0)),
        *((into.seeds, 0), (into.positions, 0)),
    ):
        field.fill_(value)
    if batch.choices is None or num_wanted == 0:
        return
    given = batch.choices.inputs
    into.temperature[:num_wanted] = given.temperature
    into.top_k[:num_wanted] = given.top_k
    into.top_p[:num_wanted] = given.top_p
    into.min_p[:num_wanted] = given.min_p
    into.seeds[:num_wanted] = given.seeds
    into.positions[:num_wanted] = given.positions


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def ancestor_words(segment: Segment) -> IntArray:
    """int32 [rows, 2]: bit masks of the rows that each row of a segment sees, including itself."""
    parents: Sequence[int] = segment.parents or range(-1, segment.length - 1)
    if len(parents) > MAX_TREE_ROWS:
        raise ValueError(f"a tree has {len(parents)} rows, at most {MAX_TREE_ROWS}")
    seen: list[int] = []
    for row, parent in enumerate(parents):
        seen.append((seen[parent] if parent >= 0 else 0) | 1 << row)
    return np.array(seen, dtype="<u8").view("<i4").reshape(-1, _ANCESTOR_WORDS)
