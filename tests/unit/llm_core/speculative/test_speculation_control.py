"""The speculation controller: cost model, calibration, and decisions in simulated worlds."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import pytest

from llm_core.scheduling.draft_tree import EMPTY, DraftTree
from llm_core.speculative.control.acceptance_calibration import AcceptanceCalibration
from llm_core.speculative.control.auto import AutoController
from llm_core.speculative.control.base import BatchState
from llm_core.speculative.control.costs import DraftCost, VerificationCost
from llm_core.speculative.drafters.base import DraftShape

MS = 1_000_000
LIMITS = DraftShape(max_drafts=16, max_depth=5, width=4)
# Measured on two cores without VNNI: the second token is free, further ones are not.
CPU_MS = {1: 6.0, 2: 6.0, 3: 7.9, 4: 11.1, 6: 12.0, 8: 16.1, 16: 27.5, 32: 47.8}
MEMORY_BOUND_MS = {1: 10.0, 32: 10.9}


def cost(table_ms: dict[int, float]) -> VerificationCost:
    return VerificationCost({rows: ms * MS for rows, ms in table_ms.items()})


def test_cost_is_interpolated_and_extrapolated() -> None:
    known = cost(CPU_MS)
    for rows, ms in CPU_MS.items():
        assert known.ns(rows) == pytest.approx(ms * MS)
    assert known.ns(12) == pytest.approx((16.1 + 27.5) / 2 * MS)
    assert known.ns(48) == pytest.approx((47.8 + 16 * 20.3 / 16) * MS)
    assert all(known.ns(rows) <= known.ns(rows + 1) for rows in range(1, 600))
    assert cost({4: 8.0}).ns(8) == 16 * MS


def test_cost_never_falls_with_more_tokens() -> None:
    known = cost({1: 7.0, 2: 6.0, 4: 9.0})
    assert known.ns(1) == known.ns(2) == 6 * MS


def test_cost_follows_the_load_at_all_sizes_and_ignores_outliers() -> None:
    known = cost(CPU_MS)
    for _ in range(100):
        known.record_forward(1, 12 * MS)
    assert known.ns(1) == pytest.approx(12 * MS, rel=0.05)
    assert known.ns(8) > 20 * MS, "sizes without measurements follow"
    for _ in range(100):
        known.record_forward(1, 6 * MS)
    before = known.ns(1)
    known.record_forward(1, 900 * MS)
    assert known.ns(1) < 1.15 * before


def test_load_converges_in_a_few_steps() -> None:
    """A start-up measurement on a busy machine makes all later steps look faster; comparisons made
    while the load converges would favour the kind of step that came later."""
    known = cost(CPU_MS)
    for _ in range(4):
        known.record_forward(1, 2.4 * MS)
    assert known.ns(1) == pytest.approx(2.4 * MS, rel=0.02)
    world = World({rows: 0.4 * ms for rows, ms in CPU_MS.items()}, 0.7, draft_ms=0.1)
    rate = world.rate(controller(CPU_MS, 0.3), steps=120)
    assert rate > 0.93 * max(world.rate(None, depth, steps=120) for depth in range(5))


def test_overconfident_drafter_is_calibrated() -> None:
    calibration, rng = AcceptanceCalibration(), random.Random(1)
    for _ in range(600):
        calibration.record_verified(0.92, is_accepted=rng.random() < 0.4)
        calibration.record_verified(0.31, is_accepted=rng.random() < 0.3)
    assert calibration.acceptance_rate(0.95) == pytest.approx(0.4, abs=0.1)
    assert calibration.acceptance_rate(0.35) == pytest.approx(0.3, abs=0.1)
    assert AcceptanceCalibration().acceptance_rate(0.72) == pytest.approx(0.75)


def controller(table_ms: dict[int, float], draft_ms: float = 0.3) -> AutoController:
    return AutoController(
        LIMITS, cost(table_ms), DraftCost({1: draft_ms * MS, 3: 2 * draft_ms * MS})
    )


def second_shape(auto: AutoController, batch: BatchState) -> DraftShape | None:
    """The draft shape after a first plain step."""
    auto.draft_shape(batch)
    auto.record_step(10 * MS)
    return auto.draft_shape(batch)


def num_selected(
    auto: AutoController, trees: list[DraftTree], num_tokens: int | None = None
) -> list[int]:
    batch = BatchState(len(trees), num_tokens or len(trees))
    return [len(tree) for tree in auto.select_drafts(trees, batch)]


def test_drafts_are_selected_while_they_gain_time() -> None:
    chain = DraftTree.chain([1, 2, 3, 4], [0.85, 0.85, 0.85, 0.85])
    # The second token is free, the third costs a third of a step, the fourth half of one.
    assert num_selected(controller(CPU_MS), [chain]) == [2]
    assert num_selected(controller(CPU_MS), [DraftTree.chain([1, 2], [0.25, 0.15])]) == [1]
    assert num_selected(controller(MEMORY_BOUND_MS), [chain]) == [4]
    sure = DraftTree.chain([1, 2, 3, 4], [0.99] * 4)
    doubtful = DraftTree.chain([1, 2, 3, 4], [0.15] * 4)
    # Of eight sequences only the confident ones get drafts.
    counts = num_selected(controller(CPU_MS), [sure, doubtful] * 4)
    assert all(n == 0 for n in counts[1::2]) and all(n > 0 for n in counts[::2])
    assert num_selected(controller(CPU_MS), [EMPTY]) == [0]


def test_selected_drafts_are_trees() -> None:
    tree = DraftTree((5, 6, 7, 8), (-1, -1, 0, 1), (0.5, 0.4, 0.9, 0.1))
    for table in (CPU_MS, MEMORY_BOUND_MS):
        (kept,) = controller(table).select_drafts([tree], BatchState(1, 1))
        kept.check()
        assert kept.parents[0] == -1 and kept.token_ids[0] == 5


@dataclass
class World:
    """A simulated machine and drafter: true step times and acceptance rates."""

    table_ms: dict[int, float]
    accuracy: float
    num_sequences: int = 1
    draft_ms: float = 0.3  # a chain's first draft; each further one takes half
    overhead_ms: float = 0.3  # of a step with drafts, outside of drafting and forward pass
    overconfidence: float = 0.0  # added to the drafter's probabilities

    def rate(self, auto: AutoController | None, depth: int = 0, steps: int = 500) -> float:
        """Tokens of a sequence per millisecond: with ``auto``, or with chains of ``depth``."""
        rng, real = random.Random(7), cost(self.table_ms)
        confidence = random.Random(3)  # independent of what is drafted
        spent = tokens = 0.0
        for step in range(steps):
            batch = BatchState(self.num_sequences, self.num_sequences)
            before, limit = spent, depth
            shape = None if auto is None else auto.draft_shape(batch)
            if auto is not None:
                limit = 0 if shape is None else min(shape.max_depth, shape.max_drafts)
            trees = [self.chain(confidence, limit, shape) for _ in range(self.num_sequences)]
            if limit:
                deepest = (
                    max(1, *map(len, trees)) if self.num_sequences > 1 else max(1, len(trees[0]))
                )
                drafting = self.draft_ms * (1 + (deepest - 1) / 2) * rng.uniform(0.9, 1.2)
                spent += drafting + self.overhead_ms
                if auto is not None:
                    auto.record_drafting(trees, round(drafting * MS))
                    trees = auto.select_drafts(trees, batch)
            rows = self.num_sequences + sum(map(len, trees))
            forward = real.ns(rows) / MS * rng.uniform(0.95, 1.1)
            forward *= 4 if step % 100 == 50 else 1  # another process had the core
            spent += forward
            for tree in trees:
                right = 0
                while (
                    right < len(tree)
                    and rng.random() < tree.probabilities[right] - self.overconfidence
                ):
                    right += 1
                if auto is not None and tree:
                    auto.record_accepted(tree, list(range(right + 1)))
                # The expectation has less noise than the accepted drafts.
                tokens += 1 + sum(
                    accumulate((p - self.overconfidence for p in tree.probabilities), mul)
                )
            if auto is not None:
                auto.record_forward(rows, round(forward * MS))
                auto.record_step(round((spent - before) * MS))
        return tokens / self.num_sequences / spent

    def chain(self, rng: random.Random, limit: int, shape: DraftShape | None) -> DraftTree:
        """A chain with random probabilities, ``accuracy`` on average."""
        probs: list[float] = []
        path = 1.0
        spread = min(self.accuracy, 1 - self.accuracy)
        draws = [rng.uniform(-spread, spread) for _ in range(LIMITS.max_depth)]
        for draw in draws[:limit]:
            likely = self.accuracy + draw
            probs.append(min(1.0, likely + self.overconfidence))
            path *= probs[-1]
            if shape is not None and path < shape.min_expand_probability:
                break
        return DraftTree.chain(list(range(len(probs))), probs)


@pytest.mark.parametrize("table", [CPU_MS, MEMORY_BOUND_MS], ids=["cpu", "memory_bound"])
@pytest.mark.parametrize("accuracy", [0.02, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("num_sequences", [1, 4, 16])
@pytest.mark.parametrize("draft_ms", [0.3, 3.0])
def test_never_slower_than_plain_decoding_or_the_best_fixed_chain(
    table: dict[int, float], accuracy: float, num_sequences: int, draft_ms: float
) -> None:
    world = World(table, accuracy, num_sequences, draft_ms)
    rate = world.rate(controller(table, draft_ms))
    plain, *chains = (world.rate(None, depth) for depth in range(5))
    assert rate > 0.97 * plain
    assert rate > 0.97 * max(chains)
    if accuracy > 0.5 and num_sequences == 1 and draft_ms < 1:
        assert rate > 1.2 * plain


@pytest.mark.parametrize(
    ("overhead_ms", "overconfidence", "draft_ms"),
    [(2.5, 0.0, 0.3), (0.3, 0.3, 0.3), (0.3, 0.0, 3.0)],
)
def test_wrong_estimates_are_corrected(
    overhead_ms: float, overconfidence: float, draft_ms: float
) -> None:
    """Overhead outside of drafting and forward pass, an overconfident drafter, drafting that takes
    ten times what was measured at start-up."""
    world = World(
        CPU_MS, 0.5, overhead_ms=overhead_ms, overconfidence=overconfidence, draft_ms=draft_ms
    )
    rate = world.rate(controller(CPU_MS, 0.3))
    assert rate > 0.97 * max(world.rate(None, depth) for depth in range(5))


def test_drafting_that_does_not_pay_is_retried_rarely() -> None:
    auto = controller(CPU_MS)
    World(CPU_MS, 0.1, overhead_ms=2.0).rate(auto)
    shapes = []
    for _ in range(2000):
        shapes.append(auto.draft_shape(BatchState(1, 1)) is not None)
        auto.record_step(6 * MS)
    assert 0 < sum(shapes) < 40


class RecordingController(AutoController):
    """Records in which steps it drafted, and captured hidden states."""

    def __init__(self) -> None:
        super().__init__(LIMITS, cost(CPU_MS), DraftCost({1: 0.3 * MS, 3: 0.6 * MS}))
        self.drafts: list[bool] = []
        self.captured: list[bool] = []

    def draft_shape(self, batch: BatchState) -> DraftShape | None:
        shape = super().draft_shape(batch)
        self.drafts.append(shape is not None)
        self.captured.append(self.wants_hidden_states)
        return shape


def test_forecast_losses_skip_trials_and_stop_capture() -> None:
    """16 sequences whose acceptance rates are known from a single one: the costs forecast that
    trials would fail."""
    auto = RecordingController()
    World(CPU_MS, 0.3).rate(auto)
    first = len(auto.drafts)
    World(CPU_MS, 0.3, num_sequences=16, draft_ms=1.2).rate(auto, steps=3000)
    drafts, captured = auto.drafts[first:], auto.captured[first:]
    assert 0 < sum(drafts) < 80
    assert not any(drafts[:48]), "the first trial is skipped"
    for step, has_drafts in enumerate(drafts):
        assert not has_drafts or all(captured[max(0, step - 60) : step + 1])
    assert sum(captured) < 1000


def test_drafting_that_starts_to_pay_is_noticed() -> None:
    auto = controller(CPU_MS)
    World(CPU_MS, 0.05, overhead_ms=1.0).rate(auto)
    better = World(CPU_MS, 0.8)
    better.rate(auto)
    assert better.rate(auto) > 0.97 * max(better.rate(None, depth) for depth in range(5))


def test_only_confident_drafts_are_expanded() -> None:
    """A further draft takes time even where verifying it is free: an unlikely draft is worth
    verifying, and its children are not worth drafting."""
    shape = second_shape(controller(CPU_MS), BatchState(1, 1))
    assert shape is not None
    assert shape.min_path_probability < 0.05 < 0.3 < shape.min_expand_probability


def test_sequences_with_slack_leave_the_step_to_prompts() -> None:
    auto = controller(CPU_MS)
    assert second_shape(auto, BatchState(2, 40, has_slack=True)) is None
    assert second_shape(auto, BatchState(2, 2, has_slack=True)) is not None
    assert second_shape(auto, BatchState(2, 40)) is not None


def test_trees_only_where_tokens_are_free() -> None:
    on_cpu, on_gpu = (
        second_shape(controller(t), BatchState(1, 1)) for t in (CPU_MS, MEMORY_BOUND_MS)
    )
    assert on_cpu is not None and on_gpu is not None
    assert (on_cpu.width, on_gpu.width) == (1, 4)
