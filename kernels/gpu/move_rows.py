"""Compaction of the keys and values of accepted drafts, in all layers at once.

Each program handles one head of one layer and one sequence, and reads all rows of that sequence
before it writes any, as a row's target may be another row's source.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.cost import Cost
from kernels.gpu.launch import power_of_2


@triton.jit(
    do_not_specialize=["num_entries"],
    do_not_specialize_on_alignment=["sources_ptr", "targets_ptr"],
)
def move_rows_kernel(
    data_ptr,
    scales_ptr,
    sources_ptr,
    targets_ptr,
    num_entries,
    num_heads,
    layer_stride,
    head_stride,
    position_stride,
    scales_layer_stride,
    scales_head_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ENTRIES: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    layer = (tl.program_id(0) // num_heads).to(tl.int64)
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    sequence = tl.program_id(1)
    entry = tl.arange(0, ENTRIES)
    is_entry = entry < num_entries
    source = tl.load(sources_ptr + sequence * num_entries + entry, mask=is_entry, other=-1)
    target = tl.load(targets_ptr + sequence * num_entries + entry, mask=is_entry, other=0)
    is_kept = source >= 0
    d = tl.arange(0, BLOCK_D)
    mask = is_kept[:, None] & (d < HEAD_DIM)[None, :]
    base = data_ptr + layer * layer_stride + head * head_stride + d[None, :]
    rows = tl.load(base + source[:, None] * position_stride, mask=mask)
    scales_at = scales_ptr + layer * scales_layer_stride + head * scales_head_stride
    if HAS_SCALES:
        scale = tl.load(scales_at + source, mask=is_kept)
    # Another thread may still have to read the row that this one overwrites.
    tl.debug_barrier()
    tl.store(base + target[:, None] * position_stride, rows, mask=mask)
    if HAS_SCALES:
        tl.store(scales_at + target, scale, mask=is_kept)


def move_rows(
    data: torch.Tensor, scales: torch.Tensor | None, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """See ``ops.GpuOps``."""
    num_sequences, num_entries = sources.shape
    if sources.numel() == 0:
        return
    assert sources.is_contiguous() and targets.is_contiguous() and data.stride(3) == 1, "dense"
    num_layers, num_heads, _, head_dim = data.shape
    # Moves bits of any dtype.
    raw = data.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[data.itemsize])
    move_rows_kernel[(num_layers * num_heads, num_sequences)](
        raw,
        raw if scales is None else scales,
        sources,
        targets,
        num_entries,
        num_heads,
        data.stride(0),
        data.stride(1),
        data.stride(2),
        0 if scales is None else scales.stride(0),
        0 if scales is None else scales.stride(1),
        HEAD_DIM=head_dim,
        BLOCK_D=power_of_2(head_dim),
        ENTRIES=power_of_2(num_entries),
        HAS_SCALES=scales is not None,
    )


def move_rows_cost(data: torch.Tensor, scales: torch.Tensor | None, num_moved: int) -> Cost:
    """Reads and writes each moved position once in all layers and heads."""
    num_layers, num_heads, _, head_dim = data.shape
    per_head = head_dim * data.element_size() + (0 if scales is None else scales.element_size())
    return Cost(2 * num_moved * num_layers * num_heads * per_head, 0)
