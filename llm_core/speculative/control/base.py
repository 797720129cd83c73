"""The interface of a speculation controller, and one with a fixed draft shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from llm_core.scheduling import DraftTree
from llm_core.speculative.drafters.base import DraftShape


@dataclass(frozen=True, slots=True)
class BatchState:
    """A batch before drafts are added: ``num_tokens`` in all, ``num_sequences`` of them the single
    token of a decoding sequence, the others prompt chunks. ``has_slack``: no deadline of the
    decoding sequences is near."""

    num_sequences: int
    num_tokens: int
    has_slack: bool = False


class Controller(Protocol):
    """Asked before and after drafting; then given what was accepted and what it took."""

    def draft_shape(self, batch: BatchState) -> DraftShape | None:
        """How far to draft for each sequence; None: no drafting in this step."""

    @property
    def wants_hidden_states(self) -> bool:
        """True if the target's hidden states of this step should be captured for later drafts."""

    def select_drafts(self, trees: Sequence[DraftTree], batch: BatchState) -> list[DraftTree]:
        """The part of each sequence's tree that is worth verifying, possibly empty."""

    def record_drafting(self, trees: Sequence[DraftTree], duration_ns: int) -> None:
        """Time that the drafter took for ``trees``."""

    def record_accepted(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """The result of ``accepted_path`` for a verified tree."""

    def record_forward(self, num_tokens: int, duration_ns: int) -> None:
        """Time of the target's forward pass."""

    def record_step(self, duration_ns: int) -> None:
        """Time of the whole step for which ``draft_shape`` was called: drafting, forward pass,
        sampling and acceptance."""


class FixedController:
    """Uses the same shape in every step, whatever it costs. For measurements and tests."""

    def __init__(self, shape: DraftShape) -> None:
        self._shape = shape

    def draft_shape(self, batch: BatchState) -> DraftShape | None:
        return self._shape

    @property
    def wants_hidden_states(self) -> bool:
        return True

    def select_drafts(self, trees: Sequence[DraftTree], batch: BatchState) -> list[DraftTree]:
        return [tree.best(self._shape.max_drafts) for tree in trees]

    def record_drafting(self, trees: Sequence[DraftTree], duration_ns: int) -> None:
        pass

    def record_accepted(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        pass

    def record_forward(self, num_tokens: int, duration_ns: int) -> None:
        pass

    def record_step(self, duration_ns: int) -> None:
        pass
