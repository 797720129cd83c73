"""``bench.load.simulate_callers`` end to end, and the effect of deadline scheduling in it."""

from __future__ import annotations

import argparse
import random

import pytest

from bench.load.simulate_callers import Outcome, Simulation, serve, svg
from bench.load.trace import Arrival
from llm_core.messages import PolicyName

# An arrival at random within a minute, half a page of history, half a minute of speech.
_DICE = random.Random(3)
TRACE = [
    Arrival(60 * n / 40, _DICE.randrange(100, 1200), _DICE.randrange(20, 120)) for n in range(400)
]
STEP_MS, ROW_MS, BUDGET_MS = 10.0, 2.0, 600.0


def run(policy: PolicyName, num_callers: int) -> Outcome:
    simulation = Simulation(TRACE, num_callers, policy, BUDGET_MS, (STEP_MS, ROW_MS))
    outcome = simulation.run(90.0)
    assert simulation.engine.stats().num_running <= num_callers
    return outcome


@pytest.mark.parametrize("policy", ["fcfs", "deadline"])
def test_a_few_callers_are_all_served(policy: PolicyName) -> None:
    outcome = run(policy, 3)
    assert outcome.num_turns > 6
    assert outcome.num_whole == outcome.num_turns
    assert max(outcome.first_token_ms) < BUDGET_MS


def test_deadlines_keep_more_callers_in_time_than_the_order_of_arrival() -> None:
    in_time = {}
    for policy in ("fcfs", "deadline"):
        times = run(policy, 24).first_token_ms
        in_time[policy] = sum(t <= BUDGET_MS for t in times) / len(times)
    assert in_time["deadline"] > in_time["fcfs"] + 0.05


def test_the_whole_bench() -> None:
    arguments = argparse.Namespace(
        model=None,
        fixed_ms=STEP_MS,
        row_ms=ROW_MS,
        budget_ms=BUDGET_MS,
        duration_s=60.0,
        step=3,
        most=6,
    )
    result = serve(TRACE, arguments)
    assert [row[:2] for row in result.rows] == [
        (policy, callers) for policy in ("fcfs", "deadline") for callers in (3, 6)
    ]
    assert "6 by deadline" in result.notes
    assert "polyline" in svg(result)
