"""Acceptance: follow the draft tree as long as the target samples one of the drafts.

Candidates are chosen deterministically, so the rejection rule of speculative sampling (Leviathan et
al. 2022, arXiv 2211.17192) becomes: sample y from the target's distribution at a node; if y is one
of the node's children, go there; otherwise y is the last token of this step. y is emitted in either
case, so drafts decide how many tokens a step yields, and never which.
"""

from __future__ import annotations

from collections.abc import Callable

from llm_core.scheduling import DraftTree


def accepted_path(tree: DraftTree, sample: Callable[[int], int | None]) -> list[int]:
    """The accepted rows of a verified segment: 0 (the sequence's last token), then one row for each
    accepted draft (row i + 1 is draft i).

    ``sample(row)`` returns the token after that row, or None when the text ends with it or ended
    before. It is called once for each accepted row, in order; its result is final.
    """
    children = {
        (parent + 1, token_id): draft + 1
        for draft, (parent, token_id) in enumerate(zip(tree.parents, tree.token_ids, strict=True))
    }
    path = [0]
    while (token_id := sample(path[-1])) is not None:
        row = children.get((path[-1], token_id))
        if row is None:
            break
        path.append(row)
    return path
