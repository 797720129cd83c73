"""RMS norm, optionally fused with the preceding addition to the residual stream.

At one row a launch costs more than the arithmetic, so one kernel sums the parts of a split product,
applies the optional post-norm, adds the residual and normalises, reading each row once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.cost import Cost, num_bytes
from kernels.gpu.launch import dependent, power_of_2, wait_for_inputs


@triton.jit(do_not_specialize=["num_parts"])
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    post_weight_ptr,
    weight_ptr,
    out_ptr,
    size,
    x_stride,
    part_stride,
    num_parts,
    residual_stride,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_POST: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    # Loaded early: it is no longer cached, as all other weights were read since the last step.
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    wait_for_inputs(EARLY)
    x_at = x_ptr + row * x_stride + columns
    x = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(x_at + part * part_stride, mask=mask & (part < num_parts), other=0.0)
    if HAS_POST:
        x *= tl.rsqrt(tl.sum(x * x, 0) / size + eps)
        x *= tl.load(post_weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual_at = residual_ptr + row * residual_stride + columns
        x += tl.load(residual_at, mask=mask, other=0.0).to(tl.float32)
        tl.store(residual_at, x.to(residual_ptr.dtype.element_ty), mask=mask)
    x *= tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    x *= weight.to(tl.float32)
    tl.store(out_ptr + row * size + columns, x.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """See ``ops.GpuOps``."""
    return _launch(x, None, None, weight, eps, out_dtype or x.dtype)


def add_rms_norm_(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    post_weight: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See ``ops.GpuOps``."""
    return _launch(x, residual, post_weight, weight, eps, out_dtype or x.dtype)


def rms_norm_cost(x: torch.Tensor, *, has_residual: bool) -> Cost:
    """Reads and writes x [T, H] and the residual once, and reads the weight [H]."""
    passes = 4 if has_residual else 2
    row_bytes = x.shape[-1] * x.element_size()
    return Cost(passes * num_bytes(x) + row_bytes, (5 if has_residual else 4) * x.numel())


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    post_weight: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    num_rows, size = x.shape[-2:]
    assert x.stride(-1) == 1 and (residual is None or residual.stride(1) == 1), "rows are dense"
    num_parts = x.shape[0] if x.dim() == 3 else 1
    assert num_parts == 1 or x.dtype == torch.float32, "parts are float32"
    out = torch.empty(num_rows, size, dtype=out_dtype, device=x.device)
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
        x.stride(-2),
        x.stride(0),
        num_parts,
        x.stride(-2) if residual is None else residual.stride(0),
        eps,
        HAS_RESIDUAL=residual is not None,
        HAS_POST=post_weight is not None,
        PARTS=power_of_2(num_parts),  # fewer compiled variants
        BLOCK=block,
        num_warps=min(16, max(1, block // 256)),
        **dependent(x.device),
    )
    return out
