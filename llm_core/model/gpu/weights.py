"""Weights as the GPU kernels read them, and the one place that chooses the form of each."""

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
    """Raises ValueError for a name that is no format of this path."""
    if name not in FORMATS:
        raise ValueError(f"weight format {name!r} is not one of GPUs: {', '.join(FORMATS)}")
    return cast(GpuFormat, name)


def compute_dtype(weight_format: GpuFormat, *, is_cuda: bool) -> torch.dtype:
    """What activations are kept in: as the weights if a float format is asked for, else bfloat16;
    float32 where kernels are interpreted, which is for comparing."""
    default = torch.bfloat16 if is_cuda else torch.float32
    return _DTYPES.get(weight_format, default)


def gpu_weight(
    weight: Weight, weight_format: GpuFormat, dtype: torch.dtype, device: torch.device
) -> GpuWeight:
    """A matrix [N, K] in the form asked for, on ``device``.

    "auto" keeps codes of 4 and 8 bits as they are stored, turns Q6_K's groups of 16 into 8 bits of
    groups of 32, and all else into ``dtype``. "int4" runs what is stored in 4 bits so, and nothing
    else: quantising here would lose more than the file's maker agreed to. "int8" and "fp8" have one
    scale a row.
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
    # A rank may hold some columns, a view; kernels read rows one after another.
    return to_float(weight).to(device=device, dtype=dtype).contiguous()


def format_name(weight: GpuWeight) -> str:
    """For people: "int4", "int8", "fp8", or the dtype."""
    if isinstance(weight, torch.Tensor):
        return str(weight.dtype).removeprefix("torch.")
    return {"Int4Weight": "int4", "Int8Weight": "int8", "Float8Weight": "fp8"}[
        type(weight).__name__
    ]


def num_bytes(weight: GpuWeight) -> int:
    """What one pass over the weight reads."""
    if isinstance(weight, torch.Tensor):
        return weight.numel() * weight.element_size()
    return weight.num_bytes


def _grouped(weight: Weight, *, only_4_bits: bool) -> GroupedCodes | None:
    grouped = to_grouped(weight)
    if grouped is None and isinstance(weight, BlockTensor | GroupedCodes) and not only_4_bits:
        # Groups that kernels do not have; K of such formats is a multiple of 32.
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
