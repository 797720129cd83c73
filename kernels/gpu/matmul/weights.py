"""Layouts of quantised weights for the GPU kernels, and packing into them, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# An INT4 span is four quarters of at least 16 inputs, the depth of a tensor-core step.
_MIN_SPAN = 64


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A matrix [num_out, num_in] of 4-bit codes: value = code * scale + zero.

    ``packed`` int16 [num_spans, num_out, span / 4]: the inputs are cut into spans of
    max(64, group), and word j of a span holds, from its lowest bits up, input j of each of the
    span's four quarters. So the words of consecutive outputs are contiguous, they are laid out in
    registers like the 16-bit operands of a tensor core, and no value has to be moved after
    unpacking.
    ``scale`` and ``zero`` (None: 0) [num_spans * span / group, num_out], float32, bfloat16 or
    float16. Inputs beyond num_in have scale and zero 0.
    """

    packed: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    group: int
    num_in: int

    @property
    def num_out(self) -> int:
        return self.packed.shape[1]

    @property
    def span(self) -> int:
        return 4 * self.packed.shape[2]

    @property
    def num_bytes(self) -> int:
        """Bytes that one pass over the weight reads."""
        return _num_bytes(self.packed, self.scale, self.zero)


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A matrix [num_out, num_in]: value = code * scale + zero.

    ``codes`` int8 [num_out, num_in]; ``scale`` and ``zero`` (None: 0) [num_groups, num_out], of
    each ``group`` neighbours along the inputs; one group where ``group`` is None.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    group: int | None

    @property
    def num_out(self) -> int:
        return self.codes.shape[0]

    @property
    def num_in(self) -> int:
        return self.codes.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes that one pass over the weight reads."""
        return _num_bytes(self.codes, self.scale, self.zero)


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """A matrix [num_out, num_in]: codes float8_e4m3fn times ``scale`` float32 [num_out]."""

    codes: torch.Tensor
    scale: torch.Tensor

    @property
    def num_out(self) -> int:
        return self.codes.shape[0]

    @property
    def num_in(self) -> int:
        return self.codes.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes that one pass over the weight reads."""
        return _num_bytes(self.codes, self.scale, None)


# A plain tensor [N, K] is float32, bfloat16 or float16.
GpuWeight = torch.Tensor | Int4Weight | Int8Weight | Float8Weight


def weight_shape(weight: GpuWeight) -> tuple[int, int]:
    """(num_out, num_in)."""
    if isinstance(weight, torch.Tensor):
        return weight.shape[0], weight.shape[1]
    return weight.num_out, weight.num_in


def pack_int4(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    group: int,
    scale_dtype: torch.dtype = torch.float16,
) -> Int4Weight:
    """codes uint8 [N, K] in 0..15; scale and zero [N, K / group] as ``llm_core``'s GroupedCodes.

    ``scale_dtype`` float16 becomes float32 where a scale or zero would overflow or fall below
    float16's normal range (other than to 0). Raises ValueError for a group that is not a power of
    two from 32 to 256, or does not divide K.
    """
    _check_group(group, codes.shape[1])
    num_out, num_in = codes.shape
    span = max(_MIN_SPAN, group)
    num_spans = -(-num_in // span)
    padded = torch.nn.functional.pad(codes, (0, num_spans * span - num_in))
    quarters = padded.view(num_out, num_spans, 4, span // 4).transpose(0, 1)
    # Little-endian, as on all machines with a GPU.
    pairs = [quarters[:, :, n] | quarters[:, :, n + 1] << 4 for n in (0, 2)]
    packed = torch.stack(pairs, -1).view(torch.int16).squeeze(-1)
    pad = (0, num_spans * span // group - scale.shape[1])
    parts = [torch.nn.functional.pad(p, pad) for p in ((scale,) if zero is None else (scale, zero))]
    dtype = scale_dtype
    if dtype == torch.float16 and not all(_fits_float16(part) for part in parts):
        dtype = torch.float32
    kept = [part.T.to(dtype).contiguous() for part in parts]
    return Int4Weight(packed, kept[0], None if zero is None else kept[1], group, num_in)


def pack_int8(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    group: int | None = None,
) -> Int8Weight:
    """codes int8 or uint8 [N, K]; scale (and zero) [N] without a group, else [N, K / group].

    Unsigned codes are shifted down by 128, and their zero points up. Raises ValueError for a group
    that is not a power of two from 32 to 256, or does not divide K.
    """
    if group is not None:
        _check_group(group, codes.shape[1])
    scale = scale.float().reshape(codes.shape[0], -1)
    zero = None if zero is None else zero.float().reshape(codes.shape[0], -1)
    if codes.dtype == torch.uint8:
        codes = (codes.to(torch.int16) - 128).to(torch.int8)
        zero = 128 * scale if zero is None else zero + 128 * scale
    kept_zero = None if zero is None else zero.T.contiguous()
    return Int8Weight(codes.contiguous(), scale.T.contiguous(), kept_zero, group)


def pack_float8(codes: torch.Tensor, scale: torch.Tensor) -> Float8Weight:
    """codes float8_e4m3fn [N, K], scale [N]."""
    return Float8Weight(codes.contiguous(), scale.float().contiguous())


def dequantize(weight: GpuWeight) -> torch.Tensor:
    """The dequantised weight, float32 [N, K]."""
    if isinstance(weight, torch.Tensor):
        return weight.float()
    if isinstance(weight, Float8Weight):
        return weight.codes.float() * weight.scale.unsqueeze(1)
    if isinstance(weight, Int8Weight):
        return _grouped(weight.codes, weight.scale, weight.zero, weight.group or weight.num_in)
    num_spans, num_out, _ = weight.packed.shape
    # [spans, N, 4, span / 4]
    quarters = torch.stack([weight.packed >> bits & 0xF for bits in (0, 4, 8, 12)], 2)
    codes = quarters.transpose(0, 1).reshape(num_out, num_spans * weight.span)
    return _grouped(codes, weight.scale, weight.zero, weight.group)[:, : weight.num_in]


def _grouped(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, group: int
) -> torch.Tensor:
    values = codes.float() * scale.float().T.repeat_interleave(group, 1)
    return values if zero is None else values + zero.float().T.repeat_interleave(group, 1)


def _check_group(group: int, num_in: int) -> None:
    if group not in (32, 64, 128, 256) or num_in % group:
        raise ValueError(
            f"group is {group} of {num_in} inputs, expected 32, 64, 128 or 256, dividing them"
        )


def _fits_float16(values: torch.Tensor) -> bool:
    magnitudes = values.abs()
    limits = torch.finfo(torch.float16)
    is_small = (magnitudes > 0) & (magnitudes < limits.smallest_normal)
    return bool((magnitudes <= limits.max).all()) and not bool(is_small.any())


def _num_bytes(*tensors: torch.Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
