"""What every drafter is: proposes trees, and watches what the target computes.

A drafter is told everything that happens to a sequence's KV, so that one with a KV cache of its own
can keep it in step: rows that were computed, rows that were copied between blocks, tokens that were
taken back, the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch

from llm_core.messages import SamplingParams
from llm_core.scheduling import BlockCopy, DraftTree, TokenSequence


@dataclass(frozen=True, slots=True)
class DraftShape:
    """How far a drafter goes for one sequence.

    ``max_drafts`` tokens in all, ``max_depth`` one after another; ``width``: how many are followed
    at each depth (1: a chain). ``siblings``: further words at each depth of a chain that are
    proposed but not followed, by drafters that have them at hand. A draft is not worth its row when
    its path is less likely than ``least_probability``; whoever has nothing better proposes nothing.
    What would follow a draft whose path is less likely than ``least_followed`` is not worth the
    time of drafting it.
    """

    max_drafts: int
    max_depth: int
    width: int = 1
    least_probability: float = 0.0
    least_followed: float = 0.0
    siblings: int = 0


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A sequence whose tokens are all computed but the last one.

    ``params`` are the request's. ``fractions[k]`` in [0, 1) is the random number with which the
    target will draw the k-th token from here, () where nothing is drawn: a drafter whose
    distribution is near the target's finds the same token with it more often than by taking the
    likeliest.
    """

    sequence: TokenSequence
    shape: DraftShape
    params: SamplingParams
    fractions: tuple[float, ...] = ()


class ComputedRows(msgspec.Struct):
    """Positions [start, start + length) of ``sequence`` were computed by the target and are final;
    what follows them is in ``sequence.token_ids``, which may be one token longer.

    ``features`` float32 [T, K * hidden_size] are the whole step's, and ``rows`` these positions'
    own, ascending. Cutting them out for every stream would cost a hundredth of a step with 16 of
    them, for a drafter that mostly keeps them for later. None where the drafter asked for none, or
    drafts rest (``Controller.listens``).
    """

    sequence: TokenSequence
    start: int
    rows: Sequence[int]
    features: torch.Tensor | None = None

    @property
    def length(self) -> int:
        return len(self.rows)


def cut_out(features: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Some rows of a step's features: a view where they follow one another."""
    first, count = rows[0], len(rows)
    if rows[-1] == first + count - 1:
        return features if count == len(features) else features[first : first + count]
    return features[list(rows)]


class Drafter(Protocol):
    """Called by one thread. Sequences are known by their ``seq_id``."""

    @property
    def name(self) -> str: ...

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The target's hidden states that ``observe`` needs; () for none."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """A tree for each request, empty where nothing is worth a row."""

    def copied(self, copies: Sequence[BlockCopy]) -> None:
        """Blocks that are copied at the beginning of a step, before drafts are asked for."""

    def observe(self, rows: Sequence[ComputedRows]) -> None:
        """What a step computed."""

    def truncate(self, sequence: TokenSequence, length: int) -> None:
        """Only the first ``length`` tokens of a sequence stay as they were."""

    def close(self, sequence: TokenSequence) -> None:
        """The sequence is over; unknown ones are fine."""
