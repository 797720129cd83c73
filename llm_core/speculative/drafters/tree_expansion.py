"""Dynamic draft trees, expanded depth by depth from a head's probabilities (EAGLE-2, arXiv
2406.16858).

At each depth the ``width`` most likely paths of a sequence are expanded with the ``width`` most
likely next tokens; in the end the best ``max_drafts`` of all candidates are the tree. With a width
of 1 it is a chain, which ends where its path becomes too unlikely.

When the target samples, ``DraftRequest.uniforms`` holds the random number of each position, and
candidates are ranked by the probability that the target draws them with it (``proposal_probs``).
Target and head invert nearly the same cumulative distribution, but differences in tokens with
smaller ids shift one against the other, so numbers near the given one are considered too. Measured
(SmolLM2-135M, temperature 0.7, bandwidth 0.2): the drawn token is the first, or among the first
two, three, four candidates in 0.505, 0.626, 0.686, 0.718 of all positions; ranked by likelihood
alone, in 0.477, 0.602, 0.662, 0.699.
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

ProbabilityRow = npt.NDArray[np.floating]

_INDEPENDENT_SHARE = 0.1  # of draws in which the random number says nothing about the token


@dataclass(frozen=True, slots=True)
class DrawCoupling:
    """How closely draws from a drafter's distribution follow the target's with the same random
    number: numbers within about ``bandwidth`` draw mostly the same tokens from both. The drafter's
    temperature is multiplied by ``temperature_scale``, because it is overconfident."""

    bandwidth: float
    temperature_scale: float


# Fitted by log-likelihood to the bundled head on the target's own conversations at temperature 0.7,
# to a depth of 3.
HEAD_COUPLING = DrawCoupling(bandwidth=0.3, temperature_scale=1.3)


@dataclass(frozen=True, slots=True)
class ScratchSlots:
    """KV slots for drafts: ``capacity`` positions from ``start`` on, in ``block_ids``."""

    block_ids: tuple[int, ...]
    start: int
    capacity: int


def proposal_probs(
    row: FloatRow, params: SamplingParams, uniform: float, coupling: DrawCoupling
) -> tuple[IdRow | None, ProbabilityRow]:
    """The probability that the target draws each token with the random number ``uniform`` in
    [0, 1), for a drafter's logits ``row`` float32 [vocab] and the rule of ``sampler.sample_token``.

    Returns (ids int64 [n] ascending, or None for all; probabilities float64 [n], which sum to 1):
    each token's share of the interval around ``uniform``, weighted by exp(-distance / bandwidth),
    mixed with a tenth of its plain probability.
    """
    softer = structs.replace(params, temperature=params.temperature * coupling.temperature_scale)
    ids, weights = candidates(row, float(row.max()), softer)
    if ids is not None:
        order = np.argsort(ids)
        ids, weights = ids[order], weights[order]
    shares = weights / weights.sum(dtype=np.float64)
    ends = np.concatenate(([0.0], np.cumsum(shares)))
    half = 0.5 * np.exp(-np.abs(ends - uniform) / coupling.bandwidth)
    passed = np.where(ends < uniform, half, 1.0 - half)
    near = np.diff(passed) / (passed[-1] - passed[0])
    return ids, _INDEPENDENT_SHARE * shares + (1.0 - _INDEPENDENT_SHARE) * near


def top_candidates(
    row: torch.Tensor, request: DraftRequest, depth: int, coupling: DrawCoupling
) -> list[tuple[int, float]]:
    """(draft vocabulary index, probability) of the ``width`` most likely next tokens, best first.
    ``row`` float32 [draft vocabulary] are the logits after ``depth`` drafts."""
    width = request.shape.width
    logits: FloatRow = row.numpy()
    ids: IdRow | None = None
    if request.uniforms:
        ids, probs = proposal_probs(logits, request.params, request.uniforms[depth], coupling)
    else:
        weights = np.exp(logits - logits.max())
        probs = weights / weights.sum()
    top = np.argpartition(-probs, width - 1)[:width] if width < len(probs) else range(len(probs))
    best = sorted(top, key=lambda at: (-probs[at], at))
    return [(int(at if ids is None else ids[at]), min(1.0, float(probs[at]))) for at in best]


class _GrowingTree:
    """The candidates for one sequence, and which of them are expanded."""

    def __init__(self, request: DraftRequest, slots: ScratchSlots, coupling: DrawCoupling) -> None:
        self.request = request
        self.slots = slots
        self._coupling = coupling
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.probabilities: list[float] = []
        self.paths: list[float] = []  # probabilities of whole paths
        self.depth = 0
        self.frontier: list[int] = []  # candidates to be expanded next
        self.expanded: list[int] = []  # candidates that are or will be in the head's KV, in order
        self.expanded_parents: list[int] = []  # indices into ``expanded``
        self.states: list[torch.Tensor] = []  # input state of each expanded candidate
        self._frontier_states: dict[int, torch.Tensor] = {}

    def add_candidates(
        self, logits: torch.Tensor, states: torch.Tensor, target_ids: Sequence[int]
    ) -> None:
        """Adds the children of the frontier (at first: of the text) and chooses the next
        frontier."""
        shape = self.request.shape
        parents = self.frontier or [-1]
        self.depth += 1
        first = len(self.tokens)
        origin: list[int] = []
        for at, (parent, row) in enumerate(zip(parents, logits, strict=True)):
            before = 1.0 if parent < 0 else self.paths[parent]
            for draft_id, probability in top_candidates(
                row, self.request, self.depth - 1, self._coupling
            ):
                self.tokens.append(target_ids[draft_id])
                self.parents.append(parent)
                self.probabilities.append(probability)
                self.paths.append(before * probability)
                origin.append(at)
        new = range(first, len(self.tokens))
        minimum = max(shape.min_path_probability, shape.min_expand_probability)
        likely = [i for i in new if self.paths[i] >= minimum]
        best = sorted(likely, key=lambda i: -self.paths[i])[: shape.width]
        self.frontier = sorted(best)
        self._frontier_states = {i: states[origin[i - first]] for i in self.frontier}

    def expand_frontier(self) -> bool:
        """Marks the frontier as expanded; False when this tree is complete."""
        shape = self.request.shape
        is_deep = self.depth >= (shape.max_depth if shape.width > 1 else self._max_chain_len)
        is_full = len(self.expanded) + len(self.frontier) > self.slots.capacity
        if is_deep or is_full or not self.frontier:
            return False
        position = {candidate: at for at, candidate in enumerate(self.expanded)}
        for candidate in self.frontier:
            self.expanded_parents.append(position.get(self.parents[candidate], -1))
            self.states.append(self._frontier_states[candidate])
            self.expanded.append(candidate)
        return True

    @property
    def _max_chain_len(self) -> int:
        return min(self.request.shape.max_depth, self.request.shape.max_drafts)

    def best_tree(self) -> DraftTree:
        """The best candidates within the limits of the shape."""
        shape = self.request.shape
        kept = [i for i, path in enumerate(self.paths) if path >= shape.min_path_probability]
        whole = DraftTree(tuple(self.tokens), tuple(self.parents), tuple(self.probabilities))
        return whole.subtree(kept).best(shape.max_drafts)


class TreeExpander:
    """Expands the trees of several sequences together, one batch of the head for each depth."""

    def __init__(
        self,
        requests: Sequence[DraftRequest],
        result: HeadResult,
        slots: Sequence[ScratchSlots],
        target_ids: Sequence[int],
        coupling: DrawCoupling = HEAD_COUPLING,
    ) -> None:
        """``result``: the head's output after each request's text; ``slots``: KV slots for the
        drafts of each; ``target_ids``: token of the target by draft vocabulary index."""
        self._target_ids = target_ids
        self._trees = [
            _GrowingTree(request, scratch, coupling)
            for request, scratch in zip(requests, slots, strict=True)
        ]
        self._open_trees = self._trees
        for index, tree in enumerate(self._trees):
            one = slice(index, index + 1)
            tree.add_candidates(result.logits[one], result.states[one], target_ids)

    def next_batch(self) -> HeadBatch | None:
        """The tokens that the head computes next; None when all trees are complete. Earlier tokens
        of a tree are computed again: they are few, and so the tree stays one segment."""
        self._open_trees = [tree for tree in self._open_trees if tree.expand_frontier()]
        if not self._open_trees:
            return None
        tokens: list[int] = []
        states: list[torch.Tensor] = []
        segments: list[Segment] = []
        output_rows: list[int] = []
        for tree in self._open_trees:
            is_chain = tree.request.shape.width == 1
            first = len(tree.expanded) - 1 if is_chain else 0
            new = tree.expanded[first:]
            tokens += [tree.tokens[candidate] for candidate in new]
            states += tree.states[first:]
            parents = None if is_chain else tuple(tree.expanded_parents)
            slots = tree.slots
            segments.append(Segment(slots.block_ids, slots.start + first, len(new), parents))
            output_rows += range(len(tokens) - len(tree.frontier), len(tokens))
        return HeadBatch(
            token_ids=torch.tensor(tokens),
            states=torch.stack(states),
            from_target=False,
            segments=tuple(segments),
            output_rows=torch.tensor(output_rows),
        )

    def add_candidates(self, result: HeadResult) -> None:
        """Adds the head's output for the last ``next_batch``."""
        first = 0
        for tree in self._open_trees:
            last = first + len(tree.frontier)
            tree.add_candidates(
                result.logits[first:last], result.states[first:last], self._target_ids
            )
            first = last

    def expanded_chains(self) -> list[list[int]]:
        """For each request the drafts whose KV now follow the text's; [] where it was a tree."""
        return [
            [tree.tokens[i] for i in tree.expanded] if tree.request.shape.width == 1 else []
            for tree in self._trees
        ]

    def best_trees(self) -> list[DraftTree]:
        """The tree for each request."""
        return [tree.best_tree() for tree in self._trees]
