"""What a step takes, learnt; and what is given up when a deadline is at risk."""

from __future__ import annotations

import random
from typing import Any

import pytest

from llm_core.batch import ForwardBatch, ForwardResult
from llm_core.engine.degradation import SHORT_ANSWER_TOKENS, last_turn
from llm_core.engine.engine import Engine
from llm_core.errors import EngineBusyError
from llm_core.messages import (
    ChatMessage,
    Downgrade,
    FirstToken,
    GenerationDone,
    RequestOptions,
    SamplingParams,
    ToolSpec,
)
from llm_core.scheduling.step_cost import StepCost
from tests.unit.llm_core.engine.test_engine import (
    FakeRunner,
    assert_nothing_left,
    drain,
    make_engine,
    submit,
    user,
)

MS = 1_000_000


def test_it_finds_the_line_through_noisy_steps() -> None:
    rng = random.Random(1)
    cost = StepCost()
    for _ in range(300):
        rows = rng.choice([1, 1, 1, 3, 8, 64])
        cost.observe(rows, int((20 + 2.5 * rows) * MS * rng.uniform(0.9, 1.1)))
    assert cost.line_ns is not None
    fixed, per_row = cost.line_ns
    assert fixed == pytest.approx(20 * MS, rel=0.15)
    assert per_row == pytest.approx(2.5 * MS, rel=0.15)
    assert cost.rows_within(145 * MS) == pytest.approx(50, abs=6)
    assert cost.duration_ns(50) == pytest.approx(145 * MS, rel=0.1)


def test_it_says_nothing_before_it_knows_and_remembers_what_it_knew() -> None:
    cost = StepCost()
    for _ in range(50):
        cost.observe(1, 20 * MS)
    assert cost.line_ns is cost.duration_ns(9) is cost.rows_within(MS) is None
    for _ in range(5):
        cost.observe(64, 180 * MS)
    known = cost.line_ns
    assert known is not None
    for _ in range(2000):
        cost.observe(1, 20 * MS)
    assert cost.line_ns is not None
    assert cost.line_ns[1] == pytest.approx(known[1], rel=0.2)


def test_steps_that_get_faster_with_rows_give_no_negative_cost() -> None:
    cost = StepCost()
    for rows, ms in ((1, 50), (64, 10)) * 5:
        cost.observe(rows, ms * MS)
    assert cost.line_ns is not None and cost.line_ns[1] == 0
    assert cost.rows_within(MS) is None


class TimedRunner(FakeRunner):
    """Each step takes 20 ms, and 2 ms a row."""

    now_ns = 0

    def forward(self, batch: ForwardBatch) -> ForwardResult:
        self.now_ns += (20 + 2 * len(batch.token_ids)) * MS
        return super().forward(batch)


def timed_engine(**options: Any) -> Engine:
    runner = TimedRunner(lambda prefix: 70, num_blocks=200, max_context=1000)
    return make_engine(runner, clock=lambda: runner.now_ns, **options)


def warmed_up(**options: Any) -> Engine:
    """An engine that has seen prompts and streams."""
    engine = timed_engine(**options)
    for text in ("a" * 300, "b" * 200):
        submit(engine, 1, text, max_tokens=20, ignore_eos=True)
        list(drain(engine))
    return engine


def test_chunks_become_as_long_as_their_time_allows() -> None:
    engine = warmed_up(max_step_ms=150)
    assert engine.scheduler.mixed_budget == pytest.approx(65, abs=3)
    assert engine.scheduler.prompt_budget == pytest.approx(140, abs=5)
    fixed = warmed_up()
    assert (fixed.scheduler.mixed_budget, fixed.scheduler.prompt_budget) == (64, 96)


HISTORY = [
    ChatMessage("system", "SYS"),
    *(ChatMessage(role, "x" * 150) for role in ("user", "assistant") * 2),
    ChatMessage("user", "now?"),
]


def ask(
    engine: Engine, budget_ms: int, *downgrades: Downgrade
) -> tuple[FirstToken, GenerationDone]:
    now_ns = engine._clock()
    options = RequestOptions(deadline_ns=now_ns + budget_ms * MS, downgrades=downgrades)
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    engine.submit(9, HISTORY, params, received_ns=now_ns, options=options)
    events = [event for number, event in drain(engine) if number == 9]
    assert isinstance(events[0], FirstToken) and isinstance(events[-1], GenerationDone)
    assert_nothing_left(engine)
    return events[0], events[-1]


def test_nothing_is_given_up_while_there_is_time() -> None:
    first, done = ask(warmed_up(), 10_000, "partial_context", "shorter_answer")
    assert (first.downgrades, first.dropped_messages) == ((), 0)
    assert done.usage.completion_tokens == 200


def test_a_late_answer_is_shorter_or_knows_less_as_allowed() -> None:
    first, done = ask(warmed_up(), 300, "shorter_answer")
    assert (first.downgrades, first.dropped_messages) == (("shorter_answer",), 0)
    assert done.usage.completion_tokens == SHORT_ANSWER_TOKENS
    engine = warmed_up()
    first, done = ask(engine, 300, "partial_context")
    assert (first.downgrades, first.dropped_messages) == (("partial_context",), 4)
    assert done.usage.completion_tokens == 200
    assert first.first_token_ns - first.received_ns <= 300 * MS
    assert engine.stats().total_downgraded == 1


def test_who_is_turned_away_does_not_count_as_downgraded() -> None:
    engine = warmed_up(max_sequences=1, max_waiting=0)
    submit(engine, 1, "a" * 300, max_tokens=20)
    with pytest.raises(EngineBusyError):
        ask(engine, 300, "shorter_answer")
    assert engine.stats().total_downgraded == 0
    list(drain(engine))
    ask(engine, 300, "shorter_answer")
    assert engine.stats().total_downgraded == 1


def test_nobody_is_downgraded_who_does_not_allow_it() -> None:
    first, done = ask(warmed_up(), 300)
    assert (first.downgrades, first.dropped_messages) == ((), 0)
    assert done.usage.completion_tokens == 200


def test_a_cached_history_is_not_left_out() -> None:
    """Leaving it out would save nothing."""
    engine = warmed_up()
    ask(engine, 10_000)
    first, _ = ask(engine, 10, "partial_context", "shorter_answer")
    assert (first.downgrades, first.dropped_messages) == (("shorter_answer",), 0)


def test_without_knowing_the_cost_nothing_is_given_up() -> None:
    first, _ = ask(timed_engine(), 1, "partial_context", "shorter_answer")
    assert first.downgrades == ()


def test_the_last_turn() -> None:
    assert last_turn(HISTORY) == ([HISTORY[0], HISTORY[-1]], 4)
    assert last_turn(user("a")) == (user("a"), 0)
    assert last_turn(HISTORY[:1]) == (HISTORY[:1], 0)
    tools = (ToolSpec(name="look_up"),)
    offered = [ChatMessage("user", "x", tools=tools), ChatMessage("assistant", "y"), *user("z")]
    assert last_turn(offered) == ([ChatMessage("system", "", tools=tools), *user("z")], 2)
