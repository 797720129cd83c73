"""How a tree of drafts grows, depth by depth, from what a head says (EAGLE-2, arXiv 2406.16858).

At each depth the ``width`` likeliest paths of a sequence are followed, and the ``width`` likeliest
tokens after each are candidates; in the end the best ``max_drafts`` of all candidates are the tree.
A width of 1 is a chain, which ends where its path gets too unlikely to be worth a row.

With a random number for each token (``DraftRequest.fractions``) the tokens that the target is
likely to draw by it come first (``draw_odds``). Target and head walk through nearly the same
distribution in the same order, but what lies before a token shifts one against the other, so a
number near the given one is as good a guess. Measured (SmolLM2-135M, temperature 0.7, a reach of
0.2): the first, one of the first two, three, four words are drawn in 0.505, 0.626, 0.686, 0.718 of
all places; where the likeliest come first, in 0.477, 0.602, 0.662, 0.699.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from msgspec import structs

from llm_core.batch import Segment
from llm_core.messages import SamplingParams
from llm_core.sampling import FloatRow, IdRow, candidates
from llm_core.scheduling import DraftTree
from llm_core.speculative.drafters.base import DraftRequest
from llm_core.speculative.heads.base import HeadBatch, HeadResult

OddsRow = npt.NDArray[np.floating]

_ANYHOW = 0.1  # of all draws: those about which the number says nothing


@dataclass(frozen=True, slots=True)
class Nearness:
    """How far a drafter's distribution is from the target's: numbers nearer than ``reach`` draw
    mostly the same from both; temperatures are ``softness`` times as high for it, since it is
    surer of itself than it is right."""

    reach: float
    softness: float


# Fitted to what the bundled head says of a target's own talk at temperature 0.7, three deep.
OF_ANOTHER = Nearness(reach=0.3, softness=1.3)


@dataclass(frozen=True, slots=True)
class DraftPlace:
    """Where the head keeps what it reads of drafts: ``capacity`` positions from ``start`` on, in
    ``block_ids``."""

    block_ids: tuple[int, ...]
    start: int
    capacity: int


def draw_odds(
    row: FloatRow, params: SamplingParams, fraction: float, nearness: Nearness
) -> tuple[IdRow | None, OddsRow]:
    """How likely each token is drawn by a target whose distribution is near that of logits float32
    [vocab], by the rule of ``sampler.sample_token`` and the number ``fraction`` in [0, 1).

    Returns (ids int64 [n] ascending, or None for all; odds float64 [n], their sum 1): the share of
    each in the numbers around the given one, these weighed by exp(-distance / reach), and a little
    of its own likelihood.
    """
    softer = structs.replace(params, temperature=params.temperature * nearness.softness)
    ids, weights = candidates(row, float(row.max()), softer)
    if ids is not None:
        order = np.argsort(ids)
        ids, weights = ids[order], weights[order]
    shares = weights / weights.sum(dtype=np.float64)
    ends = np.concatenate(([0.0], np.cumsum(shares)))
    half = 0.5 * np.exp(-np.abs(ends - fraction) / nearness.reach)
    passed = np.where(ends < fraction, half, 1.0 - half)
    near = np.diff(passed) / (passed[-1] - passed[0])
    return ids, _ANYHOW * shares + (1.0 - _ANYHOW) * near


def likely_words(
    row: torch.Tensor, request: DraftRequest, depth: int, nearness: Nearness
) -> list[tuple[int, float]]:
    """The ``width`` words of ``request`` that follow most likely and their probabilities, the best
    first: ``row`` float32 [vocab] are the logits of the place behind ``depth`` drafts."""
    width = request.shape.width
    logits: FloatRow = row.numpy()
    ids: IdRow | None = None
    if request.fractions:
        ids, odds = draw_odds(logits, request.params, request.fractions[depth], nearness)
    else:
        weights = np.exp(logits - logits.max())
        odds = weights / weights.sum()
    top = np.argpartition(-odds, width - 1)[:width] if width < len(odds) else range(len(odds))
    best = sorted(top, key=lambda at: (-odds[at], at))
    return [(int(at if ids is None else ids[at]), min(1.0, float(odds[at]))) for at in best]


class _Growing:
    """One sequence's candidates, and which of them are followed."""

    def __init__(self, request: DraftRequest, place: DraftPlace, nearness: Nearness) -> None:
        self.request = request
        self._nearness = nearness
        self.place = place
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.probabilities: list[float] = []
        self.paths: list[float] = []
        self.depth = 0
        self.frontier: list[int] = []  # candidates that the head reads next
        self.rows: list[int] = []  # candidates that it has read or reads next, in order
        self.row_parents: list[int] = []  # among rows
        self.states: list[torch.Tensor] = []  # what each row takes: its parent's output
        self._states_of_new: dict[int, torch.Tensor] = {}

    def take(self, logits: torch.Tensor, states: torch.Tensor, target_ids: Sequence[int]) -> None:
        """What the head says after each of the frontier's candidates (at first: after the text)."""
        shape = self.request.shape
        parents = self.frontier or [-1]
        self.depth += 1
        first = len(self.tokens)
        origin: list[int] = []
        for at, (parent, row) in enumerate(zip(parents, logits, strict=True)):
            before = 1.0 if parent < 0 else self.paths[parent]
            for word, probability in likely_words(
                row, self.request, self.depth - 1, self._nearness
            ):
                self.tokens.append(target_ids[word])
                self.parents.append(parent)
                self.probabilities.append(probability)
                self.paths.append(before * probability)
                origin.append(at)
        new = range(first, len(self.tokens))
        least = max(shape.least_probability, shape.least_followed)
        likely = [i for i in new if self.paths[i] >= least]
        best = sorted(likely, key=lambda i: -self.paths[i])[: shape.width]
        self.frontier = sorted(best)
        self._states_of_new = {i: states[origin[i - first]] for i in self.frontier}

    def follow(self) -> bool:
        """Makes rows of the frontier; False when this tree has grown enough."""
        shape = self.request.shape
        is_deep = self.depth >= (shape.max_depth if shape.width > 1 else self._chain_len)
        is_full = len(self.rows) + len(self.frontier) > self.place.capacity
        if is_deep or is_full or not self.frontier:
            return False
        place = {candidate: row for row, candidate in enumerate(self.rows)}
        for candidate in self.frontier:
            self.row_parents.append(place.get(self.parents[candidate], -1))
            self.states.append(self._states_of_new[candidate])
            self.rows.append(candidate)
        return True

    @property
    def _chain_len(self) -> int:
        return min(self.request.shape.max_depth, self.request.shape.max_drafts)

    def tree(self) -> DraftTree:
        """The best of the candidates that are worth a row."""
        shape = self.request.shape
        kept = [i for i, path in enumerate(self.paths) if path >= shape.least_probability]
        whole = DraftTree(tuple(self.tokens), tuple(self.parents), tuple(self.probabilities))
        return whole.subtree(kept).best(shape.max_drafts)


class TreeExpander:
    """Trees of several sequences, a batch of the head's rows for each depth."""

    def __init__(
        self,
        requests: Sequence[DraftRequest],
        result: HeadResult,
        places: Sequence[DraftPlace],
        target_ids: Sequence[int],
        nearness: Nearness = OF_ANOTHER,
    ) -> None:
        """``result``: what the head says after each request's text; ``places``: where its drafts
        are kept; ``target_ids``: the token of each draft word; ``nearness``: see ``draw_odds``."""
        self._target_ids = target_ids
        self._all = [
            _Growing(request, place, nearness)
            for request, place in zip(requests, places, strict=True)
        ]
        self._reading = self._all
        for index, growing in enumerate(self._all):
            one = slice(index, index + 1)
            growing.take(result.logits[one], result.states[one], target_ids)

    def next_batch(self) -> HeadBatch | None:
        """The rows that the head is to read next; None when all trees have grown enough. A tree's
        rows of before are read again: few, and what their cache holds stays one segment."""
        self._reading = [growing for growing in self._reading if growing.follow()]
        if not self._reading:
            return None
        tokens: list[int] = []
        states: list[torch.Tensor] = []
        segments: list[Segment] = []
        outputs: list[int] = []
        for growing in self._reading:
            is_chain = growing.request.shape.width == 1
            first = len(growing.rows) - 1 if is_chain else 0
            rows = growing.rows[first:]
            tokens += [growing.tokens[candidate] for candidate in rows]
            states += growing.states[first:]
            parents = None if is_chain else tuple(growing.row_parents)
            place = growing.place
            segments.append(Segment(place.block_ids, place.start + first, len(rows), parents))
            outputs += range(len(tokens) - len(growing.frontier), len(tokens))
        return HeadBatch(
            token_ids=torch.tensor(tokens),
            states=torch.stack(states),
            is_real=False,
            segments=tuple(segments),
            output_rows=torch.tensor(outputs),
        )

    def take(self, result: HeadResult) -> None:
        """What the head says of the batch."""
        first = 0
        for growing in self._reading:
            last = first + len(growing.frontier)
            growing.take(result.logits[first:last], result.states[first:last], self._target_ids)
            first = last

    def chains_read(self) -> list[list[int]]:
        """The drafts behind each text that were read one after another; [] where a tree was."""
        return [
            [growing.tokens[i] for i in growing.rows] if growing.request.shape.width == 1 else []
            for growing in self._all
        ]

    def trees(self) -> list[DraftTree]:
        """The best of what has grown."""
        return [growing.tree() for growing in self._all]
