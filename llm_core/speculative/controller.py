"""Speculation where it gains time, as much as gains: decided in each step from what was measured.

A step says one token for each of its S streams, and one more for each draft that is right. With T
the time by rows (``row_cost``) and p the probability that a draft's whole path is right, drafts are
added, the likeliest first, as long as (S + sum of p) / T(rows + drafts) grows. What the drafter
says of its own probability is corrected by how often that came true.

Whether to draft at all is decided by what it brought lately with as many streams: drafting takes
time itself. Where it does not pay it is tried again now and then, for a fraction of a percent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llm_core.speculative.control import Situation
from llm_core.speculative.drafter import DraftShape
from llm_core.speculative.row_cost import RowCost
from llm_core.speculative.tree import EMPTY, DraftTree

_NUM_BUCKETS = 10  # of probabilities that the drafter gives
_PRIOR = 6.0  # verified drafts after which what came true counts as much as what was said
_FORGET = 0.995
_GAIN_WEIGHT = 0.08  # of the newest step
_LEAST_GAIN = 1.01
_TRIAL_STEPS, _PAUSE_STEPS = 3, 60
_OUTLIER, _RISE = 3.0, 1.1  # drafts that take so much longer than known; how fast that is learnt
_FLAT = 1.15  # a tree of 8 rows more costs less than this: rows are free here, follow several paths


class Truth:
    """How often drafts are right, by the probability that the drafter gave them."""

    def __init__(self) -> None:
        middles = [(bucket + 0.5) / _NUM_BUCKETS for bucket in range(_NUM_BUCKETS)]
        self._right = [_PRIOR * middle for middle in middles]
        self._all = [_PRIOR] * _NUM_BUCKETS

    def observe(self, said: float, *, is_right: bool) -> None:
        """One verified draft."""
        bucket = min(int(said * _NUM_BUCKETS), _NUM_BUCKETS - 1)
        self._right[bucket] = _FORGET * self._right[bucket] + is_right
        self._all[bucket] = _FORGET * self._all[bucket] + 1

    def corrected(self, said: float) -> float:
        """What ``said`` is worth."""
        bucket = min(int(said * _NUM_BUCKETS), _NUM_BUCKETS - 1)
        return min(1.0, self._right[bucket] / self._all[bucket])


@dataclass(slots=True)
class _Record:
    """What speculation brought lately, for one size of batches."""

    gain: float = 1.2  # (tokens in time) with drafts by the same without; at first it is hoped for
    draft_step_ns: float = 0.0  # drafting, by depth
    num_idle: int = 0  # steps since it was tried


class AutoController:
    """See ``Controller``. ``limits`` are never exceeded; a ``width`` above 1 is used where rows are
    nearly free."""

    def __init__(self, limits: DraftShape, cost: RowCost) -> None:
        self._limits = limits
        self._cost = cost
        self._truth = Truth()
        self._records: dict[int, _Record] = {}
        self._record = _Record()
        self._num_streams = 1
        self._draft_ns = 0

    def shape(self, situation: Situation) -> DraftShape | None:
        self._num_streams = situation.num_streams
        self._record = record = self._records.setdefault(_size_class(situation), _Record())
        if situation.is_patient and situation.num_rows > situation.num_streams:
            return None  # somebody waits for a prompt, and nobody for these streams
        if record.gain < _LEAST_GAIN:
            record.num_idle += 1
            if record.num_idle <= _PAUSE_STEPS:
                return None
            if record.num_idle >= _PAUSE_STEPS + _TRIAL_STEPS:
                record.num_idle = 0
        self._draft_ns = 0
        rows, streams = situation.num_rows, situation.num_streams
        now_ns = self._cost.ns(rows)
        least_ns = min(
            (self._cost.ns(rows + more) - now_ns) / more for more in (1, 2, 4) if more > 0
        )
        worth = streams / now_ns * (least_ns + record.draft_step_ns / streams)
        is_flat = self._cost.ns(rows + 8 * streams) < _FLAT * now_ns
        return replace(
            self._limits,
            width=self._limits.width if is_flat else 1,
            least_probability=max(self._limits.least_probability, min(0.9, 0.5 * worth)),
        )

    def choose(self, trees: Sequence[DraftTree], situation: Situation) -> list[DraftTree]:
        """The drafts that make the most tokens in time together."""
        paths = [self._paths(tree) for tree in trees]
        drafts = [(-p, index, i) for index, path in enumerate(paths) for i, p in enumerate(path)]
        drafts.sort()
        tokens, rows = float(situation.num_streams), situation.num_rows
        plain_ns = self._cost.ns(rows)
        best_rate, best_count = tokens / plain_ns, 0
        for count, (minus_p, _, _) in enumerate(drafts, 1):
            tokens -= minus_p
            rate = tokens / self._cost.ns(rows + count)
            if rate > best_rate:
                best_rate, best_count = rate, count
        if self._draft_ns:
            # Drafting took time that a plain step would not have.
            gain = best_rate * plain_ns / situation.num_streams
            with_ns = self._cost.ns(rows + best_count)
            gain *= with_ns / (with_ns + self._draft_ns)
            self._record.gain += _GAIN_WEIGHT * (gain - self._record.gain)
        kept: list[list[int]] = [[] for _ in trees]
        for _, index, i in drafts[:best_count]:
            kept[index].append(i)
        return [
            tree.subtree(sorted(chosen)) if chosen else EMPTY
            for tree, chosen in zip(trees, kept, strict=True)
        ]

    def drafted(self, trees: Sequence[DraftTree], duration_ns: int) -> None:
        depth = max((max(tree.depths, default=0) for tree in trees), default=0) + 1
        record, step_ns = self._record, duration_ns / depth
        known_ns = record.draft_step_ns
        if known_ns == 0:
            record.draft_step_ns = step_ns
        elif step_ns > _OUTLIER * known_ns:
            # A head reads a prompt before its first draft: once a reply, and no price of drafts.
            record.draft_step_ns *= _RISE
        else:
            weight = 0.5 if step_ns < known_ns else 0.1
            record.draft_step_ns += weight * (step_ns - known_ns)
            self._draft_ns = duration_ns

    def verified(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        rows = set(accepted)
        for draft, parent in enumerate(tree.parents):
            if parent + 1 in rows:
                is_right = draft + 1 in rows
                self._truth.observe(tree.probabilities[draft], is_right=is_right)

    def stepped(self, num_rows: int, duration_ns: int) -> None:
        self._cost.observe(num_rows, duration_ns)

    def _paths(self, tree: DraftTree) -> list[float]:
        """How likely each draft's whole path is right; a parent's is never below its child's."""
        corrected = tuple(self._truth.corrected(p) for p in tree.probabilities)
        return replace(tree, probabilities=corrected).path_probabilities


def _size_class(situation: Situation) -> int:
    """Batches of about the same number of streams, and of rows of prompts beside them."""
    prompt_rows = situation.num_rows - situation.num_streams
    return situation.num_streams.bit_length() * 16 + prompt_rows.bit_length()
