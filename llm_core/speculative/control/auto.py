"""Speculation where it gains time, as much as gains: decided in each step from what was measured.

Two questions. *Whether* to draft is answered by whole steps: tokens and time of those with drafts
beside those without (``record``), whatever their time goes into. Tokens are counted as expected,
sum of p, which is the same in the mean as what came true and less noisy. *How many*: a draft is
worth a row when its path is right with a probability p above rate * (what one row more costs), rate
being the tokens in time that are made otherwise; and what follows a draft is worth drafting when p
times the usual share of right followers is above rate * (the time of that draft and its row). This
maximises tokens in time in the long run (Dinkelbach 1967), where the best ratio of each single step
would not. Probabilities are what the drafter says, corrected by how often that came true.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from llm_core.scheduling import EMPTY, DraftTree
from llm_core.speculative.control.acceptance_calibration import AcceptanceCalibration
from llm_core.speculative.control.base import BatchState
from llm_core.speculative.control.speedup_tracker import SpeedupTracker
from llm_core.speculative.control.verification_cost import DraftCost, VerificationCost
from llm_core.speculative.drafters.base import DraftShape

_OUTLIER = 3.0  # times what is known: the head read a prompt, or the machine was away
_KNOWN = 4  # drafts after which their time is known
_SMALL = 0.1  # of a step: what takes less is never an outlier
_FLAT = 1.15  # a tree of 8 rows more costs less than this: rows are free here, follow several paths
_PLAIN, _DRAFTED, _FORCED, _READ = range(4)  # kinds of steps
_SIBLING_STREAMS = 4  # with more, other streams' first drafts are worth more than second words
_SHAPE_STEPS = 8  # a shape is kept for so many: working it out takes a hundredth of a step
_FORESEEN = 32  # drafts after which something can be said of those of other batches
_LISTENS_BEFORE = 64  # steps: about as long as a reply, whose beginning drafts need too
_DEAF_AFTER = 32  # steps of rest
_HOPED = 0.9  # of drafts are right at best: where even that gains nothing, none are tried


class AutoController:
    """See ``Controller``. ``limits`` are never exceeded; a ``width`` above 1 is used where rows are
    nearly free."""

    def __init__(self, limits: DraftShape, cost: VerificationCost, draft_cost: DraftCost) -> None:
        self._limits = limits
        self._cost = cost
        self._draft_cost = draft_cost
        self._truth = AcceptanceCalibration()
        self._records: defaultdict[tuple[int, int], SpeedupTracker] = defaultdict(SpeedupTracker)
        self._record = SpeedupTracker()
        self._kind = _PLAIN
        self._expected_ns = 1.0  # of a step without drafts
        self._tokens = 1.0  # of a stream
        self._num_deaf = 0  # steps on end in which nobody was about to draft
        self._shapes: dict[tuple[int, int], DraftShape | None] = {}  # by streams and rows
        self._shape_steps = 0  # for which these were kept

    def shape(self, situation: BatchState) -> DraftShape | None:
        self._kind = _PLAIN
        self._record = self._records[_size_class(situation)]
        self._expected_ns = self._cost.ns(situation.num_rows)
        if situation.is_patient and situation.num_rows > situation.num_streams:
            return None  # somebody waits for a prompt, and nobody for these streams
        if not self._record.wants_drafts(lambda: self._outlook(situation)):
            is_deaf = self._record.num_resting > _LISTENS_BEFORE
            self._num_deaf = self._num_deaf + 1 if is_deaf else 0
            return None
        self._num_deaf = 0
        self._shape_steps += 1
        if self._shape_steps > _SHAPE_STEPS:
            self._shape_steps = 0
            self._shapes.clear()
        key = situation.num_streams, situation.num_rows
        if key not in self._shapes:
            self._shapes[key] = self._best_shape(situation)
        return self._shapes[key]

    @property
    def listens(self) -> bool:
        """Not where drafts rest for long: keeping hidden states takes a hundredth of a step. Where
        batches grow and shrink, a moment's rest would leave holes in what a head has read."""
        return self._num_deaf <= _DEAF_AFTER

    def _best_shape(self, situation: BatchState) -> DraftShape | None:
        """By what is known now; None where no drafts can pay."""
        if not self._could_pay(situation):
            return None
        rows, streams = situation.num_rows, situation.num_streams
        rate = self._rate(situation)
        now_ns, one_ns, two_ns = (self._cost.ns(rows + more) for more in (0, 1, 2))
        _, step_ns = self._draft_ns(streams)
        least = rate * (one_ns - now_ns)
        followed = rate * (step_ns / streams + two_ns - one_ns) / max(0.05, self._truth.later)
        is_flat = self._cost.ns(rows + 8 * streams) < _FLAT * now_ns
        return replace(
            self._limits,
            max_depth=self._limits.max_depth if streams == 1 else self._best_depth(situation),
            width=self._limits.width if is_flat else 1,
            siblings=self._limits.siblings if streams <= _SIBLING_STREAMS else 0,
            least_probability=max(self._limits.least_probability, min(0.9, 0.5 * least)),
            least_followed=max(self._limits.least_followed, self._truth.said_for(followed)),
        )

    def choose(self, trees: Sequence[DraftTree], situation: BatchState) -> list[DraftTree]:
        """The drafts that are worth their rows."""
        for tree in trees:
            self._truth.proposed(tree.probabilities[0] if tree else None)
        paths = [self._paths(tree) for tree in trees]
        drafts = sorted(
            (-p, index, i) for index, path in enumerate(paths) for i, p in enumerate(path)
        )
        rows = situation.num_rows
        plain_ns = self._cost.ns(rows)
        gains = list(accumulate(-minus_p for minus_p, _, _ in drafts))
        rate = self._rate(situation)
        if not self._record.drafted_time.num_seen:  # nothing better is known than this step's best
            rates = (
                (situation.num_streams + gained) / self._cost.ns(rows + count)
                for count, gained in enumerate(gains, 1)
            )
            rate = max([rate, *rates])
        best, best_count = 0.0, 0
        self._tokens = 1.0
        for count, gained in enumerate(gains, 1):
            worth = gained - rate * (self._cost.ns(rows + count) - plain_ns)
            if worth > best:
                best, best_count = worth, count
                self._tokens = 1.0 + gained / situation.num_streams
        if best_count and self._kind == _PLAIN:
            self._kind = _FORCED  # by a guide: neither with drafts nor without
        kept: list[list[int]] = [[] for _ in trees]
        for _, index, i in drafts[:best_count]:
            kept[index].append(i)
        return [
            tree.subtree(sorted(chosen)) if chosen else EMPTY
            for tree, chosen in zip(trees, kept, strict=True)
        ]

    def drafted(self, trees: Sequence[DraftTree], duration_ns: int) -> None:
        self._kind = _DRAFTED
        depth = max(1, max((max(tree.depths, default=0) for tree in trees), default=0))
        ratio = duration_ns / self._cost.load / self._draft_cost.ns(depth)
        scale = self._record.draft_scale
        usual = scale.value if scale.num_seen else len(trees) ** 0.5
        if ratio < _OUTLIER * usual or duration_ns < _SMALL * self._cost.ns(1):
            scale.add(ratio)
            return
        # The first draft of a reply reads its prompt, as its end would do if there was none.
        self._kind = _READ
        if scale.num_seen < _KNOWN:  # or what was measured at the start is not true
            scale.value, scale.num_seen = 1.5 * usual, 1
        else:
            scale.add(1.2 * usual)

    def verified(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        rows, depths, parents = set(accepted), tree.depths, set()
        for draft, parent in enumerate(tree.parents):
            if parent + 1 in rows:
                is_right = draft + 1 in rows
                said = tree.probabilities[draft]
                self._truth.observe(
                    said,
                    is_right=is_right,
                    depth=depths[draft],
                    is_sibling=parent in parents,
                )
                parents.add(parent)

    def stepped(self, num_rows: int, duration_ns: int) -> None:
        self._cost.observe(num_rows, duration_ns)

    def finished(self, duration_ns: int) -> None:
        duration = duration_ns / self._expected_ns
        if self._kind == _DRAFTED:
            self._record.drafted(self._tokens, duration)
        elif self._kind == _PLAIN:
            self._record.plain(duration)
        elif self._kind == _READ:
            self._record.read(duration)

    def _rate(self, situation: BatchState) -> float:
        """Tokens in a nanosecond, at the present load."""
        plain = situation.num_streams / self._cost.ns(situation.num_rows)
        return plain * self._record.rate()

    def _draft_ns(self, num_streams: int) -> tuple[float, float]:
        """What the first draft of every stream takes, and each further one."""
        scale = self._record.draft_scale
        factor = self._cost.load * (scale.value if scale.num_seen else num_streams**0.5)
        return factor * self._draft_cost.ns(1), factor * self._draft_cost.step_ns

    def _best_depth(self, situation: BatchState) -> int:
        """How far all streams together go: a pass of the head takes as long for the last stream
        that is still sure of itself as for all."""
        draft_ns = self._draft_ns(situation.num_streams)
        chains = self._chains(situation, self._truth.first, self._truth.later, draft_ns)
        rates = [tokens / took_ns for tokens, took_ns in chains]
        return 1 + rates.index(max(rates))

    def _chains(
        self, situation: BatchState, first: float, later: float, draft_ns: tuple[float, float]
    ) -> Iterator[tuple[float, float]]:
        """By depth from 1 on: what a stream says and how long it takes, when all have a chain of so
        many drafts, the first right with ``first`` and each that follows a right one with
        ``later``. ``draft_ns``: of the first drafts and of the further ones, of all streams."""
        tokens, path, drafting_ns = 1.0, first, draft_ns[0]
        for depth in range(1, self._limits.max_depth + 1):
            tokens += path
            rows = situation.num_rows + depth * situation.num_streams
            yield tokens, self._cost.ns(rows) + drafting_ns
            path *= later
            drafting_ns += draft_ns[1]

    def _outlook(self, situation: BatchState) -> float:
        """What drafts would gain in such a step, by how sure and how right they are elsewhere: with
        chains for all streams, or with one draft for those streams whose drafts are surest."""
        rows, streams = situation.num_rows, situation.num_streams
        is_known = self._truth.num_proposed >= _FORESEEN
        first, later = (self._truth.first, self._truth.later) if is_known else (_HOPED, _HOPED)
        draft_ns = self._draft_ns(streams)
        now_ns = self._cost.ns(rows)
        plain_ns = now_ns * (self._record.plain_time.value or 1.0)
        ways = list(self._chains(situation, first, later, draft_ns))
        for share, right in self._truth.surest() if is_known else ():
            took_ns = self._cost.ns(rows + math.ceil(share * streams)) + draft_ns[0]
            ways.append((1.0 + right, took_ns))
        beside_ns = plain_ns - now_ns  # what of a step is no row's
        return max(tokens * plain_ns / (took_ns + beside_ns) for tokens, took_ns in ways)

    def _could_pay(self, situation: BatchState) -> bool:
        """Whether drafts would gain time if they were right as often as one can hope."""
        rows, streams = situation.num_rows, situation.num_streams
        scale = self._record.draft_scale.value or 1.0
        factor = min(scale, streams) * self._cost.load
        draft_ns = factor * self._draft_cost.ns(1), factor * self._draft_cost.step_ns
        plain_ns = self._cost.ns(rows)
        chains = self._chains(situation, _HOPED, _HOPED, draft_ns)
        if any(tokens * plain_ns > took_ns for tokens, took_ns in chains):
            return True
        # One stream may be sure of itself where the others are not.
        return plain_ns * (1 + _HOPED / streams) > self._cost.ns(rows + 1) + draft_ns[0]

    def _paths(self, tree: DraftTree) -> list[float]:
        """How likely each draft's whole path is right; a parent's is never below its child's."""
        corrected = tuple(self._truth.corrected(p) for p in tree.probabilities)
        return replace(tree, probabilities=corrected).path_probabilities


def _size_class(situation: BatchState) -> tuple[int, int]:
    """Batches of about the same number of streams (1, 2, 3 to 4, 5, 6 to 8, ...), and of rows of
    prompts beside them."""
    prompt_rows = situation.num_rows - situation.num_streams
    return math.ceil(2 * math.log2(situation.num_streams)), prompt_rows.bit_length()
