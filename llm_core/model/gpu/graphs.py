"""CUDA graphs of steps: shapes, padding, and when a graph is recorded.

A decode step of a small model is hundreds of kernels of a few microseconds; launching each from
Python takes longer than running it. A CUDA graph launches all of them at once, but only for the
shapes and addresses that it was recorded with. So steps are padded to one of few shapes, and their
inputs are copied to static buffers.

Only ``CudaCapture`` needs a GPU.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

# Sequences of a step, and rows of each: one for decoding, more for verification of drafts.
SEQUENCE_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
# Length of the longest sequence, for which attention is launched.
LENGTH_BUCKETS = (2048, 8192, 32768, 131072)
MAX_ROWS = 512  # of a step; with more, kernels take longer than launching them
_SPARE_ROWS = 8  # of padding, in addition to the number of rows of the step
_NUM_WARM_UPS = 2  # runs before recording: kernels are compiled, workspaces allocated
_RECORD_AT = 3  # number of occurrences at which a shape is recorded
_MAX_GRAPHS = 48  # each needs some MB for inputs, outputs and launch records


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """Up to ``num_sequences`` segments of up to ``rows_each`` rows, which end within ``max_length``
    positions."""

    num_sequences: int
    rows_each: int
    max_length: int

    @property
    def num_rows(self) -> int:
        return self.num_sequences * self.rows_each


def shape_for(lengths: Sequence[int], longest: int, max_context: int) -> StepShape | None:
    """The smallest shape for segments with ``lengths`` rows, whose positions are below ``longest``;
    None if the step should not use a graph: it has a prompt chunk, or is large."""
    most = max(lengths)
    if most > ROW_BUCKETS[-1] or len(lengths) > SEQUENCE_BUCKETS[-1]:
        return None
    num_sequences = SEQUENCE_BUCKETS[bisect_left(SEQUENCE_BUCKETS, len(lengths))]
    rows_each = ROW_BUCKETS[bisect_left(ROW_BUCKETS, most)]
    at = bisect_left(LENGTH_BUCKETS, longest)
    bound = LENGTH_BUCKETS[at] if at < len(LENGTH_BUCKETS) else max_context
    shape = StepShape(num_sequences, rows_each, min(bound, max_context))
    # Padding must not cost more than launching: with one long segment beside many single rows, each
    # of those would be padded to its length.
    if shape.num_rows > min(MAX_ROWS, 2 * sum(lengths) + _SPARE_ROWS):
        return None
    return shape


def decode_shapes(max_sequences: int, max_context: int) -> list[StepShape]:
    """Shapes recorded at warm-up: decode steps of up to ``max_sequences`` sequences."""
    last = bisect_left(SEQUENCE_BUCKETS, min(max_sequences, SEQUENCE_BUCKETS[-1]))
    length = min(LENGTH_BUCKETS[0], max_context)
    return [StepShape(count, 1, length) for count in SEQUENCE_BUCKETS[: last + 1]]


class Graph(Protocol):
    """A recorded graph."""

    def replay(self) -> None:
        """Runs the graph on the current contents of its inputs."""


class Capture(Protocol):
    """Records the launches of ``run``, which may only access static tensors."""

    def __call__(self, run: Callable[[], None]) -> Graph: ...


class CudaCapture:
    """Records ``torch.cuda.CUDAGraph``s that share a memory pool, so only one may run at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Graph:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_NUM_WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog queries events on another thread.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        return graph


State = TypeVar("State")


@dataclass(slots=True)
class _Recorded(Generic[State]):
    graph: Graph
    state: State


class StepGraphs(Generic[State]):
    """Graphs by shape. ``State``: the static inputs and outputs of a shape."""

    def __init__(
        self,
        capture: Capture,
        make_state: Callable[[StepShape], State],
        run: Callable[[State], None],
        *,
        max_graphs: int = _MAX_GRAPHS,
    ) -> None:
        """``make_state`` allocates buffers with valid inputs; ``run`` computes a state's outputs
        from its inputs, without synchronisation."""
        self._capture = capture
        self._make_state = make_state
        self._run = run
        self._max_graphs = max_graphs
        self._recorded: dict[StepShape, _Recorded[State]] = {}
        self._seen: dict[StepShape, int] = {}

    def __len__(self) -> int:
        return len(self._recorded)

    def is_ready(self, shape: StepShape) -> bool:
        """Can a step of this shape be replayed? Records it if it has occurred often."""
        if shape in self._recorded:
            return True
        self._seen[shape] = self._seen.get(shape, 0) + 1
        if self._seen[shape] < _RECORD_AT or len(self._recorded) >= self._max_graphs:
            return False
        self.record(shape)
        return True

    def record(self, shape: StepShape) -> None:
        """Records a shape now, as at start-up; later it would delay a reply."""
        if shape in self._recorded:
            return
        state = self._make_state(shape)
        graph = self._capture(lambda: self._run(state))
        self._recorded[shape] = _Recorded(graph, state)

    def replay(self, shape: StepShape, fill: Callable[[State], None]) -> State:
        """Fills the inputs of a recorded shape and runs it. Its outputs are valid until the next
        step."""
        recorded = self._recorded[shape]
        fill(recorded.state)
        recorded.graph.replay()
        return recorded.state
