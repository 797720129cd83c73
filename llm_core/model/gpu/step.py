"""Packed steps, and their division into groups of segments with the same attention kernel."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch

from llm_core.batch import ForwardResult
from llm_core.model.gpu.graphs import ROW_BUCKETS, StepShape
from llm_core.model.gpu.packed_batch import MAX_TREE_ROWS, StepLayout, StepTensors


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Consecutive segments of one kind and their rows; segments have at most ``max_rows`` rows and
    end within ``max_length`` positions."""

    kind: Literal["decode", "tree", "prefill"]
    segments: slice
    rows: slice
    max_rows: int
    max_length: int


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A step as broadcast to all ranks. ``words`` int32 on the CPU; ``shape`` None: no graph.

    ``num_rows`` and ``num_logit_rows`` do not count padding. ``samples``: also sample tokens.
    """

    words: torch.Tensor
    layout: StepLayout
    shape: StepShape | None
    num_rows: int
    num_logit_rows: int
    wants_features: bool
    samples: bool = False


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Outputs of a step on the device, possibly padded, valid until the next step. ``tokens`` is
    None if none were sampled."""

    logits: torch.Tensor
    features: torch.Tensor | None
    tokens: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A result being copied to the host; complete if ``done`` is None."""

    fetched: ForwardResult
    done: torch.cuda.Event | None

    def result(self) -> ForwardResult:
        if self.done is not None:
            self.done.synchronize()
        return self.fetched


def attention_groups(step: PackedStep) -> list[AttentionGroup]:
    """Groups of consecutive segments of one kind, for a step without padding."""
    fields = StepTensors.of(step.words, step.layout)
    bounds, ends = fields.row_starts.tolist(), fields.ends.tolist()
    kinds = [_kind(stop - start) for start, stop in pairwise(bounds)]
    groups = []
    first = 0
    for index in range(1, len(kinds) + 1):
        if index < len(kinds) and kinds[index] == kinds[first]:
            continue
        longest = max(stop - start for start, stop in pairwise(bounds[first : index + 1]))
        if kinds[first] == "tree":  # few variants: a new length must not trigger a compilation
            longest = ROW_BUCKETS[bisect_left(ROW_BUCKETS, longest)]
        groups.append(
            AttentionGroup(
                kinds[first],
                slice(first, index),
                slice(bounds[first], bounds[index]),
                longest,
                max(ends[first:index]),
            )
        )
        first = index
    return groups


def shape_groups(shape: StepShape) -> list[AttentionGroup]:
    """The group of a padded step."""
    kind = _kind(shape.rows_each)
    assert kind != "prefill", "a prompt chunk has no shape"
    everything = slice(0, shape.num_sequences), slice(0, shape.num_rows)
    return [AttentionGroup(kind, *everything, shape.rows_each, shape.max_length)]


def _kind(num_rows: int) -> Literal["decode", "tree", "prefill"]:
    if num_rows == 1:
        return "decode"
    return "tree" if num_rows <= MAX_TREE_ROWS else "prefill"


def padded_layout(shape: StepShape, block_size: int) -> StepLayout:
    """The layout of a step of this shape, with logits for all rows."""
    width = -(-shape.max_length // block_size)
    return StepLayout(shape.num_rows, shape.num_sequences, shape.num_rows, width)
