"""Sampling parameters of a batch, as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Tokens more than ln(vocabulary) plus this below the best have a joint probability below 2^-20 and
# are never sampled.
TAIL_DEPTH = 14.0


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """One entry per row of logits, on the device of the logits.

    ``temperature`` float32 (below 1e-5: greedy), ``top_k`` int32 (0: off), ``top_p`` float32 (1:
    off), ``min_p`` float32 (0: off), ``seeds`` int64 (the 64 bits of an unsigned seed) and
    ``positions`` int32 or int64: index in its sequence of the sampled token.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
