"""When to speculate: costs by rows, what a drafter's probabilities are worth, and the choice."""

from __future__ import annotations

import random

import pytest

from llm_core.speculative.control import Situation
from llm_core.speculative.controller import AutoController, Truth
from llm_core.speculative.drafter import DraftShape
from llm_core.speculative.row_cost import RowCost
from llm_core.speculative.tree import EMPTY, DraftTree

MS = 1_000_000
LIMITS = DraftShape(max_drafts=16, max_depth=5, width=4)
# Two cores without VNNI, as measured: the second row is free, each further one is not.
CPU_MS = {1: 6.0, 2: 6.0, 3: 7.9, 4: 11.1, 6: 12.0, 8: 16.1, 16: 27.5, 32: 47.8}
MEMORY_BOUND_MS = {1: 10.0, 32: 10.9}


def cost(table_ms: dict[int, float]) -> RowCost:
    return RowCost({rows: ms * MS for rows, ms in table_ms.items()})


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
        known.observe(1, 12 * MS)
    assert known.ns(1) == pytest.approx(12 * MS, rel=0.05)
    assert known.ns(8) > 20 * MS, "what was not seen is slower too"
    for _ in range(100):
        known.observe(1, 6 * MS)
    before = known.ns(1)
    known.observe(1, 900 * MS)
    assert known.ns(1) < 1.15 * before


def test_a_boastful_drafter_is_believed_less() -> None:
    truth, rng = Truth(), random.Random(1)
    for _ in range(600):
        truth.observe(0.92, is_right=rng.random() < 0.4)
        truth.observe(0.31, is_right=rng.random() < 0.3)
    assert truth.corrected(0.95) == pytest.approx(0.4, abs=0.1)
    assert truth.corrected(0.35) == pytest.approx(0.3, abs=0.1)
    assert Truth().corrected(0.72) == pytest.approx(0.75)


def controller(table_ms: dict[int, float]) -> AutoController:
    return AutoController(LIMITS, cost(table_ms))


def chosen(auto: AutoController, trees: list[DraftTree], rows: int | None = None) -> list[int]:
    situation = Situation(len(trees), rows or len(trees))
    return [len(tree) for tree in auto.choose(trees, situation)]


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
        (kept,) = controller(table).choose([tree], Situation(1, 1))
        kept.check()
        assert kept.parents[0] == -1 and kept.token_ids[0] == 5


def simulate(
    auto: AutoController, table_ms: dict[int, float], accuracy: float, streams: int, draft_ms: float
) -> tuple[float, float]:
    """(time of plain decoding, time with ``auto``) for as many tokens; drafts say what is true."""
    rng, real = random.Random(7), cost(table_ms)
    spent = tokens = 0.0
    for _ in range(600):
        situation = Situation(streams, streams)
        shape = auto.shape(situation)
        trees = [EMPTY] * streams
        if shape is not None:
            trees = [DraftTree.chain([1, 2, 3], [accuracy] * 3) for _ in range(streams)]
            spent += draft_ms
            auto.drafted(trees, round(draft_ms * MS))
            trees = auto.choose(trees, situation)
        rows = streams + sum(map(len, trees))
        duration_ms = real.ns(rows) / MS * rng.uniform(0.95, 1.1)
        auto.stepped(rows, round(duration_ms * MS))
        spent += duration_ms
        for tree in trees:
            right = 0
            while right < len(tree) and rng.random() < accuracy:
                right += 1
            if tree:
                auto.verified(tree, list(range(right + 1)))
            tokens += 1 + right
    return tokens / streams * real.ns(streams) / MS * 1.025, spent


@pytest.mark.parametrize("table", [CPU_MS, MEMORY_BOUND_MS], ids=["cpu", "memory_bound"])
@pytest.mark.parametrize("accuracy", [0.02, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("streams", [1, 4, 16])
@pytest.mark.parametrize("draft_ms", [0.3, 3.0])
def test_never_slower_than_plain_by_three_percent(
    table: dict[int, float], accuracy: float, streams: int, draft_ms: float
) -> None:
    plain, with_drafts = simulate(controller(table), table, accuracy, streams, draft_ms)
    assert with_drafts < 1.03 * plain
    if accuracy > 0.5 and streams == 1 and draft_ms < 1:
        assert with_drafts < 0.8 * plain


def test_what_does_not_pay_is_tried_now_and_then() -> None:
    auto = controller(CPU_MS)
    simulate(auto, CPU_MS, 0.02, 1, 3.0)
    shapes = [auto.shape(Situation(1, 1)) is not None for _ in range(200)]
    assert 0 < sum(shapes) < 20


def test_streams_that_can_wait_leave_the_step_to_a_prompt() -> None:
    auto = controller(CPU_MS)
    assert auto.shape(Situation(2, 40, is_patient=True)) is None
    assert auto.shape(Situation(2, 2, is_patient=True)) is not None
    assert auto.shape(Situation(2, 40)) is not None


def test_several_paths_are_followed_only_where_rows_are_free() -> None:
    on_cpu, on_gpu = (controller(t).shape(Situation(1, 1)) for t in (CPU_MS, MEMORY_BOUND_MS))
    assert on_cpu is not None and on_gpu is not None
    assert (on_cpu.width, on_gpu.width) == (1, 4)
