"""The typed hand-off from the scheduler to the model: what one step computes, and what comes back.

Rows of a batch are tokens. Each segment is a run of rows of one sequence, whose keys and values lie
in blocks of the KV pool::

    rows       | seg 0 rows ...  | seg 1 rows | ...        sum of lengths = T
    sequence   [0, start) already in KV | [start, start + length) computed by this step
    position p lies at block_ids[p // block_size] * block_size + p % block_size of the pool

The rows of a segment follow one another, or they are a tree (a verification step of speculative
decoding): guesses at what follows, several of which may stand for the same place in the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.gpu.sampling.inputs import SamplingInputs

MAXIMUM_LEN = 64  # logits of which the largest is noted, see ``ForwardResult``


def tree_depths(parents: Sequence[int]) -> list[int]:
    """How far each row lies behind the first place of its segment: 0 where the parent is -1."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of a batch that belong to one sequence: positions ``[start, start + length)`` of it.

    ``block_ids`` hold at least the positions up to the last of these. Several segments may share
    blocks that they only read; a block that is written belongs to one segment.

    ``parents`` None: a chain, each row follows the one before. Else a tree: row r follows row
    ``parents[r]`` < r of the same segment or, with -1, what lies before ``start``. Row r is kept at
    position start + r whatever it follows; its place in the text, and so its RoPE position, is
    start + depth(r); it sees all positions before ``start``, the rows it descends from, and
    itself.

    ``skipped``: so many positions of the text lie in none of ``block_ids`` and are not seen (see
    ``attention_window``). They are not counted by ``start``, but the place in the text of a row is
    so much further on.
    """

    block_ids: tuple[int, ...]
    start: int
    length: int
    parents: tuple[int, ...] | None = None
    skipped: int = 0

    @property
    def end(self) -> int:
        """One past the last position; the blocks hold this many positions afterwards."""
        return self.start + self.length

    @property
    def is_tree(self) -> bool:
        """Some row does not follow the row before it."""
        return self.parents is not None and self.parents != tuple(range(-1, self.length - 1))


@dataclass(frozen=True, slots=True)
class TokenChoices:
    """How the tokens of a step are chosen where it is computed, so that no logits have to leave it.

    ``inputs`` has one entry a row of logits (CPU). ``keeps`` are the rows of logits, ascending,
    whose tokens the host chooses: their logits are given out, and what is chosen for them means
    nothing. ``sources`` int32 [T]: where not negative, a row's token is the one that the step
    before this one chose for that row of its logits, which the host need not know yet.
    """

    inputs: SamplingInputs
    keeps: tuple[int, ...]
    sources: torch.Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's input.

    ``token_ids`` is int64 [T], the segments' tokens one after another; ``segments`` are in row
    order; ``logit_rows`` is int64 [R], the rows whose logits are wanted (may be empty, as for a
    prefill chunk that is not the last). ``wants_features``: the hidden states of all rows are
    wanted too, of the layers that were set by ``Model.set_feature_layers``. ``choices``: only for a
    ``TokenChooser``, which then gives tokens.
    """

    token_ids: torch.Tensor
    segments: tuple[Segment, ...]
    logit_rows: torch.Tensor
    wants_features: bool = False
    choices: TokenChoices | None = None


class Launched(Protocol):
    """A step that was handed to the device."""

    def result(self) -> ForwardResult:
        """Waits for what it gives."""


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """One step's output: ``logits`` float32 [R, vocab_size] of the batch's ``logit_rows``, and
    ``features`` float32 [T, K * hidden_size], the K feature layers side by side, if wanted.

    Where tokens were chosen, ``tokens`` int64 [R] are these, -1 where the logits were unusable, and
    ``logits`` are only those of ``choices.keeps``.
    ``maxima`` float32 [R, vocab_size / ``MAXIMUM_LEN``, rounded up], where a model notes
    them: the largest of each MAXIMUM_LEN logits, NaN where one of these is NaN.
    """

    logits: torch.Tensor
    features: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    maxima: torch.Tensor | None = None
