"""One step's plan as a batch of rows, and its rows of logits as what each chunk gets.

Little is done here by torch: each call of it costs tens of microseconds where a step of some
milliseconds has driven its code out of the caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from llm_core.batch import ForwardBatch, ForwardResult, Segment, TokenChoices
from llm_core.sampling import ChunkRow, SamplerBackend
from llm_core.scheduling import GONE, AttentionWindow, BlockTables, Chunk, StepPlan


def make_batch(
    plan: StepPlan,
    tables: BlockTables,
    *,
    wants_features: bool,
    choices: TokenChoices | None = None,
) -> ForwardBatch:
    """The rows of all chunks; of a chunk with drafts, all have logits."""
    window, block_size = tables.window, tables.pool.block_size
    token_ids: list[int] = []
    segments: list[Segment] = []
    logit_rows: list[int] = []
    for chunk in plan.chunks:
        end = chunk.start + chunk.length
        token_ids += chunk.sequence.token_ids[chunk.start : end]
        if chunk.wants_logits:
            num_rows = len(token_ids)
            logit_rows += range(num_rows - 1, num_rows + len(chunk.tree))
        token_ids += chunk.tree.token_ids
        parents = chunk.tree.row_parents if chunk.tree else None
        if window is not None:
            assert not chunk.tree, "drafts and a window do not go together"
            table = chunk.sequence.block_ids
            segments += windowed_segments(window, table, chunk.start, chunk.length, block_size)
            continue
        block_ids = tuple(chunk.sequence.block_ids)
        segments.append(Segment(block_ids, chunk.start, chunk.num_rows, parents))
    return ForwardBatch(
        token_ids=torch.from_numpy(np.array(token_ids, dtype=np.int64)),
        segments=tuple(segments),
        logit_rows=torch.from_numpy(np.array(logit_rows, dtype=np.int64)),
        wants_features=wants_features,
        choices=choices,
    )


def windowed_segments(
    window: AttentionWindow, block_ids: list[int], start: int, length: int, block_size: int
) -> Iterator[Segment]:
    """Positions [start, start + length) as segments, the rows of each of which see the same blocks.
    Their tables have no hole; ``Segment.skipped`` says what was left out."""
    end = start + length
    while start < end:
        block = start // block_size
        unseen = window.unseen(block)
        last = block if unseen else max(block, window.num_sinks + window.num_recent)
        stop = min(end, (last + 1) * block_size)
        ids = tuple(block_ids[: -(-stop // block_size)])
        if unseen:
            ids = (*ids[: unseen.start], *ids[unseen.stop :])
        assert GONE not in ids, "what a row sees is there"
        skipped = len(unseen) * block_size
        yield Segment(ids, start - skipped, stop - start, skipped=skipped)
        start = stop


def rows_by_chunk(
    plan: StepPlan,
    result: ForwardResult,
    vocab_size: int,
    keeps: Sequence[int] = (),
    sampler: SamplerBackend | None = None,
) -> Iterator[tuple[Chunk, list[ChunkRow]]]:
    """Each chunk with its rows of logits or tokens: none, one, or one more than drafts.

    Where tokens were chosen, ``keeps`` are the rows whose logits were given out instead. Of these
    only ``vocab_size`` are words: a model's vocabulary may be padded beyond the tokenizer's (and
    then the maxima of its logits are not those of words). ``sampler``: samples from rows.
    """
    logits = result.logits.numpy()
    maxima = None
    if logits.shape[1] != vocab_size:
        logits = logits[:, :vocab_size]
    elif result.block_maxima is not None:
        maxima = result.block_maxima.numpy()
    if result.tokens is None:
        rows = [
            ChunkRow(row, None if maxima is None else maxima[place], sampler=sampler)
            for place, row in enumerate(logits)
        ]
    else:
        rows = [ChunkRow(token_id=token_id) for token_id in result.tokens.tolist()]
        for place, row in enumerate(keeps):
            rows[row] = ChunkRow(logits[place])
    first = 0
    for chunk in plan.chunks:
        last = first + (1 + len(chunk.tree) if chunk.wants_logits else 0)
        yield chunk, rows[first:last]
        first = last
