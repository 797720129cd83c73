"""Matrix products with weights of all formats; chooses the kernel."""

from __future__ import annotations

import torch

from kernels.gpu.cost import Cost
from kernels.gpu.matmul.few_rows import (
    MAX_ROWS,
    gated_few_rows,
    matmul_few_rows,
    parts_of_few_rows,
)
from kernels.gpu.matmul.gated import gated
from kernels.gpu.matmul.many_rows import matmul_many_rows
from kernels.gpu.matmul.weights import GpuWeight, weight_shape
from kernels.gpu.ops import GateName


def matmul(
    x: torch.Tensor,
    weight: GpuWeight,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See ``ops.GpuOps``."""
    num_rows, num_out = x.shape[0], weight_shape(weight)[0]
    _check(x, weight)
    if isinstance(weight, torch.Tensor) and num_rows > MAX_ROWS:
        # cuBLAS rounds to the dtype of its inputs; a wider result only converts that.
        plain_bias = None if bias is None else bias.to(x.dtype)
        product = torch.nn.functional.linear(x, weight.to(x.dtype), plain_bias)
        return product.to(out_dtype or x.dtype)
    out = torch.empty(num_rows, num_out, dtype=out_dtype or x.dtype, device=x.device)
    if num_rows == 0:
        return out
    if isinstance(weight, torch.Tensor) or num_rows <= MAX_ROWS:
        matmul_few_rows(x, weight, bias, out)
    else:
        matmul_many_rows(x, weight, bias, out)
    return out


def matmul_parts(x: torch.Tensor, weight: GpuWeight) -> torch.Tensor:
    """See ``ops.GpuOps``."""
    if 0 < x.shape[0] <= MAX_ROWS:
        _check(x, weight)
        return parts_of_few_rows(x, weight)
    return matmul(x, weight).unsqueeze(0)


def matmul_gated(x: torch.Tensor, weight: GpuWeight, gate: GateName = "silu") -> torch.Tensor:
    """See ``ops.GpuOps``."""
    if 0 < x.shape[0] <= MAX_ROWS:
        _check(x, weight)
        return gated_few_rows(x, weight, gate)
    return gated(matmul(x, weight), gate)


def _check(x: torch.Tensor, weight: GpuWeight) -> None:
    num_in = weight_shape(weight)[1]
    if x.shape[1] != num_in:
        raise ValueError(f"x has {x.shape[1]} inputs, the weight {num_in}")
    assert x.stride(1) == 1, "rows are dense"


def matmul_cost(x: torch.Tensor, weight: GpuWeight, out: torch.Tensor) -> Cost:
    """Reads the weight and x once and writes out once; 2 T N K operations."""
    if isinstance(weight, torch.Tensor):
        weight_bytes = weight.numel() * weight.element_size()
    else:
        weight_bytes = weight.num_bytes
    moved = x.numel() * x.element_size() + out.numel() * out.element_size()
    num_out, num_in = weight_shape(weight)
    return Cost(weight_bytes + moved, 2 * x.shape[0] * num_out * num_in)
