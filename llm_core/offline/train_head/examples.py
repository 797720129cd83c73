"""Training examples: conversations as pairs of features and next tokens, and anchors to draft from.

Row i of a conversation is the pair (features of position i, token i + 1). A row is an *anchor* if
the engine would draft there: tokens i + 1 and i + 2 belong to the same answer. Step j from anchor i
predicts token i + 2 + j; the target's own prediction of it is its final hidden state at i + 1 + j.
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
    ``anchors`` int64 [A] ascending, ``num_steps`` int64 [A]: steps from each anchor to the end of
    its answer (at least 1)."""

    token_ids: torch.Tensor
    features: torch.Tensor
    anchors: torch.Tensor
    num_steps: torch.Tensor
    temperature: float


def example_of(conversation: Conversation, width: int | None = None) -> Example:
    """An example of a conversation that has features and an anchor (``has_anchor``). ``width``:
    only the last columns of the features, as many."""
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
    """True if the conversation has an answer of at least two tokens."""
    is_answer = conversation.is_answer
    return any(a and b for a, b in zip(is_answer, is_answer[1:], strict=False))


def _anchors(is_answer: Sequence[bool]) -> tuple[list[int], list[int]]:
    anchors, num_steps = [], []
    answer_end = len(is_answer)  # of the answer at hand, exclusive
    for i in range(len(is_answer) - 3, -1, -1):
        if not is_answer[i + 2]:
            answer_end = i + 2
        elif is_answer[i + 1]:
            anchors.append(i)
            num_steps.append(answer_end - (i + 2))
    return anchors[::-1], num_steps[::-1]


def batches(examples: Sequence[Example], num_anchors: int, seed: int) -> Iterator[list[Example]]:
    """All examples once, in random order, in batches of about ``num_anchors`` anchors."""
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
    """int64 [size] ascending: the most frequent tokens of answers, filled up with the smallest
    ids."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for example in examples:
        labels = example.token_ids[example.anchors + 2]
        counts += torch.bincount(labels, minlength=vocab_size)
    # Stable: of equal counts the smaller id, in most vocabularies the more frequent token.
    best = torch.sort(counts, descending=True, stable=True).indices[:size]
    return best.sort().values
