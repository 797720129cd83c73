"""Steps of a fixed shape, recorded once and replayed: which shape, with what padding, and when.

A decode step of a small model is hundreds of kernels of a few microseconds; launching each from
Python costs more than running it. A CUDA graph launches all of them at once, but only for the
shapes and addresses that it was recorded with. So steps are padded to one of few shapes, and their
inputs are copied to where the recorded kernels read them.

Only ``CudaCapture`` needs a GPU; all decisions are made on plain numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

# Of sequences in a step, and of rows of each: one for decoding, more for verification of drafts.
SEQUENCE_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
# Of the longest sequence: attention is launched for as many positions as there may be.
LENGTH_BUCKETS = (2048, 8192, 32768, 131072)
MAX_ROWS = 512  # of a step: beyond, kernels take so long that launching them hides behind it
_SPARE_ROWS = 8  # that a step may be padded with, besides as many as it has
_NUM_WARM_UPS = 2  # runs before recording: kernels are compiled, workspaces allocated
_RECORD_AT = 3  # the time a shape is seen at which it is worth recording
_MAX_GRAPHS = 48  # each keeps its inputs, outputs and launch records: some MB


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """Up to ``num_sequences`` segments of up to ``rows_each`` rows, none of which ends beyond
    ``max_length`` positions."""

    num_sequences: int
    rows_each: int
    max_length: int

    @property
    def num_rows(self) -> int:
        return self.num_sequences * self.rows_each


def shape_for(lengths: Sequence[int], longest: int, max_context: int) -> StepShape | None:
    """The smallest shape for segments of these numbers of rows, of which the last position is
    ``longest`` - 1; None where a step like this is not worth a graph: a prompt's chunk is in it, or
    it is large."""
    most = max(lengths)
    if most > ROW_BUCKETS[-1] or len(lengths) > SEQUENCE_BUCKETS[-1]:
        return None
    num_sequences = SEQUENCE_BUCKETS[bisect_left(SEQUENCE_BUCKETS, len(lengths))]
    rows_each = ROW_BUCKETS[bisect_left(ROW_BUCKETS, most)]
    at = bisect_left(LENGTH_BUCKETS, longest)
    bound = LENGTH_BUCKETS[at] if at < len(LENGTH_BUCKETS) else max_context
    shape = StepShape(num_sequences, rows_each, min(bound, max_context))
    # What is padded with must not cost more than launching did: one long segment beside many
    # single rows would be paid by each of them.
    if shape.num_rows > min(MAX_ROWS, 2 * sum(lengths) + _SPARE_ROWS):
        return None
    return shape


def decode_shapes(max_sequences: int, max_context: int) -> list[StepShape]:
    """What is recorded before the first request: decode steps of up to ``max_sequences``."""
    last = bisect_left(SEQUENCE_BUCKETS, min(max_sequences, SEQUENCE_BUCKETS[-1]))
    length = min(LENGTH_BUCKETS[0], max_context)
    return [StepShape(count, 1, length) for count in SEQUENCE_BUCKETS[: last + 1]]


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
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
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
        """``make_state`` makes inputs that can be computed on; ``run`` computes a state's outputs
        from its inputs, without waiting for the device."""
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
