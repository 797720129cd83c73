"""Conversion of stored weights to the formats of the GPU kernels."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Literal, cast, get_args

import torch

from kernels.gpu import GpuWeight, pack_float8, pack_int4, pack_int8
from llm_core.quant import (
    BlockTensor,
    GroupedCodes,
    Weight,
    quantize_float8,
    quantize_grouped,
    quantize_int8,
    to_float,
    to_grouped,
)

GpuFormat = Literal["auto", "float32", "float16", "bfloat16", "int4", "int8", "fp8"]

FORMATS: tuple[str, ...] = get_args(GpuFormat)
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_GROUPS = (32, 64, 128, 256)


def check_format(name: str) -> GpuFormat:
    """Raises ValueError for an unknown format."""
    if name not in FORMATS:
        raise ValueError(f"weight format {name!r} is not one of GPUs: {', '.join(FORMATS)}")
    return cast(GpuFormat, name)


def compute_dtype(weight_format: GpuFormat, *, is_cuda: bool) -> torch.dtype:
    """Dtype of activations: that of the weights for a float format, else bfloat16, or float32 under
    the interpreter, which is used for comparisons."""
    default = torch.bfloat16 if is_cuda else torch.float32
    return _DTYPES.get(weight_format, default)


def gpu_weight(
    weight: Weight, weight_format: GpuFormat, dtype: torch.dtype, device: torch.device
) -> GpuWeight:
    """A matrix [N, K] in the requested format, on ``device``.

    "auto" keeps stored codes of 4 and 8 bits, requantises Q6_K (groups of 16) to 8 bits in groups
    of 32, and converts all else to ``dtype``. "int4" applies to weights stored in 4 bits only:
    quantising others would lose accuracy that the publisher did not accept. "int8" and "fp8" have
    one scale per row.
    """
    if weight_format == "int8":
        return _on(device, pack_int8(*quantize_int8(to_float(weight))))
    if weight_format == "fp8":
        return _on(device, pack_float8(*quantize_float8(to_float(weight))))
    if weight_format in ("auto", "int4"):
        grouped = _grouped(weight, only_4_bits=weight_format == "int4")
        if grouped is not None and grouped.bits == 4:
            return _on(device, pack_int4(grouped.codes, grouped.scale, grouped.zero, grouped.group))
        if grouped is not None:
            return _on(device, pack_int8(grouped.codes, grouped.scale, grouped.zero, grouped.group))
    # A rank's columns are a strided view; kernels need contiguous rows.
    return to_float(weight).to(device=device, dtype=dtype).contiguous()


def format_name(weight: GpuWeight) -> str:
    """Display name: "int4", "int8", "fp8", or the dtype."""
    if isinstance(weight, torch.Tensor):
        return str(weight.dtype).removeprefix("torch.")
    return {"Int4Weight": "int4", "Int8Weight": "int8", "Float8Weight": "fp8"}[
        type(weight).__name__
    ]


def num_bytes(weight: GpuWeight) -> int:
    """Bytes that one pass over the weight reads."""
    if isinstance(weight, torch.Tensor):
        return weight.numel() * weight.element_size()
    return weight.num_bytes


def _grouped(weight: Weight, *, only_4_bits: bool) -> GroupedCodes | None:
    grouped = to_grouped(weight)
    if grouped is None and isinstance(weight, BlockTensor | GroupedCodes) and not only_4_bits:
        # Groups that kernels do not support; K of such formats is a multiple of 32.
        grouped = quantize_grouped(weight, 32) if weight.shape[1] % 32 == 0 else None
    if grouped is None or grouped.group not in _GROUPS or grouped.shape[1] % grouped.group:
        return None
    return None if only_4_bits and grouped.bits != 4 else grouped


def _on(device: torch.device, weight: GpuWeight) -> GpuWeight:
    if isinstance(weight, torch.Tensor):
        return weight.to(device)
    tensors = {
        field.name: value.to(device)
        for field in fields(weight)
        if isinstance(value := getattr(weight, field.name), torch.Tensor)
    }
    return replace(weight, **tensors)  # type: ignore[arg-type]
