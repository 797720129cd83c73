"""Measured speed-up of speculative steps over plain ones, for batches of about one size.

Tokens are those of one sequence; durations are relative to the expected time of a plain step with
as many tokens at the same load (``VerificationCost.ns``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MEAN_WINDOW_STEPS = 64  # from then on the mean is exponential: the newest step weighs 1 / 64
STALE_WINDOW_STEPS = 4  # weight that means from before a cool-down keep
MAX_STEP_RATIO = 1.6  # longer steps are clipped to this multiple of the mean
MIN_PLAIN_STEPS = 4  # before the first trial
TRIAL_STEPS = 8
MIN_FORECAST_SPEEDUP = 1.0  # at a lower forecast every other trial is skipped
ABORT_TRIAL_SPEEDUP = 0.85  # a trial below this at half time ends
MIN_SPEEDUP = 0.98  # slightly below 1: noise is likelier than a loss, and a cool-down costs more
PROBE_INTERVAL_STEPS = 48  # speculative steps between two plain ones
FIRST_COOLDOWN_STEPS, MAX_COOLDOWN_STEPS = 48, 1536
TRIAL_TIME_SHARE = 0.01  # of all time that failed trials may cost; a cool-down is extended to it


@dataclass(slots=True)
class Mean:
    """A running mean over about ``MEAN_WINDOW_STEPS`` values, robust against outliers."""

    value: float = 0.0
    num_values: int = 0

    def add(self, value: float, *, max_ratio: float | None = None) -> None:
        """Adds a value, clipped to ``max_ratio`` times the mean (and to the mean divided by it)."""
        if max_ratio is not None and self.num_values > 0:
            value = min(max(value, self.value / max_ratio), self.value * max_ratio)
        self.num_values = min(self.num_values + 1, MEAN_WINDOW_STEPS)
        self.value += (value - self.value) / self.num_values


class SpeedupTracker:
    """Decides whether the next step should have drafts, from measured steps of both kinds.

    While drafting pays, a plain step is probed every ``PROBE_INTERVAL_STEPS``. When it does not,
    drafting rests for a cool-down, whose length doubles with each failed trial. A trial with a low
    forecast is skipped, but never two in a row: forecasts can be wrong.
    """

    def __init__(self) -> None:
        self.plain_time = Mean()
        self.drafted_time = Mean()
        self.tokens_per_step = Mean()
        self.draft_time_scale = Mean()  # drafting time by what was measured at start-up
        self._trial_steps_left = TRIAL_STEPS
        self._skipped_last_trial = False
        self._cooldown_left = 0  # steps
        self._next_cooldown = FIRST_COOLDOWN_STEPS
        self._steps_since_probe = 0
        self._trial_loss = 0.0  # time lost to drafting since the last cool-down

    def speedup(self) -> float:
        """Tokens / time with drafts over tokens / time without; 1 while unknown."""
        if not self.plain_time.num_values or not self.drafted_time.num_values:
            return 1.0
        return self.tokens_per_step.value / self.drafted_time.value * self.plain_time.value

    def best_rate(self) -> float:
        """Tokens of a sequence per expected time of a plain step, with or without drafts, whichever
        is higher; 1 while unknown."""
        if not self.plain_time.num_values:
            return 1.0
        return max(1.0, self.speedup()) / self.plain_time.value

    def should_draft(self, forecast_speedup: Callable[[], float]) -> bool:
        """Called once for each step that could have drafts. ``forecast_speedup`` is evaluated only
        when a trial is about to start."""
        if self.plain_time.num_values < MIN_PLAIN_STEPS:
            is_due = self.drafted_time.num_values < self.plain_time.num_values
            return is_due and forecast_speedup() >= MIN_FORECAST_SPEEDUP
        if self._cooldown_left > 0:
            self._cooldown_left -= 1
            if self._cooldown_left > 0:
                return False
            self._trial_steps_left = TRIAL_STEPS
            for mean in (self.drafted_time, self.tokens_per_step):
                mean.num_values = min(mean.num_values, STALE_WINDOW_STEPS)
        if self._trial_steps_left == TRIAL_STEPS:
            self._skipped_last_trial = (
                not self._skipped_last_trial and forecast_speedup() < MIN_FORECAST_SPEEDUP
            )
            if self._skipped_last_trial:
                self._start_cooldown()
                return False
        if self._trial_steps_left > 0 and not self._is_trial_hopeless():
            self._trial_steps_left -= 1
            return True
        if self.speedup() < MIN_SPEEDUP:
            self._start_cooldown()
            return False
        self._next_cooldown, self._trial_loss = FIRST_COOLDOWN_STEPS, 0.0
        self._steps_since_probe += 1
        if self._steps_since_probe >= PROBE_INTERVAL_STEPS:
            self._steps_since_probe = 0
            return False
        return True

    @property
    def cooldown_left(self) -> int:
        """Steps until drafting is tried again; 0 outside of a cool-down."""
        return self._cooldown_left

    def record_plain_step(self, duration: float) -> None:
        """A step without drafts."""
        self.plain_time.add(duration, max_ratio=MAX_STEP_RATIO)

    def record_drafted_step(self, tokens: float, duration: float) -> None:
        """A step with drafting, and the tokens that it was expected to yield."""
        self._trial_loss += duration - tokens * self.plain_time.value
        self.tokens_per_step.add(tokens)
        self.drafted_time.add(duration, max_ratio=MAX_STEP_RATIO)

    def record_head_prefill_step(self, duration: float) -> None:
        """A step whose drafter first prefilled prompts: a cost, but not typical of other steps."""
        self._trial_loss += duration - self.plain_time.value

    def _start_cooldown(self) -> None:
        repay_steps = round(self._trial_loss / self.plain_time.value / TRIAL_TIME_SHARE)
        self._cooldown_left = min(max(self._next_cooldown, repay_steps), MAX_COOLDOWN_STEPS)
        self._next_cooldown = min(2 * self._next_cooldown, MAX_COOLDOWN_STEPS)
        self._trial_steps_left, self._trial_loss = 0, 0.0

    def _is_trial_hopeless(self) -> bool:
        is_half_over = self._trial_steps_left <= TRIAL_STEPS // 2
        return is_half_over and self.speedup() < ABORT_TRIAL_SPEEDUP
