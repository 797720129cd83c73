"""Quantised weights in the one form that the fast kernels take: codes, and a scale a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from llm_core.quant.blocks import BlockTensor


@dataclass(frozen=True, slots=True)
class GroupedCodes:
    """A matrix [N, K]: value = code * scale + zero, exactly.

    ``codes`` uint8 [N, K] in 0..15 (``bits`` 4) or int8 [N, K] (``bits`` 8), one a byte; ``scale``
    and ``zero`` (None: 0) float32 [N, K / group]; ``group`` values of a row share them.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    bits: Literal[4, 8]
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K), in values."""
        return self.codes.shape[0], self.codes.shape[1]

    def rows(self, indices: torch.Tensor) -> GroupedCodes:
        """The rows ``indices`` (int64 [R])."""
        zero = None if self.zero is None else self.zero.index_select(0, indices)
        scale = self.scale.index_select(0, indices)
        return GroupedCodes(self.codes.index_select(0, indices), scale, zero, self.bits, self.group)

    def dequantize(self) -> torch.Tensor:
        """float32 [N, K]."""
        num_out, num_in = self.shape
        values = self.codes.view(num_out, num_in // self.group, self.group).float()
        values.mul_(self.scale.unsqueeze(-1))
        if self.zero is not None:
            values.add_(self.zero.unsqueeze(-1))
        return values.flatten(1)


def to_grouped(weight: torch.Tensor | BlockTensor | GroupedCodes) -> GroupedCodes | None:
    """The same values as grouped codes; None when there are none that are exact and whose groups
    are multiples of 32 (plain floats, Q6_K with its groups of 16)."""
    if isinstance(weight, GroupedCodes):
        return weight
    if not isinstance(weight, BlockTensor) or weight.kind == "Q6_K":
        return None
    parts = weight.parts()
    if weight.is_int4:
        return GroupedCodes(parts.codes, parts.scale, parts.zero, 4, parts.group)
    return GroupedCodes(parts.codes.view(torch.int8), parts.scale, parts.zero, 8, parts.group)
