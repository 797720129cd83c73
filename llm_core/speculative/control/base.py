"""Whether to draft in a step, and which drafts are worth verifying: what a controller is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from llm_core.scheduling import DraftTree
from llm_core.speculative.drafters.base import DraftShape


@dataclass(frozen=True, slots=True)
class BatchState:
    """A step before drafts: ``num_rows`` in all, ``num_streams`` of them the one row of a sequence
    that generates. ``is_patient``: none of these is needed soon."""

    num_streams: int
    num_rows: int
    is_patient: bool = False


class Controller(Protocol):
    """Asked before and after drafting, told afterwards what came of it."""

    def shape(self, situation: BatchState) -> DraftShape | None:
        """How far to draft for each stream; None: not in this step."""

    @property
    def listens(self) -> bool:
        """Whether hidden states that the target computes now may soon be drafted from."""

    def choose(self, trees: Sequence[DraftTree], situation: BatchState) -> list[DraftTree]:
        """What of the trees, one a stream, is to be verified."""

    def drafted(self, trees: Sequence[DraftTree], duration_ns: int) -> None:
        """How long a drafter took for these."""

    def verified(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """What ``accept`` gave for a tree."""

    def stepped(self, num_rows: int, duration_ns: int) -> None:
        """How long the target took for a step."""

    def finished(self, duration_ns: int) -> None:
        """How long all of a step took for which ``shape`` was asked: drafting, the target, drawing
        and accepting."""


class FixedController:
    """The same shape in every step, whatever it costs. For measurements and tests."""

    def __init__(self, shape: DraftShape) -> None:
        self._shape = shape

    def shape(self, situation: BatchState) -> DraftShape | None:
        return self._shape

    @property
    def listens(self) -> bool:
        return True

    def choose(self, trees: Sequence[DraftTree], situation: BatchState) -> list[DraftTree]:
        return [tree.best(self._shape.max_drafts) for tree in trees]

    def drafted(self, trees: Sequence[DraftTree], duration_ns: int) -> None:
        pass

    def verified(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        pass

    def stepped(self, num_rows: int, duration_ns: int) -> None:
        pass

    def finished(self, duration_ns: int) -> None:
        pass
