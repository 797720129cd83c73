"""Reference implementation of ``ops.GpuOps`` in plain torch, one sequence at a time.

Tests and benchmarks compare the kernels with it. Arithmetic is float32 (float64 for float64 input);
results are rounded once, to the dtype of the kernel's output. It runs on any device and is slow.
"""

from __future__ import annotations

import torch

from kernels import reference
from kernels.gpu.attention.pages import MAX_CODES, KvPages
from kernels.gpu.matmul.weights import GpuWeight, dequantize
from kernels.gpu.ops import GateName
from kernels.gpu.sampling.oracle import sample

__all__ = [
    "add_rms_norm_",
    "ancestor_bits",
    "decode_attention",
    "embed",
    "gated",
    "matmul",
    "matmul_gated",
    "matmul_parts",
    "move_rows",
    "prefill_attention",
    "rms_norm",
    "rope_store",
    "sample",
    "tree_attention",
]

_TINY = torch.finfo(torch.float32).tiny


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """See ``GpuOps``."""
    return reference.rms_norm(_wide(x), _wide(weight), eps).to(out_dtype or x.dtype)


def add_rms_norm_(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    post_weight: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See ``GpuOps``."""
    added = _sum(x)
    if post_weight is not None:
        added = reference.rms_norm(added, _wide(post_weight), eps)
    total = _wide(residual) + added
    residual.copy_(total)
    return reference.rms_norm(total, _wide(weight), eps).to(out_dtype or x.dtype)


def rope_store(
    qkv: torch.Tensor,
    rotations: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    pages: KvPages,
    *,
    num_heads: int,
    bias: torch.Tensor | None = None,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See ``GpuOps``."""
    num_kv_heads = pages.num_kv_heads
    values = _sum(qkv) if bias is None else _sum(qkv) + _wide(bias)
    heads = values.view(qkv.shape[-2], num_heads + 2 * num_kv_heads, pages.head_dim).clone()
    query, key = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
    value = heads[:, num_heads + num_kv_heads :]
    if query_norm is not None:
        query = reference.rms_norm(query, _wide(query_norm), eps)
    if key_norm is not None:
        key = reference.rms_norm(key, _wide(key_norm), eps)
    turns = torch.view_as_complex(rotations[positions.long()].contiguous()).unsqueeze(1)
    query, key = query.clone(), key.clone()
    reference.apply_rope_(query, turns)
    reference.apply_rope_(key, turns)
    kept = torch.nonzero(slots >= 0).flatten()
    key_value = torch.cat((key, value), 1)[kept].transpose(0, 1)
    places = slots[kept]
    if pages.scales is None:
        pages.data[:, places] = key_value.to(pages.data.dtype)
    else:
        scales = key_value.abs().amax(-1) / MAX_CODES[pages.data.dtype]
        codes = key_value / scales.clamp_min(_TINY).unsqueeze(-1)
        if pages.data.dtype == torch.int8:
            pages.data[:, places] = codes.round().to(torch.int8)
        else:
            raw = codes.to(pages.data.dtype).view(torch.uint8)  # indexing has no 8-bit floats
            pages.data.view(torch.uint8)[:, places] = raw
        pages.scales[:, places] = scales
    return query.to(out_dtype or qkv.dtype)


def decode_attention(
    query: torch.Tensor,
    pages: KvPages,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    *,
    max_length: int,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """See ``GpuOps``."""
    out = torch.zeros_like(query)
    for b, length in enumerate(lengths.tolist()):
        assert length <= max_length, "max_length is a bound"
        if length:
            rows = torch.tensor([length - 1])
            seen = _causal(rows, length, window)
            out[b] = _attend(query[b : b + 1], pages, block_tables[b], seen, scale, softcap)[0]
    return out


def prefill_attention(
    query: torch.Tensor,
    pages: KvPages,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    starts: torch.Tensor,
    *,
    max_query_len: int,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """See ``GpuOps``."""
    out = torch.empty_like(query)
    edges = query_starts.tolist()
    for b, start in enumerate(starts.tolist()):
        first, end = edges[b], edges[b + 1]
        assert end - first <= max_query_len, "max_query_len is a bound"
        if first < end:
            rows = torch.arange(start, start + end - first)
            seen = _causal(rows, start + end - first, window)
            out[first:end] = _attend(query[first:end], pages, block_tables[b], seen, scale, softcap)
    return out


def tree_attention(
    query: torch.Tensor,
    pages: KvPages,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    starts: torch.Tensor,
    positions: torch.Tensor,
    ancestors: torch.Tensor,
    *,
    max_query_len: int,
    max_length: int,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """See ``GpuOps``."""
    out = torch.empty_like(query)
    edges = query_starts.tolist()
    for b, start in enumerate(starts.tolist()):
        first, end = edges[b], edges[b + 1]
        num_rows = end - first
        assert num_rows <= max_query_len and start + num_rows <= max_length, "they are bounds"
        if num_rows == 0:
            continue
        own = positions[first:end].long().cpu()
        words = ancestors[first:end].cpu()
        drafted = torch.stack([words[:, j // 32] >> (j % 32) & 1 for j in range(num_rows)], 1)
        seen = torch.cat((torch.ones(num_rows, start, dtype=torch.bool), drafted.bool()), 1)
        if window is not None:
            places = torch.cat((torch.arange(start), own))
            seen &= places.unsqueeze(0) > own.unsqueeze(1) - window
        out[first:end] = _attend(query[first:end], pages, block_tables[b], seen, scale, softcap)
    return out


def ancestor_bits(
    parents: torch.Tensor, query_starts: torch.Tensor, *, max_query_len: int
) -> torch.Tensor:
    """See ``GpuOps``."""
    edges, chosen = query_starts.tolist(), parents.tolist()
    masks = [0] * len(chosen)
    for first, end in zip(edges, edges[1:], strict=False):
        for row in range(first, end):
            parent = chosen[row]
            inherited = masks[first + parent] if parent >= 0 else 0
            masks[row] = inherited | 1 << (row - first)
    num_words = -(-max_query_len // 32)
    words = [[_signed(mask >> 32 * w & 0xFFFF_FFFF) for w in range(num_words)] for mask in masks]
    return torch.tensor(words, dtype=torch.int32, device=parents.device).view(-1, num_words)


def matmul(
    x: torch.Tensor,
    weight: GpuWeight,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See ``GpuOps``."""
    product = _wide(x) @ dequantize(weight).to(_wide(x).dtype).T
    if bias is not None:
        product = product + _wide(bias)
    return product.to(out_dtype or x.dtype)


def matmul_parts(x: torch.Tensor, weight: GpuWeight) -> torch.Tensor:
    """See ``GpuOps``."""
    return matmul(x, weight, out_dtype=torch.float32).unsqueeze(0)


def matmul_gated(x: torch.Tensor, weight: GpuWeight, gate: GateName = "silu") -> torch.Tensor:
    """See ``GpuOps``."""
    return gated(matmul(x, weight, out_dtype=torch.float32), gate).to(x.dtype)


def gated(gate_up: torch.Tensor, gate: GateName = "silu") -> torch.Tensor:
    """See ``GpuOps``."""
    form = {"silu": reference.swiglu, "gelu_tanh": reference.geglu}[gate]
    return form(_wide(gate_up)).to(gate_up.dtype)


def embed(
    table: torch.Tensor,
    token_ids: torch.Tensor,
    scale: float,
    *,
    sources: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See ``GpuOps``."""
    if sources is not None and chosen is not None:
        token_ids = torch.where(sources >= 0, chosen[sources.clamp_min(0).long()], token_ids)
    is_known = (token_ids >= 0) & (token_ids < table.shape[0])
    rows = _wide(table[torch.where(is_known, token_ids, 0).long()]) * scale
    return torch.where(is_known.unsqueeze(1), rows, 0).to(out_dtype or table.dtype)


def move_rows(
    data: torch.Tensor, scales: torch.Tensor | None, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """See ``GpuOps``."""
    for pool in (data.view(torch.uint8) if data.itemsize == 1 else data, scales):
        if pool is None:
            continue
        for source_row, target_row in zip(sources, targets, strict=True):
            is_kept = source_row >= 0
            pool[:, :, target_row[is_kept]] = pool[:, :, source_row[is_kept]].clone()


def _sum(x: torch.Tensor) -> torch.Tensor:
    """[T, N], or the sum of parts [P, T, N]."""
    return _wide(x) if x.dim() == 2 else _wide(x).sum(0)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _causal(rows: torch.Tensor, length: int, window: int | None) -> torch.Tensor:
    places = torch.arange(length).unsqueeze(0)
    seen = places <= rows.unsqueeze(1)
    return seen if window is None else seen & (places > rows.unsqueeze(1) - window)


def _attend(
    query: torch.Tensor,
    pages: KvPages,
    block_table: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """query [R, num_heads, D]; seen bool [R, L] over the sequence's first L positions."""
    places = torch.arange(seen.shape[1], device=query.device)
    block_size = pages.block_size
    slots = block_table.long()[places // block_size] * block_size + places % block_size
    raw = pages.data.view(torch.uint8) if pages.data.itemsize == 1 else pages.data
    numbers = raw[:, slots].view(pages.data.dtype).to(_wide(query).dtype)
    if pages.scales is not None:
        numbers = numbers * pages.scales[:, slots].unsqueeze(-1)
    group_size = query.shape[1] // pages.num_kv_heads
    key, value = numbers.repeat_interleave(group_size, 0).chunk(2)  # [num_heads, L, D]
    scores = _wide(query).transpose(0, 1) @ key.transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen.to(query.device), float("-inf"))
    return (torch.softmax(scores, -1) @ value).transpose(0, 1).to(query.dtype)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
