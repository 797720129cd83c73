"""Trees of drafts, and which of them are accepted."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_core.scheduling.draft_tree import EMPTY, DraftTree
from llm_core.speculative.accept import accepted_path


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """Few tokens, so that equal ones stand under different parents."""
    pairs: list[tuple[int, int]] = []
    for i in range(draw(st.integers(0, 14))):
        pair = (draw(st.integers(-1, i - 1)), draw(st.integers(0, 4)))
        pairs.append(pair if pair not in pairs else (i - 1, 0))
    probabilities = draw(
        st.lists(st.sampled_from([0.0, 0.2, 0.5, 1.0]), min_size=len(pairs), max_size=len(pairs))
    )
    parents, token_ids = tuple(p for p, _ in pairs), tuple(t for _, t in pairs)
    tree = DraftTree(token_ids, parents, tuple(probabilities))
    tree.check()
    return tree


def path_to(tree: DraftTree, draft: int) -> list[int]:
    tokens = []
    while draft >= 0:
        tokens.insert(0, tree.token_ids[draft])
        draft = tree.parents[draft]
    return tokens


@given(trees(), st.lists(st.integers(0, 4), min_size=16, max_size=16), st.integers(0, 16))
def test_accepted_is_the_longest_path_that_the_target_says(
    tree: DraftTree, text: list[int], end: int
) -> None:
    """The target says ``text``, whatever is drafted, and may stop after ``end`` tokens."""
    asked: list[int] = []

    def sample(row: int) -> int | None:
        asked.append(row)
        return text[len(asked) - 1] if len(asked) <= end else None

    rows = accepted_path(tree, sample)
    assert asked == rows, "each accepted row is asked once"
    paths = [path_to(tree, draft) for draft in range(len(tree))]
    longest = max((len(p) for p in paths if p == text[: len(p)] and len(p) <= end), default=0)
    assert len(rows) == longest + 1
    if longest:
        assert path_to(tree, rows[-1] - 1) == text[:longest]
    for row, following in pairwise(rows):
        assert tree.row_parents[following] == row, "each follows the one before"


@given(trees(), st.integers(0, 14))
def test_best_keeps_the_likeliest_and_their_parents(tree: DraftTree, count: int) -> None:
    best = tree.best(count)
    best.check()
    assert len(best) == min(count, len(tree))
    paths = tree.path_probabilities
    assert sorted(best.path_probabilities) == pytest.approx(
        sorted(sorted(paths)[-len(best) :] if len(best) else [])
    )
    everything = {(tuple(path_to(tree, i)), tree.probabilities[i]) for i in range(len(tree))}
    assert all(
        (tuple(path_to(best, i)), best.probabilities[i]) in everything for i in range(len(best))
    )


def test_chain() -> None:
    chain = DraftTree.chain([5, 6, 7], [0.5, 0.5, 1.0])
    assert chain.parents == (-1, 0, 1) and chain.row_parents == (-1, 0, 1, 2)
    assert chain.path_probabilities == [0.5, 0.25, 0.25]
    assert chain.best(2) == DraftTree.chain([5, 6], [0.5, 0.5])
    assert accepted_path(EMPTY, lambda row: 3) == [0]
