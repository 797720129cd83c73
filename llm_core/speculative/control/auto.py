"""The measuring controller: drafts where it gains throughput, and as much as gains.

The control loop, its state, decision rule and constants are described in ``control/__init__.py``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import Enum
from itertools import accumulate

from llm_core.scheduling import EMPTY, DraftTree
from llm_core.speculative.control.acceptance_calibration import AcceptanceCalibration
from llm_core.speculative.control.base import BatchState
from llm_core.speculative.control.costs import DraftCost, VerificationCost
from llm_core.speculative.control.speedup_tracker import SpeedupTracker
from llm_core.speculative.drafters.base import DraftShape

DRAFT_OUTLIER_RATIO = 3.0  # of usual drafting time: the head prefilled a prompt, or was preempted
KNOWN_DRAFT_STEPS = 4  # drafting steps after which their usual time is trusted
SMALL_DRAFT_SHARE = 0.1  # of a plain step; drafting that takes less is never an outlier
FREE_TOKENS_RATIO = 1.15  # forward passes with 8 more tokens a sequence below this: draft trees
SIBLING_MAX_SEQUENCES = 4  # larger batches draft no siblings
SHAPE_REUSE_STEPS = 8  # a computed draft shape is reused for as many steps
MIN_FORECAST_PROPOSALS = 32  # before acceptance rates are used in forecasts
HIDDEN_STATE_STEPS = 64  # capture resumes when a cool-down has no more steps left than this
STOP_CAPTURE_STEPS = 32  # consecutive steps of a longer cool-down after which capture stops
BEST_CASE_ACCEPTANCE = 0.9  # where even this rate gains nothing, nothing is drafted


class StepKind(Enum):
    """What the duration of a step is evidence for."""

    PLAIN = "plain"  # no drafts
    DRAFTED = "drafted"
    FORCED = "forced"  # only tokens that a grammar forces: evidence for neither
    HEAD_PREFILL = "head prefill"  # the drafter prefilled a prompt first


class AutoController:
    """A ``Controller`` that adapts to measured times. ``limits`` are never exceeded; its ``width``
    is used only where further tokens in a forward pass are nearly free."""

    def __init__(self, limits: DraftShape, cost: VerificationCost, draft_cost: DraftCost) -> None:
        self._limits = limits
        self._cost = cost
        self._draft_cost = draft_cost
        self._calibration = AcceptanceCalibration()
        self._trackers: defaultdict[tuple[int, int], SpeedupTracker] = defaultdict(SpeedupTracker)
        self._tracker = SpeedupTracker()  # of the current batch size
        self._step_kind = StepKind.PLAIN
        self._plain_ns = 1.0  # expected duration of this step without drafts
        self._tokens_per_sequence = 1.0  # expected in this step
        self._num_idle_steps = 0  # consecutive steps of a cool-down that is far from its end
        self._shapes: dict[tuple[int, int], DraftShape | None] = {}  # by (sequences, tokens)
        self._shapes_age = 0  # steps

    def draft_shape(self, batch: BatchState) -> DraftShape | None:
        self._step_kind = StepKind.PLAIN
        self._tracker = self._trackers[_size_class(batch)]
        self._plain_ns = self._cost.ns(batch.num_tokens)
        if batch.has_slack and batch.num_tokens > batch.num_sequences:
            return None  # leave the step to the prompts in it: decoding is ahead of playback
        if not self._tracker.should_draft(lambda: self._forecast_speedup(batch)):
            is_far = self._tracker.cooldown_left > HIDDEN_STATE_STEPS
            self._num_idle_steps = self._num_idle_steps + 1 if is_far else 0
            return None
        self._num_idle_steps = 0
        self._shapes_age += 1
        if self._shapes_age > SHAPE_REUSE_STEPS:
            self._shapes_age = 0
            self._shapes.clear()
        key = batch.num_sequences, batch.num_tokens
        if key not in self._shapes:
            self._shapes[key] = self._best_shape(batch)
        return self._shapes[key]

    @property
    def wants_hidden_states(self) -> bool:
        """False in long cool-downs. Not at once: where the batch size fluctuates, a short pause
        would leave gaps in the head's KV cache."""
        return self._num_idle_steps <= STOP_CAPTURE_STEPS

    def select_drafts(self, trees: Sequence[DraftTree], batch: BatchState) -> list[DraftTree]:
        """The drafts whose expected gain exceeds the time of verifying them."""
        for tree in trees:
            self._calibration.record_proposal(tree.probabilities[0] if tree else None)
        paths = [self._path_probabilities(tree) for tree in trees]
        drafts = sorted(
            (-p, index, i) for index, path in enumerate(paths) for i, p in enumerate(path)
        )
        num_tokens = batch.num_tokens
        plain_ns = self._cost.ns(num_tokens)
        gains = list(accumulate(-minus_p for minus_p, _, _ in drafts))
        rate = self._tokens_per_ns(batch)
        if not self._tracker.drafted_time.num_values:  # no measurement yet: this step's best ratio
            rates = (
                (batch.num_sequences + gained) / self._cost.ns(num_tokens + count)
                for count, gained in enumerate(gains, 1)
            )
            rate = max([rate, *rates])
        best, best_count = 0.0, 0
        self._tokens_per_sequence = 1.0
        for count, gained in enumerate(gains, 1):
            net_gain = gained - rate * (self._cost.ns(num_tokens + count) - plain_ns)
            if net_gain > best:
                best, best_count = net_gain, count
                self._tokens_per_sequence = 1.0 + gained / batch.num_sequences
        if best_count and self._step_kind is StepKind.PLAIN:
            self._step_kind = StepKind.FORCED
        selected: list[list[int]] = [[] for _ in trees]
        for _, index, i in drafts[:best_count]:
            selected[index].append(i)
        return [
            tree.subtree(sorted(chosen)) if chosen else EMPTY
            for tree, chosen in zip(trees, selected, strict=True)
        ]

    def record_drafting(self, trees: Sequence[DraftTree], duration_ns: int) -> None:
        self._step_kind = StepKind.DRAFTED
        depth = max(1, max((max(tree.depths, default=0) for tree in trees), default=0))
        ratio = duration_ns / self._cost.load / self._draft_cost.ns(depth)
        scale = self._tracker.draft_time_scale
        usual = scale.value if scale.num_values else len(trees) ** 0.5
        is_small = duration_ns < SMALL_DRAFT_SHARE * self._cost.ns(1)
        if ratio < DRAFT_OUTLIER_RATIO * usual or is_small:
            scale.add(ratio)
            return
        # The first draft of a reply includes the head's prefill of the prompt, which would be due
        # at the end of the reply otherwise.
        self._step_kind = StepKind.HEAD_PREFILL
        if scale.num_values < KNOWN_DRAFT_STEPS:  # or the start-up measurement is wrong
            scale.value, scale.num_values = 1.5 * usual, 1
        else:
            scale.add(1.2 * usual)

    def record_accepted(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        rows, depths, parents = set(accepted), tree.depths, set()
        for draft, parent in enumerate(tree.parents):
            if parent + 1 in rows:
                self._calibration.record_verified(
                    tree.probabilities[draft],
                    is_accepted=draft + 1 in rows,
                    depth=depths[draft],
                    is_sibling=parent in parents,
                )
                parents.add(parent)

    def record_forward(self, num_tokens: int, duration_ns: int) -> None:
        self._cost.record_forward(num_tokens, duration_ns)

    def record_step(self, duration_ns: int) -> None:
        duration = duration_ns / self._plain_ns
        if self._step_kind is StepKind.DRAFTED:
            self._tracker.record_drafted_step(self._tokens_per_sequence, duration)
        elif self._step_kind is StepKind.PLAIN:
            self._tracker.record_plain_step(duration)
        elif self._step_kind is StepKind.HEAD_PREFILL:
            self._tracker.record_head_prefill_step(duration)

    def _best_shape(self, batch: BatchState) -> DraftShape | None:
        """The draft shape by current estimates; None where no drafts can pay."""
        if not self._could_pay(batch):
            return None
        num_tokens, num_sequences = batch.num_tokens, batch.num_sequences
        rate = self._tokens_per_ns(batch)
        now_ns, one_ns, two_ns = (self._cost.ns(num_tokens + more) for more in (0, 1, 2))
        _, step_ns = self._draft_ns(num_sequences)
        min_path = rate * (one_ns - now_ns)
        min_expand = rate * (step_ns / num_sequences + two_ns - one_ns)
        min_expand /= max(0.05, self._calibration.later_draft_rate)
        is_flat = self._cost.ns(num_tokens + 8 * num_sequences) < FREE_TOKENS_RATIO * now_ns
        limits = self._limits
        return replace(
            limits,
            max_depth=limits.max_depth if num_sequences == 1 else self._best_depth(batch),
            width=limits.width if is_flat else 1,
            siblings=limits.siblings if num_sequences <= SIBLING_MAX_SEQUENCES else 0,
            min_path_probability=max(limits.min_path_probability, min(0.9, 0.5 * min_path)),
            min_expand_probability=max(
                limits.min_expand_probability, self._calibration.probability_for_rate(min_expand)
            ),
        )

    def _tokens_per_ns(self, batch: BatchState) -> float:
        """The throughput that is reached otherwise, at the current load."""
        plain = batch.num_sequences / self._cost.ns(batch.num_tokens)
        return plain * self._tracker.best_rate()

    def _draft_ns(self, num_sequences: int) -> tuple[float, float]:
        """Durations for all sequences together: of the first drafts, and of each further depth."""
        scale = self._tracker.draft_time_scale
        factor = self._cost.load * (scale.value if scale.num_values else num_sequences**0.5)
        return factor * self._draft_cost.ns(1), factor * self._draft_cost.step_ns

    def _best_depth(self, batch: BatchState) -> int:
        """The depth for a batch: a pass of the head takes as long for the last sequence that is
        still confident as for all."""
        calibration = self._calibration
        draft_ns = self._draft_ns(batch.num_sequences)
        chains = self._chains(
            batch, calibration.first_draft_rate, calibration.later_draft_rate, draft_ns
        )
        rates = [tokens / duration_ns for tokens, duration_ns in chains]
        return 1 + rates.index(max(rates))

    def _chains(
        self, batch: BatchState, first: float, later: float, draft_ns: tuple[float, float]
    ) -> Iterator[tuple[float, float]]:
        """For each depth from 1 on, with chains of that depth for all sequences: (expected tokens
        of a sequence, duration of the step). ``first``, ``later``: acceptance rates of first drafts
        and of drafts after an accepted one; ``draft_ns`` as ``_draft_ns``."""
        tokens, path, drafting_ns = 1.0, first, draft_ns[0]
        for depth in range(1, self._limits.max_depth + 1):
            tokens += path
            num_tokens = batch.num_tokens + depth * batch.num_sequences
            yield tokens, self._cost.ns(num_tokens) + drafting_ns
            path *= later
            drafting_ns += draft_ns[1]

    def _forecast_speedup(self, batch: BatchState) -> float:
        """The speed-up to expect in such a batch, from acceptance rates in all batches: with chains
        for all sequences, or with one draft for the sequences of the most confident drafts."""
        num_tokens, num_sequences = batch.num_tokens, batch.num_sequences
        calibration = self._calibration
        is_known = calibration.num_proposals >= MIN_FORECAST_PROPOSALS
        first, later = (
            (calibration.first_draft_rate, calibration.later_draft_rate)
            if is_known
            else (BEST_CASE_ACCEPTANCE, BEST_CASE_ACCEPTANCE)
        )
        draft_ns = self._draft_ns(num_sequences)
        forward_ns = self._cost.ns(num_tokens)
        plain_ns = forward_ns * (self._tracker.plain_time.value or 1.0)
        options = list(self._chains(batch, first, later, draft_ns))
        for share, accepted in calibration.most_confident_first_drafts() if is_known else ():
            duration_ns = self._cost.ns(num_tokens + math.ceil(share * num_sequences)) + draft_ns[0]
            options.append((1.0 + accepted, duration_ns))
        overhead_ns = plain_ns - forward_ns  # sampling and hand-over, the same with drafts
        return max(tokens * plain_ns / (took_ns + overhead_ns) for tokens, took_ns in options)

    def _could_pay(self, batch: BatchState) -> bool:
        """True if drafts would pay at the best conceivable acceptance rate."""
        num_tokens, num_sequences = batch.num_tokens, batch.num_sequences
        scale = self._tracker.draft_time_scale.value or 1.0
        factor = min(scale, num_sequences) * self._cost.load
        draft_ns = factor * self._draft_cost.ns(1), factor * self._draft_cost.step_ns
        plain_ns = self._cost.ns(num_tokens)
        chains = self._chains(batch, BEST_CASE_ACCEPTANCE, BEST_CASE_ACCEPTANCE, draft_ns)
        if any(tokens * plain_ns > took_ns for tokens, took_ns in chains):
            return True
        # A single sequence may be confident where the others are not.
        gain_ns = plain_ns * (1 + BEST_CASE_ACCEPTANCE / num_sequences)
        return gain_ns > self._cost.ns(num_tokens + 1) + draft_ns[0]

    def _path_probabilities(self, tree: DraftTree) -> list[float]:
        """Calibrated probability of each draft's path; never above its parent's."""
        rates = tuple(self._calibration.acceptance_rate(p) for p in tree.probabilities)
        return replace(tree, probabilities=rates).path_probabilities


def _size_class(batch: BatchState) -> tuple[int, int]:
    """Classes of batches that share a tracker: by number of decoding sequences (1, 2, 3 to 4, 5,
    6 to 8, ...), and by the power of two of prompt tokens beside them."""
    num_prompt_tokens = batch.num_tokens - batch.num_sequences
    return math.ceil(2 * math.log2(batch.num_sequences)), num_prompt_tokens.bit_length()
