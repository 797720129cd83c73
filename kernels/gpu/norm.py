"""RMS norm, alone or together with the addition to the residual stream that precedes it.

A row is read once: at one row a launch costs more than its arithmetic, so the addition, the
post-norm that some models have before it, and the norm are one kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.cost import Cost, num_bytes
from kernels.gpu.launch import power_of_2


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    post_weight_ptr,
    weight_ptr,
    out_ptr,
    size,
    x_stride,
    residual_stride,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_POST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_POST:
        x *= tl.rsqrt(tl.sum(x * x, 0) / size + eps)
        x *= tl.load(post_weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual_at = residual_ptr + row * residual_stride + columns
        x += tl.load(residual_at, mask=mask, other=0.0).to(tl.float32)
        tl.store(residual_at, x.to(residual_ptr.dtype.element_ty), mask=mask)
    x *= tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    x *= tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + columns, x.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See ``ops.GpuOps``."""
    return _launch(x, None, None, weight, eps)


def add_rms_norm_(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    post_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``ops.GpuOps``."""
    return _launch(x, residual, post_weight, weight, eps)


def rms_norm_cost(x: torch.Tensor, *, has_residual: bool) -> Cost:
    """Of ``x`` [T, H]: read and written, and so is the residual. The weight is a row."""
    passes = 4 if has_residual else 2
    row_bytes = x.shape[-1] * x.element_size()
    return Cost(passes * num_bytes(x) + row_bytes, (5 if has_residual else 4) * x.numel())


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    post_weight: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    num_rows, size = x.shape
    assert x.stride(1) == 1 and (residual is None or residual.stride(1) == 1), "rows are dense"
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if num_rows == 0:
        return out
    block = power_of_2(size)
    rms_norm_kernel[(num_rows,)](
        x,
        x if residual is None else residual,
        weight if post_weight is None else post_weight,
        weight,
        out,
        size,
        x.stride(0),
        x.stride(0) if residual is None else residual.stride(0),
        eps,
        HAS_RESIDUAL=residual is not None,
        HAS_POST=post_weight is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return out
