"""What speculation did, in numbers: for one reply, and for an engine since its start."""

from __future__ import annotations

from llm_core.messages import Speculation
from llm_core.speculative.tree import DraftTree


class SpeculationCounts:
    """Sums. A step of a sequence counts when it verified at least one draft."""

    def __init__(self) -> None:
        self.draft_ns = 0
        self.verify_ns = 0
        self._num_steps = 0
        self._drafted_by_depth: list[int] = []
        self._accepted_by_depth: list[int] = []

    def add_drafts(self, tree: DraftTree) -> None:
        """A tree that is verified now."""
        if not tree:
            return
        self._num_steps += 1
        depths = tree.depths
        for counts in (self._drafted_by_depth, self._accepted_by_depth):
            counts += [0] * (max(depths) - len(counts))
        for depth in depths:
            self._drafted_by_depth[depth - 1] += 1

    def add_accepted(self, depth: int) -> None:
        """A draft of a tree that was added was right."""
        self._accepted_by_depth[depth - 1] += 1

    def snapshot(self) -> Speculation:
        """The numbers so far."""
        return Speculation(
            num_steps=self._num_steps,
            num_drafted=sum(self._drafted_by_depth),
            num_accepted=sum(self._accepted_by_depth),
            drafted_by_depth=tuple(self._drafted_by_depth),
            accepted_by_depth=tuple(self._accepted_by_depth),
            draft_ns=self.draft_ns,
            verify_ns=self.verify_ns,
        )
