"""Shapes, padding and recording of steps, with fake graphs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llm_core.model.gpu.graphs import StepGraphs, StepShape, decode_shapes, shape_for
from tests.support.fake_graph import RecordedRun


@pytest.mark.parametrize(
    ("lengths", "longest", "expected"),
    [
        ([1], 1, (1, 1, 2048)),
        ([1, 1, 1], 2048, (4, 1, 2048)),
        ([1] * 9, 2049, (16, 1, 8192)),
        ([8], 9, (1, 8, 2048)),
        ([5], 5, (1, 8, 2048)),
        ([8, 6, 7], 40_000, (4, 8, 50_000)),
        ([65], 65, None),  # a prompt
        ([64], 64, (1, 64, 2048)),
        ([1] * 15 + [40], 90, None),  # 640 rows of which 55 count
        ([1, 40], 90, None),  # 128 rows of which 41 count
        ([64] * 9, 90, None),  # long enough to hide its launches
        ([1] * 129, 90, None),
    ],
)
def test_smallest_shape_is_selected(
    lengths: list[int], longest: int, expected: tuple[int, int, int] | None
) -> None:
    shape = shape_for(lengths, longest, 50_000)
    assert shape == (None if expected is None else StepShape(*expected))


def test_no_shape_is_longer_than_the_context() -> None:
    assert shape_for([1], 200, 300) == StepShape(1, 1, 300)
    assert shape_for([1], 200_000, 250_000) == StepShape(1, 1, 250_000)


def test_decode_shapes_cover_all_batch_sizes() -> None:
    assert [s.num_sequences for s in decode_shapes(5, 4096)] == [1, 2, 4, 8]
    assert [s.num_sequences for s in decode_shapes(8, 4096)] == [1, 2, 4, 8]
    assert decode_shapes(1000, 4096)[-1] == StepShape(128, 1, 2048)
    assert decode_shapes(1, 64) == [StepShape(1, 1, 64)]
    for count in range(1, 9):
        assert shape_for([1] * count, 50, 4096) in decode_shapes(8, 4096)


@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=130),
    st.integers(0, 200_000),
)
def test_shapes_fit_their_steps(lengths: list[int], before: int) -> None:
    longest = before + max(lengths)
    shape = shape_for(lengths, longest, max(longest, 100_000))
    if shape is not None:
        assert shape.num_sequences >= len(lengths)
        assert shape.rows_each >= max(lengths)
        assert shape.max_length >= longest
        assert sum(lengths) <= shape.num_rows <= min(512, 2 * sum(lengths) + 8)


class _Doubling:
    """A model of one operation: out = 2 * in, recorded."""

    def __init__(self, **options: int) -> None:
        self.runs: list[RecordedRun] = []
        self.graphs = StepGraphs(self._capture, self._make, self._run, **options)

    def _capture(self, run: object) -> RecordedRun:
        self.runs.append(RecordedRun(run))  # type: ignore[arg-type]
        return self.runs[-1]

    def _make(self, shape: StepShape) -> dict[str, torch.Tensor]:
        return {name: torch.zeros(shape.num_rows) for name in ("in", "out")}

    def _run(self, state: dict[str, torch.Tensor]) -> None:
        state["out"].copy_(2 * state["in"])

    def step(self, shape: StepShape, value: float) -> float | None:
        """What a replay gives; None where the step is not replayed."""
        if not self.graphs.is_ready(shape):
            return None
        state = self.graphs.replay(shape, lambda state: state["in"].fill_(value))
        return float(state["out"].sum())


def test_a_shape_is_recorded_once_frequent() -> None:
    model = _Doubling()
    shape = StepShape(2, 1, 64)
    assert model.step(shape, 1.0) is None
    assert model.step(StepShape(4, 1, 64), 1.0) is None  # another shape counts for itself
    assert model.step(shape, 1.0) is None
    assert model.step(shape, 1.0) == 4.0
    assert model.step(shape, 3.0) == 12.0
    assert len(model.runs) == 1 and model.runs[0].num_replays == 2


def test_a_shape_can_be_recorded_in_advance() -> None:
    model = _Doubling()
    shape = StepShape(1, 4, 64)
    model.graphs.record(shape)
    model.graphs.record(shape)
    assert len(model.runs) == len(model.graphs) == 1
    assert model.step(shape, 0.5) == 4.0


def test_number_of_graphs_is_bounded() -> None:
    model = _Doubling(max_graphs=1)
    for rows in (1, 2):
        results = [model.step(StepShape(1, rows, 64), 1.0) for _ in range(4)]
    assert results == [None] * 4
    assert len(model.graphs) == 1
    assert model.step(StepShape(1, 1, 64), 1.0) == 2.0
