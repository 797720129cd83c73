"""What the target's steps take by their rows, measured once before the first request."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from llm_core.batch import ForwardBatch, Segment
from llm_core.runner import ModelRunner

_ROWS = (1, 2, 3, 4, 6, 8, 16, 32)
_NUM_REPEATS = 3
_BUDGET_NS = 1_500_000_000  # larger numbers of rows are left out when it is spent


def measure_row_costs(
    runner: ModelRunner, clock: Callable[[], int] = time.perf_counter_ns
) -> dict[int, float]:
    """Nanoseconds by number of rows, all with logits: the least of some repeats, as what disturbs
    only adds. Nothing may be in the KV cache yet."""
    costs: dict[int, float] = {}
    start_ns = clock()
    for num_rows in _ROWS:
        if num_rows > runner.max_context or (costs and clock() - start_ns > _BUDGET_NS):
            break
        table = tuple(range(-(-num_rows // runner.block_size)))
        rows = torch.arange(num_rows)
        batch = ForwardBatch(torch.zeros_like(rows), (Segment(table, 0, num_rows),), rows)
        times = []
        for _ in range(_NUM_REPEATS + 1):  # the first makes buffers
            before_ns = clock()
            runner.forward(batch)
            times.append(clock() - before_ns)
        costs[num_rows] = float(min(times[1:]))
    return costs
