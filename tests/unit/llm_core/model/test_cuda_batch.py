"""Packed steps: fields, padding, and serialisation for other ranks."""

from __future__ import annotations

import random
from dataclasses import astuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.gpu import load_ops
from llm_core.batch import ForwardBatch, Segment
from llm_core.model.gpu.decoder import PackedStep
from llm_core.model.gpu.graphs import StepShape
from llm_core.model.gpu.packed_batch import StepLayout, StepTensors, ancestor_words, layout_of, pack
from llm_core.model.parallel.steps import decode_step, encode_step


def packed(batch: ForwardBatch, layout: StepLayout | None = None) -> StepTensors:
    """In memory that held something else before."""
    layout = layout or layout_of(batch, 4)
    words = torch.full((layout.num_words,), 12345, dtype=torch.int32)
    pack(batch, layout, 4, words)
    return StepTensors.of(words, layout)


BATCH = ForwardBatch(
    torch.tensor([7, 8, 9, 10, 11]),
    (Segment((5, 2), 3, 2), Segment((1, 3, 4), 6, 3, (-1, 0, 0))),
    torch.tensor([1, 4]),
)


def test_fields_of_a_packed_step() -> None:
    step = packed(BATCH)
    assert step.token_ids.tolist() == [7, 8, 9, 10, 11]
    assert step.positions.tolist() == [3, 4, 6, 7, 7]
    assert step.slots.tolist() == [23, 8, 14, 15, 16]
    assert step.ancestors[:, 0].tolist() == [0b1, 0b11, 0b1, 0b11, 0b101]
    assert step.row_starts.tolist() == [0, 2, 5]
    assert (step.starts.tolist(), step.ends.tolist()) == ([3, 6], [5, 9])
    assert step.logit_rows.tolist() == [1, 4]
    assert step.block_tables.tolist() == [[5, 2, 0], [1, 3, 4]]


def test_padding_stores_and_sees_nothing() -> None:
    plain, step = packed(BATCH), packed(BATCH, StepLayout(8, 4, 8, 6))
    assert step.slots.tolist() == [*plain.slots.tolist(), -1, -1, -1]
    assert step.row_starts.tolist() == [0, 2, 5, 5, 5]
    assert step.ends.tolist() == [5, 9, 0, 0] and step.starts.tolist() == [3, 6, 0, 0]
    assert step.logit_rows.tolist() == [1, 4] + 6 * [0]
    assert step.token_ids.tolist()[5:] == [0, 0, 0]
    assert not step.ancestors[5:].any() and step.block_tables.shape == (4, 6)


@given(st.integers(1, 64), st.integers(0, 1 << 30))
def test_ancestors_are_those_of_the_oracle(length: int, seed: int) -> None:
    chance = random.Random(seed)
    parents = tuple(chance.randrange(-1, row) if row else -1 for row in range(length))
    words = torch.from_numpy(ancestor_words(Segment((0,), 0, length, parents)))
    expected = load_ops("oracle").ancestor_bits(
        torch.tensor(parents, dtype=torch.int32),
        torch.tensor([0, length], dtype=torch.int32),
        max_query_len=length,
    )
    assert torch.equal(words[:, : expected.shape[1]], expected)
    assert not words[:, expected.shape[1] :].any()


def test_too_large_a_tree_is_rejected() -> None:
    tree = Segment(tuple(range(20)), 0, 65, (-1,) + (0,) * 64)
    with pytest.raises(ValueError, match="a tree has 65 rows, at most 64"):
        packed(ForwardBatch(torch.zeros(65, dtype=torch.int64), (tree,), torch.tensor([0])))


@pytest.mark.parametrize("shape", [None, StepShape(2, 4, 24)])
def test_serialised_step_round_trips(shape: StepShape | None) -> None:
    layout = layout_of(BATCH, 4)
    words = torch.arange(layout.num_words, dtype=torch.int32)
    step = PackedStep(words, layout, shape, 5, 2, wants_features=True)
    heard = decode_step(encode_step(step))
    assert torch.equal(heard.words, step.words)
    assert astuple(heard)[1:] == astuple(step)[1:]
