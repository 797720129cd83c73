"""Gated activation of the feed-forward network: silu(gate) * up, or gelu(gate) * up (tanh)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.cost import Cost
from kernels.gpu.launch import cdiv, dependent, wait_for_inputs
from kernels.gpu.ops import GateName

_BLOCK = 1024


@triton.jit
def activated(gate, IS_GELU: tl.constexpr):
    """silu(gate), or its gelu."""
    argument = gate
    if IS_GELU:
        # (1 + tanh(z)) / 2 = sigmoid(2 z), z = sqrt(2 / pi) * (gate + 0.044715 * gate^3)
        argument = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    # Clamped, as the exponential inside would overflow.
    return gate * tl.sigmoid(tl.maximum(argument, -80.0))


@triton.jit
def gated_kernel(gate_up_ptr, out_ptr, size, IS_GELU: tl.constexpr, BLOCK: tl.constexpr,
                 EARLY: tl.constexpr):  # fmt: skip
    wait_for_inputs(EARLY)
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gate_at = gate_up_ptr + row * 2 * size + columns
    gate = tl.load(gate_at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_at + size, mask=mask, other=0.0).to(tl.float32)
    result = activated(gate, IS_GELU) * up
    tl.store(out_ptr + row * size + columns, result.to(out_ptr.dtype.element_ty), mask=mask)


def gated(gate_up: torch.Tensor, gate: GateName = "silu") -> torch.Tensor:
    """See ``ops.GpuOps``."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous(), "gate_up is dense"
    out = gate_up.new_empty(num_rows, size)
    if num_rows:
        # The second axis is limited to 65535, more rows than a step has.
        grid = (cdiv(size, _BLOCK), num_rows)
        is_gelu = gate == "gelu_tanh"
        early = dependent(gate_up.device)
        gated_kernel[grid](gate_up, out, size, IS_GELU=is_gelu, BLOCK=_BLOCK, **early)
    return out


def gated_cost(gate_up: torch.Tensor) -> Cost:
    """Reads gate_up [T, 2 * I] once and writes half as much."""
    return Cost(gate_up.numel() * 3 // 2 * gate_up.element_size(), 4 * gate_up.numel())
