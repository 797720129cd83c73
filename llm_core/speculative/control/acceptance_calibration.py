"""Calibration of a drafter's probabilities against how often its drafts are accepted.

Draft models are overconfident, and the probability that a token is drawn by a given random number
is itself an estimate (``tree_expansion.proposal_probs``). Acceptance rates are therefore kept by
bucket of the drafter's probability.
"""

from __future__ import annotations

from collections.abc import Iterator

NUM_BUCKETS = 10  # of the drafter's probabilities, of equal width
PRIOR_DRAFTS = 6.0  # weight of the drafter's own probability, in verified drafts
DECAY = 0.995  # of older drafts, for each newer one in the same bucket


class AcceptanceCalibration:
    """Acceptance rates by bucket of the drafter's probability, and by depth (first or later)."""

    def __init__(self) -> None:
        middles = [(bucket + 0.5) / NUM_BUCKETS for bucket in range(NUM_BUCKETS)]
        self._accepted = [PRIOR_DRAFTS * middle for middle in middles]
        self._verified = [PRIOR_DRAFTS] * NUM_BUCKETS
        self._accepted_later = self._verified_later = 0.0
        self._accepted_first = self._verified_first = 0.0
        self._proposed = [0.0] * (NUM_BUCKETS + 1)  # the last one: nothing was proposed
        self.num_proposals = 0

    def record_proposal(self, probability: float | None) -> None:
        """The probability of a sequence's best first draft, verified or not; None: it had none."""
        self.num_proposals += 1
        for bucket in range(len(self._proposed)):
            self._proposed[bucket] *= DECAY
        self._proposed[NUM_BUCKETS if probability is None else self._bucket(probability)] += 1

    def record_verified(
        self, probability: float, *, is_accepted: bool, depth: int = 1, is_sibling: bool = False
    ) -> None:
        """One verified draft whose parent was accepted. ``is_sibling``: a more likely draft has the
        same parent; such drafts do not count in the rates by depth."""
        bucket = self._bucket(probability)
        self._accepted[bucket] = DECAY * self._accepted[bucket] + is_accepted
        self._verified[bucket] = DECAY * self._verified[bucket] + 1
        if is_sibling:
            return
        if depth > 1:
            self._accepted_later = DECAY * self._accepted_later + is_accepted
            self._verified_later = DECAY * self._verified_later + 1
        else:
            self._accepted_first = DECAY * self._accepted_first + is_accepted
            self._verified_first = DECAY * self._verified_first + 1

    def acceptance_rate(self, probability: float) -> float:
        """The calibrated probability that a draft of this probability is accepted."""
        bucket = self._bucket(probability)
        return min(1.0, self._accepted[bucket] / self._verified[bucket])

    def probability_for_rate(self, rate: float) -> float:
        """The lowest drafter's probability with an acceptance rate of at least ``rate``,
        interpolated between buckets; above 1 if there is none."""
        middle, before = 0.0, 0.0
        for bucket in range(NUM_BUCKETS):
            middle = (bucket + 0.5) / NUM_BUCKETS
            found = self.acceptance_rate(middle)
            if found >= rate:
                part = 1.0 if found <= before else (rate - before) / (found - before)
                start = max(0.0, middle - 1 / NUM_BUCKETS)
                return start + max(0.0, min(1.0, part)) * (middle - start)
            before = found
        return 1.0 if rate <= 1.0 and before > 0.9 * rate else 1.1

    def most_confident_first_drafts(self) -> Iterator[tuple[float, float]]:
        """For growing sets of the most confident first drafts: (share of all sequences that have
        one in the set, accepted drafts per sequence of the batch)."""
        total = max(1.0, sum(self._proposed))
        share = accepted = 0.0
        for bucket in range(NUM_BUCKETS - 1, -1, -1):
            part = self._proposed[bucket] / total
            share += part
            accepted += part * self.acceptance_rate((bucket + 0.5) / NUM_BUCKETS)
            yield share, accepted

    @property
    def first_draft_rate(self) -> float:
        """Acceptance rate of the first draft after the text."""
        return (self._accepted_first + 0.5 * PRIOR_DRAFTS) / (self._verified_first + PRIOR_DRAFTS)

    @property
    def later_draft_rate(self) -> float:
        """Acceptance rate of a draft after an accepted one; that of all drafts until it is
        known."""
        prior = PRIOR_DRAFTS * sum(self._accepted) / sum(self._verified)
        return (self._accepted_later + prior) / (self._verified_later + PRIOR_DRAFTS)

    def _bucket(self, probability: float) -> int:
        return min(int(probability * NUM_BUCKETS), NUM_BUCKETS - 1)
