"""What steps with and without drafts brought and took lately, whole: for batches of about one size.

Tokens are those of one stream, and times are parts of what a step of as many rows without drafts
was expected to take at the time (``RowCost.ns``): so steps of different minutes and of nearly as
many streams can be compared, and not every number of streams has to be tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_LONGEST_MEMORY = 64  # steps; the newest then weighs one part of it
_TRIAL_MEMORY = 4  # what was learnt before a pause counts as no more steps than these
_CLIP = 1.6  # a step that took more times what is usual counts as having taken these
_LEAST_PLAIN = 4  # steps without drafts before any is drafted for, and between trials
# Fewer would often be wrong, and a pause is dear: what drafts gain differs from reply to reply, and
# four steps of 1.18 times plain decoding look like less than 1 every fourth time.
_TRIAL_STEPS = 8
_LEAST_OUTLOOK = 1.0  # where less is foreseen, every other trial is left out
_HOPELESS = 0.85  # less than that after half of a trial: it is over
_LEAST_GAIN = 0.98  # a little less is more likely noise than a loss, and a pause costs more
_PROBE_EVERY = 48  # steps with drafts; then one without
_FIRST_PAUSE, _LONGEST_PAUSE = 48, 1536
_TRIAL_SHARE = 0.01  # of all time may be lost to trials: the more one has cost, the later the next


@dataclass(slots=True)
class Mean:
    """A running mean that forgets, and that no outlier moves far."""

    value: float = 0.0
    num_seen: int = 0

    def add(self, value: float, *, clip: float | None = None) -> None:
        """One more."""
        if clip is not None and self.num_seen > 0:
            value = min(max(value, self.value / clip), self.value * clip)
        self.num_seen = min(self.num_seen + 1, _LONGEST_MEMORY)
        self.value += (value - self.value) / self.num_seen


class SpeedupTracker:
    """Decides from both kinds of steps whether the next one is to have drafts.

    Steps with drafts are interrupted by one without now and then, and where they do not pay they
    are tried again for some steps, after pauses that double as long as they fail. Trials that look
    like failures before they begin are left out, but never two of them one after another: what is
    foreseen can be wrong.
    """

    def __init__(self) -> None:
        self.plain_time = Mean()
        self.drafted_time = Mean()
        self.tokens = Mean()
        self.draft_scale = Mean()  # drafting beside what was measured at the start
        self._left = _TRIAL_STEPS  # of a trial
        self._leaves_out = False  # the last trial, for what was foreseen
        self._paused = 0  # steps still to go without drafts
        self._next_pause = _FIRST_PAUSE
        self._since_plain = 0
        self._lost = 0.0  # since drafts were tried, beside plain steps

    def gain(self) -> float:
        """Tokens in time with drafts by the same without; 1 while unknown."""
        if not self.plain_time.num_seen or not self.drafted_time.num_seen:
            return 1.0
        return self.tokens.value / self.drafted_time.value * self.plain_time.value

    def rate(self) -> float:
        """The most tokens of a stream in the time that a step is expected to take; 1 while
        unknown."""
        if not self.plain_time.num_seen:
            return 1.0
        return max(1.0, self.gain()) / self.plain_time.value

    def wants_drafts(self, outlook: Callable[[], float]) -> bool:
        """Asked once for each step that could have some. ``outlook``: what they would gain, by
        what is known elsewhere."""
        if self.plain_time.num_seen < _LEAST_PLAIN:
            is_due = self.drafted_time.num_seen < self.plain_time.num_seen
            return is_due and outlook() >= _LEAST_OUTLOOK
        if self._paused > 0:
            self._paused -= 1
            if self._paused > 0:
                return False
            self._left = _TRIAL_STEPS
            for mean in (self.drafted_time, self.tokens):
                mean.num_seen = min(mean.num_seen, _TRIAL_MEMORY)
        if self._left == _TRIAL_STEPS:
            self._leaves_out = not self._leaves_out and outlook() < _LEAST_OUTLOOK
            if self._leaves_out:
                self._rest()
                return False
        if self._left > 0 and not self._is_hopeless():
            self._left -= 1
            return True
        if self.gain() < _LEAST_GAIN:
            self._rest()
            return False
        self._next_pause, self._lost = _FIRST_PAUSE, 0.0
        self._since_plain += 1
        if self._since_plain >= _PROBE_EVERY:
            self._since_plain = 0
            return False
        return True

    @property
    def num_resting(self) -> int:
        """Steps until drafts are tried again."""
        return self._paused

    def _rest(self) -> None:
        lost_steps = round(self._lost / self.plain_time.value / _TRIAL_SHARE)
        self._paused = min(max(self._next_pause, lost_steps), _LONGEST_PAUSE)
        self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
        self._left, self._lost = 0, 0.0

    def _is_hopeless(self) -> bool:
        return self._left <= _TRIAL_STEPS // 2 and self.gain() < _HOPELESS

    def plain(self, duration: float) -> None:
        """A step without drafts."""
        self.plain_time.add(duration, clip=_CLIP)

    def drafted(self, tokens: float, duration: float) -> None:
        """A step for which there was drafting."""
        self._lost += duration - tokens * self.plain_time.value
        self.tokens.add(tokens)
        self.drafted_time.add(duration, clip=_CLIP)

    def read(self, duration: float) -> None:
        """A step whose drafter read prompts first: no measure of the others."""
        self._lost += duration - self.plain_time.value
