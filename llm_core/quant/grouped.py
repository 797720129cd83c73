"""Conversion to grouped codes, the common form of all quantised formats, which kernels pack."""

from __future__ import annotations

import torch

from llm_core.quant.codes import Bits, GroupedCodes
from llm_core.quant.formats import BlockTensor, Weight, to_float

__all__ = ["Bits", "GroupedCodes", "quantize_grouped", "to_grouped"]

_SMALLEST_GROUP = 32


def to_grouped(weight: Weight) -> GroupedCodes | None:
    """The same values in grouped form; None if the weight is not quantised, or its groups are not
    multiples of 32 (Q6_K has 16)."""
    if isinstance(weight, GroupedCodes):
        return weight if weight.group % _SMALLEST_GROUP == 0 else None
    if not isinstance(weight, BlockTensor) or weight.kind == "Q6_K":
        return None
    parts = weight.parts()
    bits: Bits = 4 if weight.is_int4 else 8
    return GroupedCodes(parts.codes, parts.scale, parts.zero, bits, parts.group)


def quantize_grouped(weight: Weight, group: int) -> GroupedCodes:
    """Symmetric 8-bit codes, rounded to nearest; K is padded with zeros to whole groups.

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
