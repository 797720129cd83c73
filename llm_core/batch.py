"""Input and output of one forward pass, handed from the scheduler to the model.

Rows of a batch are tokens. Each segment is a run of rows of one sequence, whose keys and values are
in blocks of the KV pool::

    rows       | seg 0 rows ...  | seg 1 rows | ...        sum of lengths = T
    sequence   [0, start) already in KV | [start, start + length) computed by this step
    position p is in slot block_ids[p // block_size] * block_size + p % block_size of the pool

The rows of a segment are consecutive tokens or, in a verification step of speculative decoding, a
draft tree: several rows may be alternatives for the same position of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.gpu.sampling.inputs import SamplingInputs

MAXIMA_BLOCK = 64  # logits that share one of ``ForwardResult.block_maxima``


def tree_depths(parents: Sequence[int]) -> list[int]:
    """Depth of each row in its tree; 0 for rows whose parent is -1."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of a batch that belong to one sequence: positions ``[start, start + length)`` of it.

    ``block_ids`` hold at least the positions up to ``end``. Segments may share blocks that they
    only read; a block that is written belongs to one segment.

    ``parents`` None: a chain, in which each row follows the previous one. Otherwise a tree: row r
    follows row ``parents[r]`` < r of the same segment or, with -1, the position before ``start``.
    Row r is stored at position start + r; its position in the text, and its RoPE position, is
    start + depth(r); it sees all positions before ``start``, its ancestors and itself.

    ``skipped``: number of evicted positions (see ``attention_window``), which are neither in
    ``block_ids`` nor counted by ``start``, but shift the RoPE positions of the rows.
    """

    block_ids: tuple[int, ...]
    start: int
    length: int
    parents: tuple[int, ...] | None = None
    skipped: int = 0

    @property
    def end(self) -> int:
        """One past the last position; the number of positions in the blocks after the step."""
        return self.start + self.length

    @property
    def is_tree(self) -> bool:
        """Does some row not follow the previous one?"""
        return self.parents is not None and self.parents != tuple(range(-1, self.length - 1))


@dataclass(frozen=True, slots=True)
class TokenChoices:
    """Sampling on the device, so that no logits have to be copied to the host.

    ``inputs`` (CPU) has one entry per row of logits. ``keeps``: ascending rows of logits that are
    returned for sampling on the host; the tokens sampled for them on the device are meaningless.
    ``sources`` int32 [T]: if not negative, a row's token is the one that the previous step sampled
    for this row of its logits, which the host need not know yet.
    """

    inputs: SamplingInputs
    keeps: tuple[int, ...]
    sources: torch.Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's input.

    ``token_ids`` int64 [T] of all segments, in order; ``logit_rows`` int64 [R], the rows whose
    logits are wanted (possibly none, as for a prefill chunk that is not the last).
    ``wants_features``: also return the hidden states of all rows, of the layers set by
    ``Model.set_feature_layers``. ``choices``: sample on the device, only for a ``DeviceSampler``.
    """

    token_ids: torch.Tensor
    segments: tuple[Segment, ...]
    logit_rows: torch.Tensor
    wants_features: bool = False
    choices: TokenChoices | None = None


class Launched(Protocol):
    """A step that was launched on the device."""

    def result(self) -> ForwardResult:
        """Waits for the step and returns its result."""


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """One step's output: ``logits`` float32 [R, vocab_size] of the batch's ``logit_rows`` and, if
    wanted, ``features`` float32 [T, K * hidden_size], the K feature layers concatenated.

    If tokens were sampled on the device, ``tokens`` int64 [R] holds them, -1 where the logits were
    unusable, and ``logits`` has only the rows of ``choices.keeps``. ``block_maxima`` float32 [R,
    ceil(vocab_size / MAXIMA_BLOCK)], from models that compute them: the maximum of each
    MAXIMA_BLOCK logits, NaN if one of them is NaN.
    """

    logits: torch.Tensor
    features: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    block_maxima: torch.Tensor | None = None
