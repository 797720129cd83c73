"""Block-quantised weights of GGUF files, and their layouts.

Layouts are those of ggml (ggml-common.h), blocks along the input dimension; d and m are float16::

    Q4_0  d    16 bytes of nibbles                    32 values   (q - 8) * d
    Q4_1  d m  16 bytes of nibbles                    32 values   q * d + m
    Q5_0  d    4 bytes of high bits, 16 of nibbles    32 values   (q - 16) * d
    Q5_1  d m  4 bytes of high bits, 16 of nibbles    32 values   q * d + m
    Q8_0  d    32 int8                                32 values   q * d
    Q4_K  d m  12 bytes of scales, 128 of nibbles    256 values   q * (d * s) - m * t
    Q5_K  d m  12 of scales, 32 of high bits, 128    256 values   q * (d * s) - m * t
    Q6_K  128 low, 64 high, 16 int8 scales, d        256 values   (q - 32) * (d * s)

s and t are 6-bit numbers per 32 values; Q6_K has an int8 scale per 16. In blocks of 32 values byte
j holds value j in its low nibble and value j + 16 in its high nibble; in Q4_K and Q5_K each 32
bytes hold 32 values in their low nibbles and the next 32 in their high nibbles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

BlockKind = Literal["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
BLOCK_LEN = 32  # of the non-K kinds; see ``block_len``
BLOCK_BYTES: dict[BlockKind, int] = {
    "Q4_0": 18,
    "Q4_1": 20,
    "Q5_0": 22,
    "Q5_1": 24,
    "Q8_0": 34,
    "Q4_K": 144,
    "Q5_K": 176,
    "Q6_K": 210,
}
_NIBBLE_KINDS = ("Q4_0", "Q4_1", "Q4_K")


def block_len(kind: BlockKind) -> int:
    """Values in a block."""
    return 256 if kind.endswith("_K") else BLOCK_LEN


@dataclass(frozen=True, slots=True)
class BlockParts:
    """value [n, k] = codes[n, k] * scale[n, k // group] + zero[n, k // group].

    ``codes`` uint8 or int8 [N, K]; ``scale`` and ``zero`` (None: 0) float32 [N, K / group].
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    group: int


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """A quantised matrix [N, K]: ``blocks`` is uint8 [N, K / block_len, bytes of a block]."""

    kind: BlockKind
    blocks: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K), in values."""
        return self.blocks.shape[0], self.blocks.shape[1] * block_len(self.kind)

    @property
    def is_int4(self) -> bool:
        """Do codes have 4 bits (0..15)? Otherwise up to 8."""
        return self.kind in _NIBBLE_KINDS

    def rows(self, indices: torch.Tensor) -> BlockTensor:
        """The rows ``indices`` (int64 [R])."""
        return BlockTensor(self.kind, self.blocks.index_select(0, indices))

    def scales_are_finite(self) -> bool:
        """Are all stored scales finite?"""
        places = {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}.get(self.kind, (0, 2))
        return all(bool(_float16_at(self.blocks, at).isfinite().all()) for at in places)

    def dequantize(self) -> torch.Tensor:
        """float32 [N, K], exactly as the format defines it."""
        parts = self.parts()
        num_out, num_in = self.shape
        values = parts.codes.view(num_out, num_in // parts.group, parts.group).float()
        if self.kind in ("Q4_0", "Q5_0"):
            # (q - 8) * d, as the format is defined: q * d - 8 * d can differ for a huge d.
            values.sub_(8 if self.kind == "Q4_0" else 16)
            return values.mul_(parts.scale.unsqueeze(-1)).flatten(1)
        values.mul_(parts.scale.unsqueeze(-1))
        if parts.zero is not None:
            values.add_(parts.zero.unsqueeze(-1))
        return values.flatten(1)

    def parts(self) -> BlockParts:
        """Codes, scales and zeros, exactly as the format defines them."""
        blocks = self.blocks
        if self.kind == "Q8_0":
            codes = blocks[..., 2:].contiguous().view(torch.int8).flatten(1)
            return BlockParts(codes, _float16_at(blocks, 0), None, BLOCK_LEN)
        if self.kind == "Q6_K":
            return _q6_k(blocks)
        if self.kind in ("Q4_K", "Q5_K"):
            return _q4_or_q5_k(blocks, has_high_bits=self.kind == "Q5_K")
        scale = _float16_at(blocks, 0)
        packed = blocks[..., -BLOCK_LEN // 2 :]
        codes = torch.cat((packed & 0xF, packed >> 4), -1)
        if self.kind in ("Q5_0", "Q5_1"):
            at = BLOCK_BYTES[self.kind] - 20
            codes |= _bits(blocks[..., at : at + 4]) << 4
        if self.kind in ("Q4_0", "Q5_0"):
            zero = -(8 if self.kind == "Q4_0" else 16) * scale
        else:
            zero = _float16_at(blocks, 2)
        return BlockParts(codes.flatten(1), scale, zero, BLOCK_LEN)


def _q4_or_q5_k(blocks: torch.Tensor, *, has_high_bits: bool) -> BlockParts:
    scales, mins = _six_bit_pairs(blocks[..., 4:16])
    num_rows, num_blocks, _ = blocks.shape
    packed = blocks[..., -128:].reshape(num_rows, num_blocks, 4, 1, 32)
    codes = torch.cat((packed & 0xF, packed >> 4), -2)  # [N, blocks, 4, 2, 32]
    if has_high_bits:
        shifts = torch.arange(8, dtype=torch.uint8).view(4, 2, 1)
        codes |= (blocks[..., 16:48].reshape(num_rows, num_blocks, 1, 1, 32) >> shifts & 1) << 4
    scale = _float16_at(blocks, 0).unsqueeze(-1) * scales
    zero = -(_float16_at(blocks, 2).unsqueeze(-1) * mins)
    return BlockParts(codes.flatten(1), scale.flatten(1), zero.flatten(1), 32)


def _six_bit_pairs(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [N, B, 12] -> scales and minima, 0..63, uint8 [N, B, 8] each.

    The first four of each are the low six bits of bytes 0..3 and 4..7. The last four have their low
    nibbles in bytes 8..11 and their top two bits in the top bits of bytes 0..7.
    """
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((low & 63, (high & 0xF) | (low >> 6 << 4)), -1)
    mins = torch.cat((middle & 63, (high >> 4) | (middle >> 6 << 4)), -1)
    return scales, mins


def _q6_k(blocks: torch.Tensor) -> BlockParts:
    num_rows, num_blocks, _ = blocks.shape
    low = blocks[..., :128].reshape(num_rows, num_blocks, 2, 1, 2, 32)  # half, 1, which, 32
    nibbles = torch.cat((low & 0xF, low >> 4), -3).flatten(-3, -2)  # half, 4, 32
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).view(1, 4, 1)
    high = blocks[..., 128:192].reshape(num_rows, num_blocks, 2, 1, 32) >> shifts & 3
    codes = (nibbles | high << 4).view(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    scale = _float16_at(blocks, 208).unsqueeze(-1) * scales
    return BlockParts(codes.flatten(1), scale.flatten(1), None, 16)


def _bits(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 4] -> uint8 [..., 32] of 0 and 1, lowest bit first."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (packed.unsqueeze(-1) >> shifts & 1).flatten(-2)


def _float16_at(blocks: torch.Tensor, offset: int) -> torch.Tensor:
    """The float16 at byte ``offset`` of each block, as float32 [N, blocks]."""
    raw = blocks[..., offset : offset + 2].contiguous()
    return raw.view(torch.float16).squeeze(-1).float()
