"""Attention on a CPU over runs of cached positions. Semantics: ``kernels.reference.attention_``.

Scores of all runs are concatenated, their softmax is computed once, and the weighted sums of the
runs are added: the result does not depend on the division into runs, and keys and values are not
copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from kernels.kv_runs import KvRun, causal_mask

# Maximum number of scores in memory; more rows are processed in parts.
_MAX_SCORES = 1 << 22


def attention_mask(start: int, length: int, window: int | None = None) -> torch.Tensor | None:
    """None if ``attention_`` needs no mask: for one row, or for rows from position 0 on."""
    if length == 1 or (start == 0 and (window is None or length <= window)):
        return None
    return causal_mask(start, length, window)


def attention_(
    query: torch.Tensor,
    runs: Sequence[KvRun],
    mask: torch.Tensor | None,
    out: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
) -> None:
    """See ``reference.attention_``. One row over 300 keys (9 heads, 3 KV heads, cold): 56 us.

    One row: the query heads of a group are the rows of one small matmul per KV head, without
    copies. Several rows over one float32 run: torch's blocked kernel, which does not store all
    scores.
    """
    num_rows, num_heads, _ = query.shape
    num_kv_heads = runs[0].keys.shape[0]
    if num_rows == 1:
        _attend_rows(query, runs, None, out, scale, softcap)
    elif len(runs) == 1 and softcap is None and runs[0].keys.dtype == query.dtype:
        result = F.scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0),
            runs[0].keys.unsqueeze(0),
            runs[0].values.unsqueeze(0),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=num_kv_heads != num_heads,
        )
        out.copy_(result.squeeze(0).transpose(0, 1))
    else:
        num_keys = sum(run.length for run in runs)
        if mask is None:
            mask = causal_mask(num_keys - num_rows, num_rows, None)
        part = max(1, _MAX_SCORES // (num_heads * num_keys))
        for first in range(0, num_rows, part):
            rows = slice(first, first + part)
            _attend_rows(query[rows], runs, mask[rows], out[rows], scale, softcap)


def _attend_rows(
    query: torch.Tensor,
    runs: Sequence[KvRun],
    mask: torch.Tensor | None,
    out: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> None:
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = runs[0].keys.shape[0]
    group_size = num_heads // num_kv_heads
    # [num_kv_heads, rows * group_size, head_dim]; a view for one row.
    grouped = query.reshape(num_rows, num_kv_heads, group_size, head_dim).transpose(0, 1)
    grouped = grouped.reshape(num_kv_heads, num_rows * group_size, head_dim)
    parts = [_scores(grouped, run) for run in runs]
    scores = (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).mul_(scale)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        by_row = scores.view(num_kv_heads, num_rows, group_size, -1)
        by_row.masked_fill_(~mask.unsqueeze(1), float("-inf"))
    weights = torch.softmax(scores, -1)
    total = torch.empty_like(grouped)
    first = 0
    for run in runs:
        last = first + run.length
        _add_weighted(total, weights[..., first:last], run, is_first=first == 0)
        first = last
    by_head = total.view(num_kv_heads, num_rows, group_size, head_dim).transpose(0, 1)
    out.view(num_rows, num_kv_heads, group_size, head_dim).copy_(by_head)


def _scores(grouped: torch.Tensor, run: KvRun) -> torch.Tensor:
    """[num_kv_heads, rows, L], not yet scaled."""
    scores = torch.bmm(grouped, run.keys.to(grouped.dtype).transpose(1, 2))
    return scores if run.key_scales is None else scores.mul_(run.key_scales.unsqueeze(1))


def _add_weighted(
    total: torch.Tensor, weights: torch.Tensor, run: KvRun, *, is_first: bool
) -> None:
    if run.value_scales is not None:
        weights = weights * run.value_scales.unsqueeze(1)
    total.baddbmm_(weights, run.values.to(total.dtype), beta=0.0 if is_first else 1.0)
