"""Steps of a fixed shape, recorded once and replayed: which shape, with what padding, and when.

A decode step of a small model is hundreds of kernels of a few microseconds; launching each from
Python costs more than running it. A CUDA graph launches all of them at once, but only for the
shapes and addresses that it was recorded with. So steps are padded to one of few shapes, and their
inputs are copied to where the recorded kernels read them.

Only ``CudaCapture`` needs a GPU; all decisions are made on plain numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

# Of sequences in a step, and of rows of each: one for decoding, more for verification of drafts.
SEQUENCE_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
_MAX_ROWS = 512  # of a step: beyond, kernels take so long that launching them hides behind it
_NUM_WARM_UPS = 2  # runs before recording: kernels are compiled, workspaces allocated
_RECORD_AT = 3  # the time a shape is seen at which it is worth recording
_MAX_GRAPHS = 48  # each keeps its inputs, outputs and launch records: some MB


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """A step of ``num_sequences`` segments of ``rows_each`` rows; both are buckets."""

    num_sequences: int
    rows_each: int

    @property
    def num_rows(self) -> int:
        return self.num_sequences * self.rows_each


def shape_for(lengths: list[int], max_sequences: int) -> StepShape | None:
    """The smallest shape that holds segments of these lengths; None where a step like this is not
    worth a graph: a prompt's chunk is in it, or it is large."""
    longest = max(lengths)
    if longest > ROW_BUCKETS[-1] or len(lengths) > max_sequences:
        return None
    at = bisect_left(SEQUENCE_BUCKETS, len(lengths))
    if at == len(SEQUENCE_BUCKETS):
        return None
    rows_each = ROW_BUCKETS[bisect_left(ROW_BUCKETS, longest)]
    shape = StepShape(SEQUENCE_BUCKETS[at], rows_each)
    if shape.num_rows > _MAX_ROWS:
        return None
    # A chunk of a prompt beside many decoding rows would be paid by each of them.
    return shape if shape.num_rows <= 2 * sum(lengths) + ROW_BUCKETS[3] else None


class Graph(Protocol):
    """What was recorded."""

    def replay(self) -> None:
        """Runs it again, on what its inputs hold now."""


class Capture(Protocol):
    """Records what ``run`` launches; ``run`` reads and writes only tensors that stay in place."""

    def __call__(self, run: Callable[[], None]) -> Graph: ...


class CudaCapture:
    """``torch.cuda.CUDAGraph``; all graphs share one pool of memory, so one may run at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Graph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_NUM_WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog asks for events on a thread of its own meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        return graph


State = TypeVar("State")


@dataclass(slots=True)
class _Recorded(Generic[State]):
    graph: Graph
    state: State


class StepGraphs(Generic[State]):
    """The graphs by shape. ``State`` are a shape's inputs and outputs, which stay in place."""

    def __init__(
        self,
        capture: Capture,
        make_state: Callable[[StepShape], State],
        run: Callable[[State], None],
        *,
        max_graphs: int = _MAX_GRAPHS,
    ) -> None:
        """``run`` computes a state's outputs from its inputs, without waiting for the device."""
        self._capture = capture
        self._make_state = make_state
        self._run = run
        self._max_graphs = max_graphs
        self._recorded: dict[StepShape, _Recorded[State]] = {}
        self._seen: dict[StepShape, int] = {}

    def __len__(self) -> int:
        return len(self._recorded)

    def is_ready(self, shape: StepShape) -> bool:
        """Whether a step of this shape is to be replayed; records it when it has come often."""
        if shape in self._recorded:
            return True
        self._seen[shape] = self._seen.get(shape, 0) + 1
        if self._seen[shape] < _RECORD_AT or len(self._recorded) >= self._max_graphs:
            return False
        self.record(shape)
        return True

    def record(self, shape: StepShape) -> None:
        """Records a shape now, as when the engine starts: later it would hold up a stream."""
        if shape in self._recorded:
            return
        state = self._make_state(shape)
        graph = self._capture(lambda: self._run(state))
        self._recorded[shape] = _Recorded(graph, state)

    def replay(self, shape: StepShape, fill: Callable[[State], None]) -> State:
        """Fills the inputs of a shape that is ready and runs it; its outputs hold until the next
        step."""
        recorded = self._recorded[shape]
        fill(recorded.state)
        recorded.graph.replay()
        return recorded.state
