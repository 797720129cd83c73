"""Operations on weights in any stored format."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llm_core.quant.codes import GroupedCodes
from llm_core.quant.gguf_blocks import BLOCK_BYTES, BLOCK_LEN, BlockKind, BlockTensor

__all__ = [
    "BLOCK_BYTES",
    "BLOCK_LEN",
    "BlockKind",
    "BlockTensor",
    "GroupedCodes",
    "Weight",
    "float_rows",
    "quantize_float8",
    "quantize_int8",
    "row_range",
    "stack_rows",
    "take_rows",
    "to_float",
]

Weight = torch.Tensor | BlockTensor | GroupedCodes


def to_float(weight: Weight) -> torch.Tensor:
    """The weight's values in float32."""
    return weight.float() if isinstance(weight, torch.Tensor) else weight.dequantize()


def take_rows(weight: Weight, indices: torch.Tensor) -> Weight:
    """The rows ``indices`` (int64 [R]), in the same format."""
    if isinstance(weight, torch.Tensor):
        return weight.index_select(0, indices)
    return weight.rows(indices)


def row_range(weight: Weight, first: int, last: int) -> Weight:
    """A view of rows [first, last); ``last`` may exceed the number of rows."""
    if isinstance(weight, torch.Tensor):
        return weight[first:last]
    if isinstance(weight, BlockTensor):
        return BlockTensor(weight.kind, weight.blocks[first:last])
    zero = None if weight.zero is None else weight.zero[first:last]
    return GroupedCodes(
        weight.codes[first:last], weight.scale[first:last], zero, weight.bits, weight.group
    )


def float_rows(weight: Weight, indices: torch.Tensor) -> torch.Tensor:
    """The rows ``indices`` (int64 [R]) as a new float32 tensor [R, K]."""
    return to_float(take_rows(weight, indices))


def stack_rows(weights: Sequence[Weight]) -> Weight:
    """[N1, K], [N2, K], ... -> [N1 + N2 + ..., K]; stays quantised if all have the same format."""
    if len(weights) == 1:
        return weights[0]
    blocks = [weight for weight in weights if isinstance(weight, BlockTensor)]
    if len(blocks) == len(weights) and len({block.kind for block in blocks}) == 1:
        return BlockTensor(blocks[0].kind, torch.cat([block.blocks for block in blocks]))
    grouped = [weight for weight in weights if isinstance(weight, GroupedCodes)]
    if len(grouped) == len(weights) and len({(g.bits, g.group) for g in grouped}) == 1:
        return _stack_grouped(grouped)
    return torch.cat([to_float(weight) for weight in weights])


def _stack_grouped(weights: Sequence[GroupedCodes]) -> GroupedCodes:
    zero = None
    if any(weight.zero is not None for weight in weights):
        zeros = [torch.zeros_like(w.scale) if w.zero is None else w.zero for w in weights]
        zero = torch.cat(zeros)
    codes = torch.cat([weight.codes for weight in weights])
    scale = torch.cat([weight.scale for weight in weights])
    return GroupedCodes(codes, scale, zero, weights[0].bits, weights[0].group)


def quantize_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float [N, K] -> codes int8 [N, K], scale [N]: symmetric, round to nearest."""
    scale = (weight.abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (weight / scale.unsqueeze(1)).round_().to(torch.int8), scale


def quantize_float8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float [N, K] -> codes float8_e4m3fn [N, K], scale [N]: a row's maximum maps to 448."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    scale = (weight.abs().amax(1) / largest).clamp_min(torch.finfo(torch.float32).tiny)
    return (weight / scale.unsqueeze(1)).to(torch.float8_e4m3fn), scale
