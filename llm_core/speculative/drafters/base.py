"""The interface of a drafter: proposes token trees, and observes what the target computes.

A drafter is notified of everything that happens to a sequence's KV cache, so that it can keep a
cache of its own in step: tokens computed, blocks copied, tokens dropped, the sequence closed.
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
    """Limits on the tree that is drafted for one sequence.

    ``max_drafts`` tokens in all, at most ``max_depth`` in a path; ``width`` paths are expanded at
    each depth (1: a chain). ``siblings``: further candidates at each depth of a chain that are
    proposed but not expanded, by drafters that get them at no cost. Drafts whose path is less
    likely than ``min_path_probability`` are not proposed; those whose path is less likely than
    ``min_expand_probability`` may be proposed but are not expanded.
    """

    max_drafts: int
    max_depth: int
    width: int = 1
    min_path_probability: float = 0.0
    min_expand_probability: float = 0.0
    siblings: int = 0


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A sequence whose tokens are all computed but the last one.

    ``params`` are the request's. ``uniforms[k]`` in [0, 1) is the random number with which the
    target will draw the k-th token from here; () for greedy decoding. A drafter whose distribution
    is close to the target's finds that token more often with the number than by taking the most
    likely one.
    """

    sequence: TokenSequence
    shape: DraftShape
    params: SamplingParams
    uniforms: tuple[float, ...] = ()


class ComputedTokens(msgspec.Struct):
    """Positions [start, start + length) of ``sequence`` that the target computed and that are
    final; ``sequence.token_ids`` may be one token longer.

    ``features`` float32 [T, K * hidden_size] are those of the whole step and ``rows``, ascending,
    the rows of these positions. Slicing them for each sequence would cost 1% of a step with 16
    sequences, for a drafter that mostly just keeps them. ``features`` is None where the drafter
    needs none or the controller does not want them (``Controller.wants_hidden_states``).
    """

    sequence: TokenSequence
    start: int
    rows: Sequence[int]
    features: torch.Tensor | None = None

    @property
    def length(self) -> int:
        return len(self.rows)


def select_rows(features: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """features [T, F] -> [len(rows), F] of ascending ``rows``; a view where they are
    consecutive."""
    first, count = rows[0], len(rows)
    if rows[-1] == first + count - 1:
        return features if count == len(features) else features[first : first + count]
    return features[list(rows)]


class Drafter(Protocol):
    """Called by one thread. Sequences are identified by their ``seq_id``."""

    @property
    def name(self) -> str: ...

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The target's layers whose hidden states ``observe_computed`` needs; () for none."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """A tree for each request, possibly empty."""

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Repeats copies of KV blocks; called at the start of a step, before ``propose``."""

    def observe_computed(self, computed: Sequence[ComputedTokens]) -> None:
        """Takes note of the tokens that a step computed."""

    def truncate_sequence(self, sequence: TokenSequence, length: int) -> None:
        """Forgets all but the first ``length`` tokens of a sequence."""

    def close_sequence(self, sequence: TokenSequence) -> None:
        """Forgets a sequence, which still has its blocks. Unknown ones are ignored."""
