"""Trees of draft tokens: what a drafter proposes, and what of it is worth computing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Guesses at what follows a sequence; no tensors here.

    ``token_ids[i]`` follows draft ``parents[i]`` < i or, with -1, the sequence itself; no two
    drafts have the same parent and the same token. ``probabilities[i]``: how likely the drafter
    thinks it that draft i is right where its parent is.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    probabilities: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def chain(cls, token_ids: Sequence[int], probabilities: Sequence[float]) -> DraftTree:
        """Each draft follows the one before."""
        parents = tuple(range(-1, len(token_ids) - 1))
        return cls(tuple(token_ids), parents, tuple(probabilities))

    @property
    def row_parents(self) -> tuple[int, ...]:
        """``Segment.parents`` where row 0 is the sequence's last token and row i + 1 is draft i."""
        return (-1, *(parent + 1 for parent in self.parents))

    @property
    def depths(self) -> list[int]:
        """1 for drafts that follow the sequence itself."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    @property
    def path_probabilities(self) -> list[float]:
        """How likely each draft is to be reached and right: the product along its path."""
        result: list[float] = []
        for parent, probability in zip(self.parents, self.probabilities, strict=True):
            result.append(probability if parent < 0 else result[parent] * probability)
        return result

    def path(self, draft: int) -> list[int]:
        """The drafts from the sequence to ``draft``, itself the last."""
        path: list[int] = []
        while draft >= 0:
            path.append(draft)
            draft = self.parents[draft]
        return path[::-1]

    def subtree(self, kept: Sequence[int]) -> DraftTree:
        """Only the drafts ``kept``, which ascend and hold the parent of each."""
        place = {old: new for new, old in enumerate(kept)} | {-1: -1}
        return DraftTree(
            tuple(self.token_ids[i] for i in kept),
            tuple(place[self.parents[i]] for i in kept),
            tuple(self.probabilities[i] for i in kept),
        )

    def best(self, count: int) -> DraftTree:
        """The ``count`` drafts that are likeliest to be right (EAGLE-2, arXiv 2406.16858). A path
        only gets less likely, so each comes with its parent; of equals the first are kept."""
        if count >= len(self):
            return self
        paths = self.path_probabilities
        # A tie between a parent and its child (probability 1) must go to the parent.
        kept = nlargest(count, range(len(self)), key=lambda i: (paths[i], -i))
        return self.subtree(sorted(kept))

    def check(self) -> None:
        """Asserts what is promised above."""
        assert len(self.token_ids) == len(self.parents) == len(self.probabilities)
        assert all(-1 <= parent < i for i, parent in enumerate(self.parents)), self.parents
        pairs = list(zip(self.parents, self.token_ids, strict=True))
        assert len(set(pairs)) == len(pairs), "children of one parent differ"
        assert all(0.0 <= p <= 1.0 for p in self.probabilities), self.probabilities


EMPTY = DraftTree((), (), ())
