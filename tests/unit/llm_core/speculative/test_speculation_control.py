"""When to speculate: costs by rows, what a drafter's probabilities are worth, and the choice."""

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
# Two cores without VNNI, as measured: the second row is free, each further one is not.
CPU_MS = {1: 6.0, 2: 6.0, 3: 7.9, 4: 11.1, 6: 12.0, 8: 16.1, 16: 27.5, 32: 47.8}
MEMORY_BOUND_MS = {1: 10.0, 32: 10.9}


def cost(table_ms: dict[int, float]) -> VerificationCost:
    return VerificationCost({rows: ms * MS for rows, ms in table_ms.items()})


def test_cost_is_measured_between_and_beyond() -> None:
    known = cost(CPU_MS)
    for rows, ms in CPU_MS.items():
        assert known.ns(rows) == pytest.approx(ms * MS)
    assert known.ns(12) == pytest.approx((16.1 + 27.5) / 2 * MS)
    assert known.ns(48) == pytest.approx((47.8 + 16 * 20.3 / 16) * MS)
    assert all(known.ns(rows) <= known.ns(rows + 1) for rows in range(1, 600))
    assert cost({4: 8.0}).ns(8) == 16 * MS


def test_noise_never_makes_more_rows_cheaper() -> None:
    known = cost({1: 7.0, 2: 6.0, 4: 9.0})
    assert known.ns(1) == known.ns(2) == 6 * MS


def test_cost_follows_the_load_for_all_rows_and_forgets_outliers() -> None:
    known = cost(CPU_MS)
    for _ in range(100):
        known.record_forward(1, 12 * MS)
    assert known.ns(1) == pytest.approx(12 * MS, rel=0.05)
    assert known.ns(8) > 20 * MS, "what was not seen is slower too"
    for _ in range(100):
        known.record_forward(1, 6 * MS)
    before = known.ns(1)
    known.record_forward(1, 900 * MS)
    assert known.ns(1) < 1.15 * before


def test_the_load_is_known_after_a_few_steps() -> None:
    """Measured at the start while the machine was busy, everything seems to get faster: what was
    compared meanwhile spoke for whichever kind of step came later."""
    known = cost(CPU_MS)
    for _ in range(4):
        known.record_forward(1, 2.4 * MS)
    assert known.ns(1) == pytest.approx(2.4 * MS, rel=0.02)
    world = World({rows: 0.4 * ms for rows, ms in CPU_MS.items()}, 0.7, draft_ms=0.1)
    rate = world.rate(controller(CPU_MS, 0.3), steps=120)
    assert rate > 0.93 * max(world.rate(None, depth, steps=120) for depth in range(5))


def test_a_boastful_drafter_is_believed_less() -> None:
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
    """What is to be drafted when a first step without drafts was seen."""
    auto.draft_shape(batch)
    auto.record_step(10 * MS)
    return auto.draft_shape(batch)


def chosen(auto: AutoController, trees: list[DraftTree], rows: int | None = None) -> list[int]:
    batch = BatchState(len(trees), rows or len(trees))
    return [len(tree) for tree in auto.select_drafts(trees, batch)]


def test_drafts_are_verified_as_long_as_they_gain_time() -> None:
    chain = DraftTree.chain([1, 2, 3, 4], [0.85, 0.85, 0.85, 0.85])
    # The second row is free, the third costs a third of a step, the fourth half of one.
    assert chosen(controller(CPU_MS), [chain]) == [2]
    assert chosen(controller(CPU_MS), [DraftTree.chain([1, 2], [0.25, 0.15])]) == [1]
    assert chosen(controller(MEMORY_BOUND_MS), [chain]) == [4]
    sure = DraftTree.chain([1, 2, 3, 4], [0.99] * 4)
    doubtful = DraftTree.chain([1, 2, 3, 4], [0.15] * 4)
    # Of eight streams only those that are sure of themselves get rows.
    counts = chosen(controller(CPU_MS), [sure, doubtful] * 4)
    assert all(n == 0 for n in counts[1::2]) and all(n > 0 for n in counts[::2])
    assert chosen(controller(CPU_MS), [EMPTY]) == [0]


def test_chosen_drafts_are_trees() -> None:
    tree = DraftTree((5, 6, 7, 8), (-1, -1, 0, 1), (0.5, 0.4, 0.9, 0.1))
    for table in (CPU_MS, MEMORY_BOUND_MS):
        (kept,) = controller(table).select_drafts([tree], BatchState(1, 1))
        kept.check()
        assert kept.parents[0] == -1 and kept.token_ids[0] == 5


@dataclass
class World:
    """What steps really take, and how often drafts are right."""

    table_ms: dict[int, float]
    accuracy: float
    streams: int = 1
    draft_ms: float = 0.3  # a chain's first draft; each further one takes half
    overhead_ms: float = 0.3  # of a step with drafts, wherever it goes
    boast: float = 0.0  # what the drafter says too much

    def rate(self, auto: AutoController | None, depth: int = 0, steps: int = 500) -> float:
        """Tokens of a stream in a millisecond: as ``auto`` chooses, or with chains of ``depth``."""
        rng, real = random.Random(7), cost(self.table_ms)
        confidence = random.Random(3)  # the same whatever is drafted
        spent = tokens = 0.0
        for step in range(steps):
            batch = BatchState(self.streams, self.streams)
            before, limit = spent, depth
            shape = None if auto is None else auto.draft_shape(batch)
            if auto is not None:
                limit = 0 if shape is None else min(shape.max_depth, shape.max_drafts)
            trees = [self.chain(confidence, limit, shape) for _ in range(self.streams)]
            if limit:
                deepest = max(1, *map(len, trees)) if self.streams > 1 else max(1, len(trees[0]))
                drafting = self.draft_ms * (1 + (deepest - 1) / 2) * rng.uniform(0.9, 1.2)
                spent += drafting + self.overhead_ms
                if auto is not None:
                    auto.record_drafting(trees, round(drafting * MS))
                    trees = auto.select_drafts(trees, batch)
            rows = self.streams + sum(map(len, trees))
            forward = real.ns(rows) / MS * rng.uniform(0.95, 1.1)
            forward *= 4 if step % 100 == 50 else 1  # somebody else had the core
            spent += forward
            for tree in trees:
                right = 0
                while right < len(tree) and rng.random() < tree.probabilities[right] - self.boast:
                    right += 1
                if auto is not None and tree:
                    auto.record_accepted(tree, list(range(right + 1)))
                # What is to be expected, with less noise than what came true.
                tokens += 1 + sum(accumulate((p - self.boast for p in tree.probabilities), mul))
            if auto is not None:
                auto.record_forward(rows, round(forward * MS))
                auto.record_step(round((spent - before) * MS))
        return tokens / self.streams / spent

    def chain(self, rng: random.Random, limit: int, shape: DraftShape | None) -> DraftTree:
        """Drafts that say how likely they are: each another, ``accuracy`` in the mean."""
        said: list[float] = []
        path = 1.0
        spread = min(self.accuracy, 1 - self.accuracy)
        draws = [rng.uniform(-spread, spread) for _ in range(LIMITS.max_depth)]
        for draw in draws[:limit]:
            likely = self.accuracy + draw
            said.append(min(1.0, likely + self.boast))
            path *= said[-1]
            if shape is not None and path < shape.min_expand_probability:
                break
        return DraftTree.chain(list(range(len(said))), said)


@pytest.mark.parametrize("table", [CPU_MS, MEMORY_BOUND_MS], ids=["cpu", "memory_bound"])
@pytest.mark.parametrize("accuracy", [0.02, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("streams", [1, 4, 16])
@pytest.mark.parametrize("draft_ms", [0.3, 3.0])
def test_never_slower_than_plain_and_as_good_as_the_best_fixed_chain(
    table: dict[int, float], accuracy: float, streams: int, draft_ms: float
) -> None:
    world = World(table, accuracy, streams, draft_ms)
    rate = world.rate(controller(table, draft_ms))
    plain, *chains = (world.rate(None, depth) for depth in range(5))
    assert rate > 0.97 * plain
    assert rate > 0.97 * max(chains)
    if accuracy > 0.5 and streams == 1 and draft_ms < 1:
        assert rate > 1.2 * plain


@pytest.mark.parametrize(
    ("overhead_ms", "boast", "draft_ms"), [(2.5, 0.0, 0.3), (0.3, 0.3, 0.3), (0.3, 0.0, 3.0)]
)
def test_costs_and_chances_that_nobody_foretold_are_found_out(
    overhead_ms: float, boast: float, draft_ms: float
) -> None:
    """Time that goes neither into the target nor into drafting, a drafter that boasts, drafts that
    take ten times what was measured at the start."""
    world = World(CPU_MS, 0.5, overhead_ms=overhead_ms, boast=boast, draft_ms=draft_ms)
    rate = world.rate(controller(CPU_MS, 0.3))
    assert rate > 0.97 * max(world.rate(None, depth) for depth in range(5))


def test_what_does_not_pay_is_tried_now_and_then() -> None:
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


def test_what_cannot_pay_is_tried_less_and_not_listened_for() -> None:
    """Sixteen streams, whose drafts are right as often as a single one's, which is known by then:
    the costs foretell that trials would fail."""
    auto = RecordingController()
    World(CPU_MS, 0.3).rate(auto)
    first = len(auto.drafts)
    World(CPU_MS, 0.3, streams=16, draft_ms=1.2).rate(auto, steps=3000)
    drafts, captured = auto.drafts[first:], auto.captured[first:]
    assert 0 < sum(drafts) < 80
    assert not any(drafts[:48]), "the first trial is left out"
    for step, has_drafts in enumerate(drafts):
        assert not has_drafts or all(captured[max(0, step - 60) : step + 1])
    assert sum(captured) < 1000


def test_what_begins_to_pay_is_noticed() -> None:
    auto = controller(CPU_MS)
    World(CPU_MS, 0.05, overhead_ms=1.0).rate(auto)
    better = World(CPU_MS, 0.8)
    better.rate(auto)
    assert better.rate(auto) > 0.97 * max(better.rate(None, depth) for depth in range(5))


def test_only_what_is_sure_is_followed() -> None:
    """A further draft takes time even where its row is free: what follows a doubtful one is not
    worth it, but the doubtful one itself is worth its row."""
    shape = second_shape(controller(CPU_MS), BatchState(1, 1))
    assert shape is not None
    assert shape.min_path_probability < 0.05 < 0.3 < shape.min_expand_probability


def test_streams_that_can_wait_leave_the_step_to_a_prompt() -> None:
    auto = controller(CPU_MS)
    assert second_shape(auto, BatchState(2, 40, has_slack=True)) is None
    assert second_shape(auto, BatchState(2, 2, has_slack=True)) is not None
    assert second_shape(auto, BatchState(2, 40)) is not None


def test_several_paths_are_followed_only_where_rows_are_free() -> None:
    on_cpu, on_gpu = (
        second_shape(controller(t), BatchState(1, 1)) for t in (CPU_MS, MEMORY_BOUND_MS)
    )
    assert on_cpu is not None and on_gpu is not None
    assert (on_cpu.width, on_gpu.width) == (1, 4)
