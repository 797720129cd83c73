"""How many rows of prompts a step computes, so that no step takes longer than the streams may wait.

What steps take is learnt from the steps; that also says when a new prompt would have its first
token.
"""

from __future__ import annotations

from llm_core.scheduling.scheduler import Scheduler
from llm_core.scheduling.sequence import TokenSequence
from llm_core.scheduling.step_cost import StepCost

LARGEST_CHUNK = 512  # rows of a prompt in one step
_LEAST_CHUNK = 16


class TokenBudget:
    """Sets the scheduler's budgets."""

    def __init__(self, scheduler: Scheduler, max_step_ms: int | None) -> None:
        """``max_step_ms`` None: the budgets stay as they are."""
        self._scheduler = scheduler
        self._max_step_ns = None if max_step_ms is None else max_step_ms * 1_000_000
        self._cost = StepCost()

    def observe(self, num_rows: int, duration_ns: int) -> None:
        """A step was computed. A prompt's chunk is as long as its time allows; twice that when no
        stream waits."""
        self._cost.observe(num_rows, duration_ns)
        if self._max_step_ns is None:
            return
        rows = self._cost.rows_within(self._max_step_ns)
        more = self._cost.rows_within(2 * self._max_step_ns)
        if rows is not None and more is not None:
            self._scheduler.mixed_budget = min(max(rows, _LEAST_CHUNK), LARGEST_CHUNK)
            self._scheduler.prompt_budget = min(max(more, _LEAST_CHUNK), LARGEST_CHUNK)

    def wait_ns(self, sequence: TokenSequence) -> int | None:
        """How long a sequence that is not scheduled yet would wait for its first token, were it
        added now; None while unknown."""
        ahead = self._scheduler.rows_ahead(sequence)
        rows = ahead + self._scheduler.tables.uncached_len(sequence)
        step_rows = min(rows, self._scheduler.mixed_budget)
        step_ns = self._cost.duration_ns(step_rows + self._scheduler.num_running)
        return None if step_ns is None else step_ns * rows // step_rows
