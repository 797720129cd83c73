"""Integer codes with a scale, and perhaps a zero point, for each group of inputs.

The common form of all stored formats that are a few bits a weight: kernels are packed from it, and
each stored kind needs only to say here what its codes, scales and zeros are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from llm_core.quant.formats import BLOCK_LEN, BlockTensor, Weight, to_float

Bits = Literal[4, 8]


@dataclass(frozen=True, slots=True)
class GroupedCodes:
    """A matrix [N, K]: value = code * scale + zero, of each ``group`` neighbours along K.

    ``codes`` [N, K] is uint8 in 0..15 (``bits`` 4), uint8 or int8 (``bits`` 8); ``scale`` and
    ``zero`` are float32 [N, K / group], ``zero`` None where it is 0 throughout.
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

    def dequantize(self) -> torch.Tensor:
        """float32 [N, K]."""
        num_out, num_in = self.shape
        values = self.codes.view(num_out, num_in // self.group, self.group).float()
        values *= self.scale.unsqueeze(-1)
        if self.zero is not None:
            values += self.zero.unsqueeze(-1)
        return values.flatten(1)


def to_grouped(weight: Weight) -> GroupedCodes | None:
    """The same values in grouped form, or None where the weight is not stored so."""
    if not isinstance(weight, BlockTensor):
        return None
    codes, scale = weight.codes(), weight.scale()
    if weight.kind == "Q8_0":
        return GroupedCodes(codes, scale, None, 8, BLOCK_LEN)
    zero = -8 * scale if weight.kind == "Q4_0" else weight.minimum()
    return GroupedCodes(codes, scale, zero, 4, BLOCK_LEN)


def quantize_grouped(weight: Weight, group: int) -> GroupedCodes:
    """8-bit codes, symmetric, nearest; the last group may be of the rest: K is padded with zeros.

    Raises ValueError for values that are not finite.
    """
    values = to_float(weight)
    num_out, num_in = values.shape
    padded_len = -(-num_in // group) * group
    values = torch.nn.functional.pad(values, (0, padded_len - num_in)).view(num_out, -1, group)
    scale = values.abs().amax(-1) / 127
    if not bool(scale.isfinite().all()):
        raise ValueError("weight has values that are not finite")
    inverse = torch.where(scale > 0, 1 / scale, 0).nan_to_num(posinf=0.0)
    codes = (values * inverse.unsqueeze(-1)).round_().to(torch.int8).flatten(1)
    return GroupedCodes(codes, scale, None, 8, group)
