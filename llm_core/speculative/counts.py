"""Statistics of speculation: for one reply, and for an engine since its start."""

from __future__ import annotations

from llm_core.messages import Speculation
from llm_core.scheduling import DraftTree


class SpeculationCounts:
    """Running sums. A step of a sequence counts when it verified at least one draft."""

    def __init__(self) -> None:
        self.draft_ns = 0
        self.verify_ns = 0
        self._num_steps = 0
        self._num_drafted = 0
        self._accepted_by_depth: list[int] = []

    def add_drafts(self, tree: DraftTree) -> None:
        """Counts a tree that is being verified."""
        if not tree:
            return
        self._num_steps += 1
        self._num_drafted += len(tree)
        accepted = self._accepted_by_depth
        accepted += [0] * (max(tree.depths) - len(accepted))

    def add_accepted(self, depth: int) -> None:
        """Counts an accepted draft of a tree given to ``add_drafts``."""
        self._accepted_by_depth[depth - 1] += 1

    def snapshot(self) -> Speculation:
        """The sums so far."""
        return Speculation(
            num_steps=self._num_steps,
            num_drafted=self._num_drafted,
            num_accepted=sum(self._accepted_by_depth),
            accepted_by_depth=tuple(self._accepted_by_depth),
            draft_ns=self.draft_ns,
            verify_ns=self.verify_ns,
        )
