"""What choosing the next tokens of a batch needs besides the logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """One entry a row of logits, all on the logits' device.

    ``temperature`` float32 (below 1e-5: greedy), ``top_k`` int32 (0: off), ``top_p`` float32 (1:
    off), ``min_p`` float32 (0: off), ``seeds`` int64 (the 64 bits of an unsigned seed) and
    ``positions`` int32 or int64: the index in its sequence of the token that is chosen.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
