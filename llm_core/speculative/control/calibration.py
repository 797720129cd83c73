"""What steps of the target take by their rows, and drafts by their depth, measured once before the
first request.

Kinds take turns, so that what else the machine does meets all alike, and the median of each counts:
the least would be that of a luckier moment for one kind than for another.
"""

from __future__ import annotations

import statistics
from time import perf_counter_ns

import torch

from llm_core.batch import ForwardBatch, Segment
from llm_core.messages import SamplingParams
from llm_core.model import ModelRunner
from llm_core.scheduling import TokenSequence
from llm_core.speculative.drafters.base import ComputedRows, Drafter, DraftRequest, DraftShape

_ROWS = (1, 2, 3, 4, 6, 8, 16, 32)
_MOST_ROUNDS, _LEAST_ROUNDS = 9, 3
_BUDGET_NS = 1_200_000_000  # after the least of rounds no more are begun when it is spent
_DEPTHS = (1, 3)
_PROMPT_LEN = 24
_NO_DRAFT_NS = 1_000.0  # of a drafter that proposes nothing to what is drafted for here


def measure_row_costs(runner: ModelRunner) -> dict[int, float]:
    """Nanoseconds by number of rows, all with logits. Nothing may be in the KV cache yet."""
    sizes = [rows for rows in _ROWS if rows <= runner.max_context]
    times: dict[int, list[int]] = {rows: [] for rows in sizes}
    start_ns = perf_counter_ns()
    for number in range(_MOST_ROUNDS + 1):  # the first makes buffers
        if number > _LEAST_ROUNDS and perf_counter_ns() - start_ns > _BUDGET_NS:
            break
        # The few that decide most are measured in every round, the others while there is time.
        for num_rows in sizes:
            if number > _LEAST_ROUNDS and num_rows > 4:
                continue
            batch = _rows_batch(runner, num_rows)
            before_ns = perf_counter_ns()
            runner.forward(batch)
            if number > 0:
                times[num_rows].append(perf_counter_ns() - before_ns)
    return {rows: float(statistics.median(found)) for rows, found in times.items()}


def measure_draft_costs(drafter: Drafter, runner: ModelRunner) -> dict[int, float]:
    """Nanoseconds by depth of a chain for one sequence, on rows that the target computes here.
    Nothing may be in the KV cache yet."""
    length = min(_PROMPT_LEN, runner.max_context - len(_DEPTHS) * (_LEAST_ROUNDS + 1) - 8)
    if length < 2:  # a context in which nothing is worth much
        return dict.fromkeys(_DEPTHS, _NO_DRAFT_NS)
    runner.set_feature_layers(drafter.feature_layers)
    sequence = TokenSequence(-1, [1] * length, max_len=runner.max_context)
    most = sequence.prompt_len + len(_DEPTHS) * (_LEAST_ROUNDS + 1) + max(_DEPTHS)
    sequence.block_ids = list(range(-(-most // runner.block_size)))
    times: dict[int, list[int]] = {depth: [] for depth in _DEPTHS}
    for number in range(_LEAST_ROUNDS + 1):
        for depth in _DEPTHS:
            _compute(drafter, runner, sequence)
            request = DraftRequest(sequence, DraftShape(depth, depth), SamplingParams())
            before_ns = perf_counter_ns()
            drafter.propose([request])
            if number > 0:
                times[depth].append(perf_counter_ns() - before_ns)
    sequence.block_ids = []  # nothing of it is to be kept
    drafter.close(sequence)
    return {depth: max(_NO_DRAFT_NS, statistics.median(found)) for depth, found in times.items()}


def _rows_batch(runner: ModelRunner, num_rows: int) -> ForwardBatch:
    table = tuple(range(-(-num_rows // runner.block_size)))
    rows = torch.arange(num_rows)
    return ForwardBatch(torch.zeros_like(rows), (Segment(table, 0, num_rows),), rows)


def _compute(drafter: Drafter, runner: ModelRunner, sequence: TokenSequence) -> None:
    """The rest of a sequence, and one token more, whatever it is."""
    start, length = sequence.computed_len, sequence.remaining_len
    batch = ForwardBatch(
        torch.tensor(sequence.token_ids[start:]),
        (Segment(tuple(sequence.block_ids), start, length),),
        torch.tensor([length - 1]),
        wants_features=bool(drafter.feature_layers),
    )
    features = runner.forward(batch).features
    sequence.computed_len += length
    sequence.append(1)
    drafter.observe([ComputedRows(sequence, start, range(length), features)])
