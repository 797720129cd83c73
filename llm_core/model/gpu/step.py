"""A packed step, and the runs of its segments that one attention kernel serves."""

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
    """Neighbouring segments, and rows, of one kind; no segment has more than ``max_rows`` rows or
    ends beyond ``max_length`` positions."""

    kind: Literal["decode", "tree", "prefill"]
    segments: slice
    rows: slice
    max_rows: int
    max_length: int


@dataclass(frozen=True, slots=True)
class PackedStep:
    """What all ranks are told of a step. ``words`` int32 on the CPU; ``shape`` None: no graph.

    Of its rows ``num_rows`` are no padding, and of its rows of logits ``num_logit_rows``.
    ``chooses``: tokens are chosen too.
    """

    words: torch.Tensor
    layout: StepLayout
    shape: StepShape | None
    num_rows: int
    num_logit_rows: int
    wants_features: bool
    chooses: bool = False


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What a step made, on the device, perhaps with padding: it holds until the next step.
    ``tokens`` None: none were chosen."""

    logits: torch.Tensor
    features: torch.Tensor | None
    tokens: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """On its way to the host; ``done`` None: it is there."""

    fetched: ForwardResult
    done: torch.cuda.Event | None

    def result(self) -> ForwardResult:
        if self.done is not None:
            self.done.synchronize()
        return self.fetched


def attention_groups(step: PackedStep) -> list[AttentionGroup]:
    """The runs of segments that one kernel serves, from the words of a step without padding."""
    fields = StepTensors.of(step.words, step.layout)
    bounds, ends = fields.row_starts.tolist(), fields.ends.tolist()
    kinds = [_kind(stop - start) for start, stop in pairwise(bounds)]
    groups = []
    first = 0
    for index in range(1, len(kinds) + 1):
        if index < len(kinds) and kinds[index] == kinds[first]:
            continue
        longest = max(stop - start for start, stop in pairwise(bounds[first : index + 1]))
        if kinds[first] == "tree":  # few variants: a new length must not wait for a compiler
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
    """The one group of a padded step."""
    kind = _kind(shape.rows_each)
    assert kind != "prefill", "a prompt's chunk has no shape"
    everything = slice(0, shape.num_sequences), slice(0, shape.num_rows)
    return [AttentionGroup(kind, *everything, shape.rows_each, shape.max_length)]


def _kind(num_rows: int) -> Literal["decode", "tree", "prefill"]:
    if num_rows == 1:
        return "decode"
    return "tree" if num_rows <= MAX_TREE_ROWS else "prefill"


def padded_layout(shape: StepShape, block_size: int) -> StepLayout:
    """Of a step of this shape, of which all rows may want logits."""
    width = -(-shape.max_length // block_size)
    return StepLayout(shape.num_rows, shape.num_sequences, shape.num_rows, width)
