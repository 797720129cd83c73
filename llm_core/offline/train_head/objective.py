"""What a head is trained for, and how often its drafts would be right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from llm_core.offline.train_head.examples import Example
from llm_core.offline.train_head.training_time_test import StepOutput

_STEP_DECAY = 0.8  # EAGLE-3: later steps matter less, fewer drafts get there
_FEATURE_SHARE = 1.0  # EAGLE-1: SmoothL1 of the features, with the words at a tenth
_WORD_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Objective:
    """``words`` float32 [V, H]: the target's output head for the draft words ``target_ids``
    int64 [V]; ``vocab_size`` is the target's. ``regresses_features``: the head's output is also to
    be the target's hidden state (EAGLE-1)."""

    words: torch.Tensor
    target_ids: torch.Tensor
    vocab_size: int
    regresses_features: bool = False

    def draft_index(self) -> torch.Tensor:
        """int64 [vocab_size]: the draft word that each token of the target is, or -1."""
        index = torch.full((self.vocab_size,), -1)
        index[self.target_ids] = torch.arange(len(self.target_ids))
        return index

    def loss(
        self, step: int, output: StepOutput, logits: torch.Tensor, index: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(weighted loss of a step, bool [A]: the likeliest draft is what was said). ``logits``
        [A, V] are the head's; ``index`` is ``draft_index()``."""
        said = index[output.words]
        is_known = said >= 0
        with torch.no_grad():
            wanted = functional.linear(output.final_hidden, self.words).float()
            wanted = wanted.softmax(-1)
        # Where the draft vocabulary lacks the word, nothing right can be drafted.
        each = -(wanted * logits.log_softmax(-1)).sum(-1)
        loss = (each * is_known).sum() / is_known.sum().clamp_min(1)
        if self.regresses_features:
            distance = functional.smooth_l1_loss(output.output, output.final_hidden)
            loss = _FEATURE_SHARE * distance + _WORD_SHARE * loss
        return _STEP_DECAY**step * loss, logits.detach().argmax(-1) == said


def accepted_lengths(
    batch: Sequence[Example], matches: Sequence[tuple[torch.Tensor, torch.Tensor]], depth: int
) -> tuple[int, int]:
    """(tokens said, rounds) if every answer of ``batch`` were written with chains of ``depth``.

    ``matches[j]``: (rows, is_right) of step j, as ``StepOutput.rows`` with the share 1.0: exact,
    since a chain goes on only where its drafts were what was said.
    """
    num_anchors = sum(len(example.anchors) for example in batch)
    right = torch.zeros(num_anchors, depth, dtype=torch.bool)
    for step, (rows, is_right) in enumerate(matches[:depth]):
        right[rows, step] = is_right
    lengths = 1 + right.long().cumprod(1).sum(1)
    tokens = rounds = first = 0
    for example in batch:
        count = len(example.anchors)
        places = {int(place): row for row, place in enumerate(example.anchors)}
        taken = lengths[first : first + count].tolist()
        row = 0
        while row < count:
            rounds += 1
            tokens += taken[row]
            place = int(example.anchors[row]) + taken[row]
            # Beyond the end of an answer: the next one starts with its own first anchor.
            row = places[place] if place in places else _next_row(example.anchors, place)
        first += count
    return tokens, rounds


def _next_row(anchors: torch.Tensor, place: int) -> int:
    return int(torch.searchsorted(anchors, place))
