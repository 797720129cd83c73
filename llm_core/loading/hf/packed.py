"""Packed integer weights of GPTQ, AWQ and compressed-tensors checkpoints -> exact grouped codes.

All pack 32 / bits codes into an int32, the first in the lowest bits; they differ in the packed
dimension, in the order within a word, and in the encoding of zero points. K is the input dimension,
N the output dimension, G the number of groups along K.
"""

from __future__ import annotations

import math

import torch

from llm_core.quant import Bits, GroupedCodes

# The AWQ "gemm" layout: the i-th nibble of a word is column _AWQ_ORDER[i] of its eight.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack(words: torch.Tensor, bits: Bits) -> torch.Tensor:
    """int32 [A, B] -> uint8 [A, B, 32 / bits], lowest bits first."""
    octets = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    if bits == 8:
        return octets
    return torch.stack((octets & 0xF, octets >> 4), -1).flatten(-2)


def from_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    group_index: torch.Tensor | None,
    *,
    bits: Bits,
    group: int,
    zeros_are_less_one: bool,
) -> GroupedCodes | torch.Tensor:
    """qweight int32 [K * bits / 32, N], qzeros int32 [G, N * bits / 32], scales [G, N].

    ``group_index`` int32 [K]: group of each input if they are not in order (act-order); such a
    matrix has no grouped form and is returned as float32 [N, K]. ``group`` inputs share a scale, in
    the last group possibly fewer. ``zeros_are_less_one``: version 1 of the format stores zero
    points minus one (modulo 2^bits).
    Frantar et al. 2023; layout of AutoGPTQ.
    """
    codes = unpack(qweight, bits).permute(1, 0, 2).flatten(1)  # [N, K]
    zeros = unpack(qzeros, bits).flatten(1).T  # [N, G]
    if zeros_are_less_one:
        zeros = zeros + 1 & (1 << bits) - 1
    return _grouped(codes, scales.T, zeros, group_index, bits, group)


def from_awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> GroupedCodes:
    """qweight int32 [K, N / 8], qzeros int32 [G, N / 8], scales [G, N], all of 4 bits.

    Lin et al. 2023; the "gemm" layout of AutoAWQ.
    """
    inverse = torch.tensor(_AWQ_ORDER).argsort()
    codes, zeros = (unpack(words, 4)[..., inverse].flatten(1).T for words in (qweight, qzeros))
    group = codes.shape[1] // scales.shape[0]
    grouped = _grouped(codes, scales.T, zeros, None, 4, group)
    assert isinstance(grouped, GroupedCodes), "groups in order have a grouped form"
    return grouped


def from_compressed(
    packed: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    group_index: torch.Tensor | None,
    *,
    bits: Bits,
    num_in: int,
) -> GroupedCodes | torch.Tensor:
    """packed int32 [N, K * bits / 32 rounded up], scale [N, G], zero_point int32 [N * bits / 32
    rounded up, G] or None (symmetric). Codes and zero points are signed, stored plus 2^(bits - 1).
    """
    codes = unpack(packed, bits).flatten(1)[:, :num_in]
    if zero_point is None:
        zeros = torch.full(scale.shape, 1 << bits - 1, dtype=torch.uint8)
    else:
        zeros = unpack(zero_point.T, bits).flatten(1)[:, : scale.shape[0]].T
    group = num_in // scale.shape[1]
    if bits == 8 and zero_point is None and group_index is None:
        return from_int8((codes ^ 0x80).view(torch.int8), scale, None)
    return _grouped(codes, scale, zeros, group_index, bits, group)


def from_int8(
    codes: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None
) -> GroupedCodes:
    """codes int8 [N, K], scale [N, G], zero_point int8 [N, G] or None."""
    scale = scale.float().contiguous()
    zero = None if zero_point is None else -zero_point.float() * scale
    return GroupedCodes(codes, scale, zero, 8, codes.shape[1] // scale.shape[1])


def _grouped(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zeros: torch.Tensor,
    group_index: torch.Tensor | None,
    bits: Bits,
    group: int,
) -> GroupedCodes | torch.Tensor:
    """value = (code - zero) * scale; codes uint8 [N, K], scale and zeros (0..2^bits) [N, G]."""
    num_in = codes.shape[1]
    scale = scale.float().contiguous()
    in_order = torch.arange(num_in) // group
    if group_index is not None and not torch.equal(group_index.long(), in_order):
        index = group_index.long()
        values = codes.float().sub_(zeros.float().index_select(1, index))
        return values.mul_(scale.index_select(1, index))
    if num_in % group != 0:  # smaller groups that divide K represent it exactly
        small = math.gcd(num_in, group)
        index = torch.arange(0, num_in, small) // group
        scale, zeros, group = scale[:, index], zeros[:, index], small
    zero = -zeros.float() * scale
    codes = codes.contiguous()
    if bits == 8:
        codes = (codes ^ 0x80).view(torch.int8)  # 0..255 -> -128..127
        zero += 128 * scale
    return GroupedCodes(codes, scale, zero, bits, group)
