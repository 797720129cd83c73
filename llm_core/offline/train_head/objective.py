"""The training loss of a head, and the accepted lengths that its drafts would reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from llm_core.offline.train_head.examples import Example
from llm_core.offline.train_head.training_time_test import StepOutput

_STEP_DECAY = 0.8  # EAGLE-3: later steps weigh less, since fewer drafts reach them
_FEATURE_SHARE = 1.0  # EAGLE-1: SmoothL1 of the features, and a tenth of the cross-entropy
_TOKEN_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Objective:
    """``lm_head`` float32 [V, H]: the target's output head for the draft vocabulary ``target_ids``
    int64 [V]; ``vocab_size`` is the target's. ``regresses_features``: the head's output is also
    trained towards the target's hidden state (EAGLE-1)."""

    lm_head: torch.Tensor
    target_ids: torch.Tensor
    vocab_size: int
    regresses_features: bool = False

    def draft_index(self) -> torch.Tensor:
        """int64 [vocab_size]: the draft token of each token of the target, or -1."""
        index = torch.full((self.vocab_size,), -1)
        index[self.target_ids] = torch.arange(len(self.target_ids))
        return index

    def loss(
        self, step: int, output: StepOutput, logits: torch.Tensor, index: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(weighted loss of a step, bool [A]: the most likely draft is the label). ``logits``
        [A, V] are the head's; ``index`` is ``draft_index()``."""
        labels = index[output.labels]
        is_known = labels >= 0
        with torch.no_grad():
            target = functional.linear(output.final_hidden, self.lm_head).float().softmax(-1)
        # Where the draft vocabulary lacks the label, no draft can be accepted: no loss there.
        each = -(target * logits.log_softmax(-1)).sum(-1)
        loss = (each * is_known).sum() / is_known.sum().clamp_min(1)
        if self.regresses_features:
            distance = functional.smooth_l1_loss(output.output, output.final_hidden)
            loss = _FEATURE_SHARE * distance + _TOKEN_SHARE * loss
        return _STEP_DECAY**step * loss, logits.detach().argmax(-1) == labels


def accepted_lengths(
    batch: Sequence[Example], matches: Sequence[tuple[torch.Tensor, torch.Tensor]], depth: int
) -> tuple[int, int]:
    """(tokens, decoding steps) if every answer of ``batch`` were decoded with chains of ``depth``.

    ``matches[j]``: (``StepOutput.anchor_index``, is_accepted) of step j run with a share of 1.0.
    The result is exact: a chain goes on only where its drafts equal the text.
    """
    num_anchors = sum(len(example.anchors) for example in batch)
    accepted = torch.zeros(num_anchors, depth, dtype=torch.bool)
    for step, (anchor_index, is_accepted) in enumerate(matches[:depth]):
        accepted[anchor_index, step] = is_accepted
    lengths = 1 + accepted.long().cumprod(1).sum(1)
    tokens = num_steps = first = 0
    for example in batch:
        count = len(example.anchors)
        index_of = {int(position): i for i, position in enumerate(example.anchors)}
        example_lengths = lengths[first : first + count].tolist()
        i = 0
        while i < count:
            num_steps += 1
            tokens += example_lengths[i]
            position = int(example.anchors[i]) + example_lengths[i]
            # Beyond the end of an answer decoding goes on at the first anchor of the next one.
            next_index = index_of.get(position)
            if next_index is None:
                next_index = int(torch.searchsorted(example.anchors, position))
            i = next_index
        first += count
    return tokens, num_steps
