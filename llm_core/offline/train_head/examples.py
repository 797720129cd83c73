"""Conversations as what a head learns from: rows of pairs, and the places to draft from.

Row i of a conversation is the pair (features of position i, token i + 1). A row is an *anchor*
where the engine would draft: tokens i + 1 and i + 2 are both of an answer. Step j from anchor i
says token i + 2 + j, and the target's own opinion of it is in its final hidden state at i + 1 + j.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from llm_core.offline.train_head.self_distillation import Conversation


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation of L tokens. ``token_ids`` int64 [L], ``features`` float16 [L - 1, K * H],
    ``anchors`` int64 [A] ascending, ``num_steps`` int64 [A]: how many places further the answer
    goes on from each (at least 1)."""

    token_ids: torch.Tensor
    features: torch.Tensor
    anchors: torch.Tensor
    num_steps: torch.Tensor
    temperature: float


def example_of(conversation: Conversation, width: int | None = None) -> Example:
    """The conversation must have features and an anchor (``has_anchor``); only the last ``width``
    of the features are shown, if it is given."""
    features = conversation.features
    assert features is not None
    if width is not None:
        features = features[:, -width:]
    anchors, num_steps = _anchors(conversation.is_answer)
    return Example(
        torch.tensor(conversation.token_ids),
        features,
        torch.tensor(anchors),
        torch.tensor(num_steps),
        conversation.temperature,
    )


def has_anchor(conversation: Conversation) -> bool:
    """Whether there is something to learn."""
    said = conversation.is_answer
    return any(a and b for a, b in zip(said, said[1:], strict=False))


def _anchors(is_answer: Sequence[bool]) -> tuple[list[int], list[int]]:
    anchors, num_steps = [], []
    run_end = len(is_answer)  # one past the last token of the answer that a token belongs to
    for i in range(len(is_answer) - 3, -1, -1):
        if not is_answer[i + 2]:
            run_end = i + 2
        elif is_answer[i + 1]:
            anchors.append(i)
            num_steps.append(run_end - (i + 2))
    return anchors[::-1], num_steps[::-1]


def batches(examples: Sequence[Example], num_anchors: int, seed: int) -> Iterator[list[Example]]:
    """All examples once, in an order of ``seed``, about ``num_anchors`` anchors at a time."""
    order = list(range(len(examples)))
    random.Random(seed).shuffle(order)
    batch: list[Example] = []
    count = 0
    for index in order:
        batch.append(examples[index])
        count += len(examples[index].anchors)
        if count >= num_anchors:
            yield batch
            batch, count = [], 0
    if batch:
        yield batch


def draft_vocabulary(examples: Sequence[Example], size: int, vocab_size: int) -> torch.Tensor:
    """int64 [size] ascending: the tokens that answers use most; the smallest ids fill it up."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for example in examples:
        said = example.token_ids[example.anchors + 2]
        counts += torch.bincount(said, minlength=vocab_size)
    # Of equal counts the smaller id: stable, and in most vocabularies the commoner word.
    best = torch.sort(counts, descending=True, stable=True).indices[:size]
    return best.sort().values
