"""Time of forward passes by number of tokens, and of drafting by depth: measured, then followed.

Unlike ``scheduling.step_cost``, whose straight line is good enough for prompts, single tokens are
told apart here: on some CPUs the second token of a forward pass is free and the third is not.

Both are measured once, before the first request. Sizes take turns, so that other load on the
machine affects all alike, and medians are used: a minimum would favour the size that had the
luckiest moment.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Mapping
from time import perf_counter_ns

import torch

from llm_core.batch import ForwardBatch, Segment
from llm_core.messages import SamplingParams
from llm_core.model import ModelRunner
from llm_core.scheduling import TokenSequence
from llm_core.speculative.drafters.base import ComputedTokens, Drafter, DraftRequest, DraftShape

_KNOTS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)  # tokens
LOAD_WEIGHT = 0.1  # of the newest step: the machine's load changes within seconds
SHAPE_WEIGHT = 0.02  # of the newest step: ratios between sizes change slowly (longer contexts)
OUTLIER_RATIO = 3.0  # a step that differs by more than this factor is clipped to a factor of 2

_MEASURED_TOKENS = (1, 2, 3, 4, 6, 8, 16, 32)
_MEASURED_DEPTHS = (1, 3)
_MIN_ROUNDS, _MAX_ROUNDS = 3, 9
_BUDGET_NS = 1_200_000_000  # no round beyond the minimum starts after this
_PROMPT_LEN = 24
_MIN_DRAFT_NS = 1_000.0  # where the drafter proposed nothing


class VerificationCost:
    """Duration of a forward pass of the target: linear between knots, times the current load."""

    def __init__(self, measured_ns: Mapping[int, float]) -> None:
        """``measured_ns``: by number of tokens, at least one entry (``measure_forward_ns``)."""
        assert measured_ns, "at least one measurement is needed"
        points = sorted(measured_ns.items())
        # More tokens never take less time: where they seem to, that is noise.
        for index in range(len(points) - 2, -1, -1):
            points[index] = (points[index][0], min(points[index][1], points[index + 1][1]))
        self._shape = [(num_tokens, _interpolated(points, num_tokens)) for num_tokens in _KNOTS]
        self._load = 1.0
        self._num_steps = 0

    @property
    def load(self) -> float:
        """Current durations relative to those measured at start-up."""
        return self._load

    def ns(self, num_tokens: int) -> float:
        """The expected duration of a forward pass now."""
        return self._load * _interpolated(self._shape, num_tokens)

    def record_forward(self, num_tokens: int, duration_ns: int) -> None:
        """Adjusts the load, and slowly the shape, to a measured forward pass."""
        expected_ns = self.ns(num_tokens)
        if not expected_ns / OUTLIER_RATIO < duration_ns < expected_ns * OUTLIER_RATIO:
            # Clipped, not ignored: if it happens repeatedly, the load has changed.
            duration_ns = round(min(max(duration_ns, expected_ns / 2), expected_ns * 2))
        ratio = duration_ns / expected_ns
        self._num_steps += 1
        # The first steps have full weight: the machine may have been busier or idler at start-up,
        # and step times taken while the load is still converging do not compare with later ones.
        self._load *= 1 + max(LOAD_WEIGHT, 1 / self._num_steps) * (ratio - 1)
        nearest = min(bisect_left(_KNOTS, num_tokens), len(_KNOTS) - 1)
        if _KNOTS[nearest] == num_tokens:
            known_ns = self._shape[nearest][1]
            self._shape[nearest] = num_tokens, known_ns * (1 + SHAPE_WEIGHT * (ratio - 1))


class DraftCost:
    """Duration of drafting for one sequence: the first draft, and each further depth."""

    def __init__(self, measured_ns: Mapping[int, float]) -> None:
        """``measured_ns``: by depth of a chain, depth 1 among them (``measure_draft_ns``)."""
        first_ns = measured_ns[1]
        depth = max(measured_ns)
        self._first_ns = first_ns
        further_ns = first_ns if depth == 1 else (measured_ns[depth] - first_ns) / (depth - 1)
        self.step_ns = min(max(further_ns, 0.1 * first_ns), first_ns)

    def ns(self, depth: int) -> float:
        """A chain, or a tree, of ``depth`` drafts."""
        return self._first_ns + (depth - 1) * self.step_ns


def measure_forward_ns(runner: ModelRunner) -> dict[int, float]:
    """Nanoseconds of a forward pass by number of tokens, all with logits. Overwrites the first
    blocks of the KV cache, which must be empty."""
    sizes = [size for size in _MEASURED_TOKENS if size <= runner.max_context]
    times: dict[int, list[int]] = {size: [] for size in sizes}
    start_ns = perf_counter_ns()
    for number in range(_MAX_ROUNDS + 1):  # round 0 allocates buffers and does not count
        if number > _MIN_ROUNDS and perf_counter_ns() - start_ns > _BUDGET_NS:
            break
        # The smallest sizes decide most: only they are measured in every round.
        for num_tokens in sizes:
            if number > _MIN_ROUNDS and num_tokens > 4:
                continue
            batch = _zeros_batch(runner, num_tokens)
            before_ns = perf_counter_ns()
            runner.forward(batch)
            if number > 0:
                times[num_tokens].append(perf_counter_ns() - before_ns)
    return {size: float(statistics.median(found)) for size, found in times.items()}


def measure_draft_ns(drafter: Drafter, runner: ModelRunner) -> dict[int, float]:
    """Nanoseconds of drafting by depth of a chain, for one sequence that the target computes here.
    Overwrites the first blocks of the KV cache, which must be empty."""
    length = min(_PROMPT_LEN, runner.max_context - len(_MEASURED_DEPTHS) * (_MIN_ROUNDS + 1) - 8)
    if length < 2:  # a context too short for speculation to matter
        return dict.fromkeys(_MEASURED_DEPTHS, _MIN_DRAFT_NS)
    runner.set_feature_layers(drafter.feature_layers)
    sequence = TokenSequence(-1, [1] * length, max_len=runner.max_context)
    max_len = (
        sequence.prompt_len + len(_MEASURED_DEPTHS) * (_MIN_ROUNDS + 1) + max(_MEASURED_DEPTHS)
    )
    sequence.block_ids = list(range(-(-max_len // runner.block_size)))
    times: dict[int, list[int]] = {depth: [] for depth in _MEASURED_DEPTHS}
    for number in range(_MIN_ROUNDS + 1):  # round 0 does not count
        for depth in _MEASURED_DEPTHS:
            _compute_next(drafter, runner, sequence)
            request = DraftRequest(sequence, DraftShape(depth, depth), SamplingParams())
            before_ns = perf_counter_ns()
            drafter.propose([request])
            if number > 0:
                times[depth].append(perf_counter_ns() - before_ns)
    sequence.block_ids = []  # so that the drafter keeps nothing of it
    drafter.close_sequence(sequence)
    return {depth: max(_MIN_DRAFT_NS, statistics.median(found)) for depth, found in times.items()}


def _zeros_batch(runner: ModelRunner, num_tokens: int) -> ForwardBatch:
    table = tuple(range(-(-num_tokens // runner.block_size)))
    rows = torch.arange(num_tokens)
    return ForwardBatch(torch.zeros_like(rows), (Segment(table, 0, num_tokens),), rows)


def _compute_next(drafter: Drafter, runner: ModelRunner, sequence: TokenSequence) -> None:
    """Computes the rest of a sequence and appends an arbitrary token."""
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
    drafter.observe_computed([ComputedTokens(sequence, start, range(length), features)])


def _interpolated(points: list[tuple[int, float]], num_tokens: int) -> float:
    """On the line through the neighbours; beyond the last point, on the last line."""
    if len(points) == 1:
        return points[0][1] * max(1.0, num_tokens / points[0][0])
    at = bisect_left(points, (num_tokens, 0.0))
    at = min(max(at, 1), len(points) - 1)
    (left, left_ns), (right, right_ns) = points[at - 1 : at + 1]
    return max(left_ns, left_ns + (right_ns - left_ns) * (num_tokens - left) / (right - left))
