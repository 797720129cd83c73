"""Is the new engine worse than the old one? Judged from finished turns, by tests that may be
looked at as often as one likes.

Each look compares the two engines' latest turns with Fisher's exact test (one-sided: is the new one
worse?), once for failures and once for turns that the caller had to wait for. Looking again and
again at a level of 5% would sooner or later find a difference between twins, so the k-th look gets
the share 1 / (k (k + 1)) of the level; the shares add up to one, whatever the number of looks, so
a twin is withdrawn wrongly with at most the probability ``level``. Turns of one conversation are
not quite independent; few of many callers are, which is what the least number is for.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Lane = Literal["stable", "canary"]
LANES: tuple[Lane, ...] = ("stable", "canary")
Verdict = Literal["ok", "late", "failed"]
VERDICTS: tuple[Verdict, ...] = ("ok", "late", "failed")

# Of turns that ended as failed, those that the engine has to answer for.
ENGINE_ERRORS = frozenset(
    (
        *("engine_busy", "engine_died", "generation_failed", "internal_error", "llm_error"),
        *("request_timeout", "timed_out"),
    )
)
# Why an engine was left that had not failed: it gave no sign in time, as under load any may.
NO_ANSWER = "no_answer"
_PLAYOUT_GAP_MS = 200.0
_JUDGED = ("answered", "interrupted", "incomplete")


def lane_of(turn: dict[str, Any]) -> Lane | None:
    """Which engine the turn was asked of; None: there is no choice, or it asked none."""
    lane = turn["facts"].get("engine")
    return lane if lane in LANES else None


def verdict_of(turn: dict[str, Any]) -> Verdict | None:
    """What a finished turn (``TurnTrace.to_dict``) says of its engine; None: nothing.

    Late: over its whole budget, or with a pause in the answer that a listener notices.
    """
    facts = turn["facts"]
    if fallback := facts.get("engine_fallback"):
        return "late" if fallback == NO_ANSWER else "failed"
    if turn["outcome"] in ("failed", "timed_out"):
        return "failed" if turn["reason"] in ENGINE_ERRORS else None
    if turn["outcome"] not in _JUDGED:
        return None
    is_over = "total" in ((turn.get("budget") or {}).get("misses_ms") or {})
    return "late" if is_over or (facts.get("playout_gap_ms") or 0) > _PLAYOUT_GAP_MS else "ok"


def worse_by_chance(num_old: int, bad_old: int, num_new: int, bad_new: int) -> float:
    """Probability that the new one has ``bad_new`` or more of all bad turns if both are alike:
    the upper tail of the hypergeometric distribution (Fisher's exact test)."""
    bad, whole = bad_old + bad_new, num_old + num_new
    if bad_new == 0:
        return 1.0
    log_all = _log_choose(whole, num_new)
    tail = (
        math.exp(_log_choose(bad, k) + _log_choose(whole - bad, num_new - k) - log_all)
        for k in range(bad_new, min(bad, num_new) + 1)
        if num_new - k <= whole - bad
    )
    return min(1.0, math.fsum(tail))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


@dataclass(frozen=True, slots=True)
class CanaryRules:
    """``window`` turns of each engine are remembered, and judged from ``min_turns`` of each on,
    after every ``look_every`` of the new one. ``level``: probability of withdrawing one that is
    just as good. Less than ``min_difference`` (a share of the turns) is let pass. So many
    ``max_in_a_row`` failures of the new one in a row need no statistics."""

    window: int = 200
    min_turns: int = 20
    look_every: int = 5
    level: float = 0.05
    min_difference: float = 0.05
    max_in_a_row: int = 3


@dataclass(slots=True)
class CanaryJudge:
    """Takes turns of both engines; any one thread."""

    rules: CanaryRules = field(default_factory=CanaryRules)
    _turns: dict[Lane, deque[Verdict]] = field(init=False)
    _num_looks: int = 0
    _num_canary: int = 0
    _in_a_row: int = 0

    def __post_init__(self) -> None:
        self._turns = {lane: deque(maxlen=self.rules.window) for lane in LANES}

    def add(self, lane: Lane, verdict: Verdict) -> str | None:
        """Count a turn; a reason to withdraw the canary, or None."""
        self._turns[lane].append(verdict)
        if lane == "stable":
            return None
        self._num_canary += 1
        self._in_a_row = self._in_a_row + 1 if verdict == "failed" else 0
        if self._in_a_row >= self.rules.max_in_a_row:
            return f"{self._in_a_row} failures in a row"
        are_enough = min(len(turns) for turns in self._turns.values()) >= self.rules.min_turns
        if not are_enough or self._num_canary % self.rules.look_every:
            return None
        return self._look()

    def _look(self) -> str | None:
        self._num_looks += 1
        # Two questions a look, so half of its share of the level each.
        level = self.rules.level / 2 / (self._num_looks * (self._num_looks + 1))
        return self._compare("failed", ("failed",), level) or self._compare(
            "late or failed", ("late", "failed"), level
        )

    def _compare(self, name: str, bad: Sequence[Verdict], level: float) -> str | None:
        counts = [(len(t), sum(one in bad for one in t)) for t in self._turns.values()]
        (num_old, bad_old), (num_new, bad_new) = counts
        if bad_new / num_new - bad_old / num_old < self.rules.min_difference:
            return None
        chance = worse_by_chance(num_old, bad_old, num_new, bad_new)
        if chance > level:
            return None
        return (
            f"{bad_new} of {num_new} turns {name}, against {bad_old} of {num_old} "
            f"(by chance: {chance:.1g})"
        )
