"""What a drafter's probabilities are worth: how often drafts were right, by what was said of them.

Drafters boast, and how likely a token is that will be drawn is a guess (``grow.draw_odds``); what
came true corrects both.
"""

from __future__ import annotations

from collections.abc import Iterator

_NUM_BUCKETS = 10  # of probabilities that the drafter gives
_PRIOR = 6.0  # verified drafts after which what came true counts as much as what was said
_FORGET = 0.995


class AcceptanceCalibration:
    """Shares of right drafts in buckets of what was said, and of drafts that follow a right one."""

    def __init__(self) -> None:
        middles = [(bucket + 0.5) / _NUM_BUCKETS for bucket in range(_NUM_BUCKETS)]
        self._right = [_PRIOR * middle for middle in middles]
        self._all = [_PRIOR] * _NUM_BUCKETS
        self._right_after = self._all_after = 0.0
        self._right_first = self._all_first = 0.0
        self._proposed = [0.0] * (_NUM_BUCKETS + 1)  # the last: nothing was
        self.num_proposed = 0

    def proposed(self, said: float | None) -> None:
        """What was said of a sequence's likeliest first draft, verified or not; None: it had
        none."""
        self.num_proposed += 1
        for bucket in range(len(self._proposed)):
            self._proposed[bucket] *= _FORGET
        self._proposed[_NUM_BUCKETS if said is None else self._bucket(said)] += 1

    def surest(self) -> Iterator[tuple[float, float]]:
        """The surest first drafts, more and more of them: which share of all sequences they are,
        and how many of a sequence's are right."""
        total = max(1.0, sum(self._proposed))
        share = right = 0.0
        for bucket in range(_NUM_BUCKETS - 1, -1, -1):
            part = self._proposed[bucket] / total
            share += part
            right += part * self.corrected((bucket + 0.5) / _NUM_BUCKETS)
            yield share, right

    def observe(
        self, said: float, *, is_right: bool, depth: int = 1, is_sibling: bool = False
    ) -> None:
        """One verified draft, whose parent was right. A sibling comes after a better draft with the
        same parent: ``first`` and ``later`` are not of such."""
        bucket = self._bucket(said)
        self._right[bucket] = _FORGET * self._right[bucket] + is_right
        self._all[bucket] = _FORGET * self._all[bucket] + 1
        if is_sibling:
            return
        if depth > 1:
            self._right_after = _FORGET * self._right_after + is_right
            self._all_after = _FORGET * self._all_after + 1
        else:
            self._right_first = _FORGET * self._right_first + is_right
            self._all_first = _FORGET * self._all_first + 1

    def corrected(self, said: float) -> float:
        """What ``said`` is worth."""
        bucket = self._bucket(said)
        return min(1.0, self._right[bucket] / self._all[bucket])

    def said_for(self, worth: float) -> float:
        """The least that a drafter says of drafts that are worth ``worth`` or more; above 1 if
        none are. Between the middles of buckets on a line."""
        middle, before = 0.0, 0.0
        for bucket in range(_NUM_BUCKETS):
            middle = (bucket + 0.5) / _NUM_BUCKETS
            found = self.corrected(middle)
            if found >= worth:
                part = 1.0 if found <= before else (worth - before) / (found - before)
                start = max(0.0, middle - 1 / _NUM_BUCKETS)
                return start + max(0.0, min(1.0, part)) * (middle - start)
            before = found
        return 1.0 if worth <= 1.0 and before > 0.9 * worth else 1.1

    @property
    def first(self) -> float:
        """How often the first draft is right."""
        return (self._right_first + 0.5 * _PRIOR) / (self._all_first + _PRIOR)

    @property
    def later(self) -> float:
        """How often the draft behind a right one is right; until that is known, as all drafts."""
        prior = _PRIOR * sum(self._right) / sum(self._all)
        return (self._right_after + prior) / (self._all_after + _PRIOR)

    def _bucket(self, said: float) -> int:
        return min(int(said * _NUM_BUCKETS), _NUM_BUCKETS - 1)
