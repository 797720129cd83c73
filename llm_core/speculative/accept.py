"""Which drafts are right: down the tree as long as what the target says is among them.

With drafts that are chosen deterministically, the rejection rule of speculative sampling (Leviathan
et al. 2022, arXiv 2211.17192) is: sample y from the target's distribution at a node; if y is one of
its children go there, else y is the last token of this step. Whatever y is, it is said; so drafts
decide how many tokens a step brings, and never which.
"""

from __future__ import annotations

from collections.abc import Callable

from llm_core.scheduling import DraftTree


def accept(tree: DraftTree, sample: Callable[[int], int | None]) -> list[int]:
    """The accepted rows: 0 (the sequence's last token) and then those of drafts that were right.

    ``sample(row)`` says which token follows row ``row`` of the verified segment (row i + 1 is draft
    i), and None when the text is at its end, whether by this token or before it. It is asked once
    for each accepted row, in order: what it says is final.
    """
    children = {
        (parent + 1, token_id): draft + 1
        for draft, (parent, token_id) in enumerate(zip(tree.parents, tree.token_ids, strict=True))
    }
    rows = [0]
    while (token_id := sample(rows[-1])) is not None:
        row = children.get((rows[-1], token_id))
        if row is None:
            break
        rows.append(row)
    return rows
