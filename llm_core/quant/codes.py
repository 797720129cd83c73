"""Integer codes with a scale, and optionally a zero point, per group of inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Bits = Literal[4, 8]


@dataclass(frozen=True, slots=True)
class GroupedCodes:
    """A matrix [N, K]: value = code * scale + zero, with a scale per ``group`` inputs along K.

    ``codes`` [N, K] is uint8 in 0..15 (``bits`` 4), uint8 or int8 (``bits`` 8); ``scale`` and
    ``zero`` are float32 [N, K / group], ``zero`` None: all 0.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    bits: Bits
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
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
        values *= self.scale.unsqueeze(-1)
        if self.zero is not None:
            values += self.zero.unsqueeze(-1)
        return values.flatten(1)
