"""Block-quantised weights as they lie in a GGUF file, and how to turn them into other forms.

Layouts are those of ggml (ggml-common.h): 32 values a block along the input dimension::

    Q4_0  d:f16            16 bytes   value = (q - 8) * d
    Q4_1  d:f16  m:f16     16 bytes   value = q * d + m
    Q8_0  d:f16            32 int8    value = q * d

In the 4-bit forms byte j holds value j in its low half and value j + 16 in its high half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

BlockKind = Literal["Q4_0", "Q4_1", "Q8_0"]
BLOCK_LEN = 32
BLOCK_BYTES: dict[BlockKind, int] = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """A quantised matrix [N, K]: ``blocks`` is uint8 [N, K / 32, bytes of a block]."""

    kind: BlockKind
    blocks: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K), in values."""
        return self.blocks.shape[0], self.blocks.shape[1] * BLOCK_LEN

    def rows(self, indices: torch.Tensor) -> BlockTensor:
        """The rows ``indices`` (int64 [R])."""
        return BlockTensor(self.kind, self.blocks.index_select(0, indices))

    def scale(self) -> torch.Tensor:
        """float32 [N, K / 32]."""
        return _float16_at(self.blocks, 0)

    def minimum(self) -> torch.Tensor:
        """float32 [N, K / 32]: Q4_1's value of code 0."""
        if self.kind != "Q4_1":
            raise ValueError(f"{self.kind} has no minimum")
        return _float16_at(self.blocks, 2)

    def codes(self) -> torch.Tensor:
        """uint8 [N, K] in 0..15 for the 4-bit kinds, int8 [N, K] for Q8_0."""
        if self.kind == "Q8_0":
            return self.blocks[..., 2:].contiguous().view(torch.int8).flatten(1)
        packed = self.blocks[..., BLOCK_BYTES[self.kind] - BLOCK_LEN // 2 :]
        return torch.cat((packed & 0xF, packed >> 4), -1).flatten(1)

    def dequantize(self) -> torch.Tensor:
        """float32 [N, K], exactly the values that the file means."""
        values = self.codes().view(*self.blocks.shape[:2], BLOCK_LEN).float()
        scale = self.scale().unsqueeze(-1)
        if self.kind == "Q4_0":
            values = values.sub_(8).mul_(scale)
        elif self.kind == "Q4_1":
            values = values.mul_(scale).add_(self.minimum().unsqueeze(-1))
        else:
            values = values.mul_(scale)
        return values.flatten(1)

    def int4(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes int32 [N, K] and scale_zero float32 [K / 32, N, 2], for a 4-bit kind.

        torch's form is (code - 8) * scale + zero, so Q4_0 has zero = 0 and Q4_1 zero = m + 8 d.
        """
        if self.kind == "Q8_0":
            raise ValueError("Q8_0 has no 4-bit form")
        scale = self.scale()
        if self.kind == "Q4_0":
            zero = torch.zeros_like(scale)
        else:
            zero = self.minimum() + 8 * scale
        return self.codes().int(), torch.stack((scale.T, zero.T), -1)


Weight = torch.Tensor | BlockTensor


def to_float(weight: Weight) -> torch.Tensor:
    """The weight's values in float32."""
    return weight.dequantize() if isinstance(weight, BlockTensor) else weight.float()


def float_rows(weight: Weight, indices: torch.Tensor) -> torch.Tensor:
    """float32 [R, K], a fresh tensor: the rows ``indices`` (int64 [R])."""
    if isinstance(weight, BlockTensor):
        return weight.rows(indices).dequantize()
    return weight.index_select(0, indices).float()


def stack_rows(weights: Sequence[Weight]) -> Weight:
    """[N1, K], [N2, K], ... -> [N1 + N2 + ..., K]; stays quantised when all are of one kind."""
    blocks = [weight for weight in weights if isinstance(weight, BlockTensor)]
    if len(blocks) == len(weights) and len({block.kind for block in blocks}) == 1:
        return BlockTensor(blocks[0].kind, torch.cat([block.blocks for block in blocks]))
    return torch.cat([to_float(weight) for weight in weights])


def quantize_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float [N, K] -> codes int8 [N, K], scale [N]: symmetric, nearest; zero stays zero."""
    scale = (weight.abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (weight / scale.unsqueeze(1)).round_().to(torch.int8), scale


def _float16_at(blocks: torch.Tensor, offset: int) -> torch.Tensor:
    """The float16 at byte ``offset`` of each block, as float32 [N, K / 32]."""
    raw = blocks[..., offset : offset + 2].contiguous()
    return raw.view(torch.float16).squeeze(-1).float()
