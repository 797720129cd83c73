"""Reference implementations of all operations, in the dtype of their input (float32 or float64).

Slow; the fast implementations are tested against them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kernels.kv_runs import KvRun, causal_mask


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, H] / sqrt(mean(x^2) + eps) * weight [H] (Zhang and Sennrich 2019)."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def make_rms_norm(weight: torch.Tensor, eps: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """``rms_norm`` with weight and eps bound."""
    return lambda x: rms_norm(x, weight, eps)


def rope_table(num_positions: int, head_dim: int, theta: float) -> torch.Tensor:
    """complex64 [num_positions, 1, head_dim / 2]: exp(i * position * theta^(-2j / head_dim)).

    Su et al. 2021, computed in float64 and rounded once.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    positions = torch.arange(num_positions, dtype=torch.float64)
    angles = torch.outer(positions, theta**-exponents)
    table = torch.polar(torch.ones_like(angles), angles)
    return table.to(torch.complex64).unsqueeze(1)


def apply_rope_(heads: torch.Tensor, rotations: torch.Tensor) -> None:
    """Rotates heads [T, num_heads, head_dim] in place; rotations complex [T, 1, head_dim / 2].

    Interleaved pairs: (x[2j], x[2j + 1]) is one complex number, as in GGUF llama files and the
    original paper. Weights in Hugging Face order (halves) must have their rows interleaved.
    """
    even, odd = heads[..., 0::2].clone(), heads[..., 1::2].clone()
    cos, sin = rotations.real.to(heads.dtype), rotations.imag.to(heads.dtype)
    heads[..., 0::2] = even * cos - odd * sin
    heads[..., 1::2] = even * sin + odd * cos


def attention_mask(start: int, length: int, window: int | None = None) -> torch.Tensor | None:
    """``causal_mask``; this backend always uses a mask."""
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
    """Causal attention of one segment, written to ``out`` [T, num_heads, head_dim].

    query [T, num_heads, head_dim]; the concatenated ``runs`` hold the visible positions, the last T
    of which are the query's own; query head h uses KV head h // (num_heads // num_kv_heads).
    ``mask`` comes from ``attention_mask`` of the same backend. Scores are multiplied by ``scale``
    and optionally bounded: softcap * tanh(score / softcap) (Gemma 2).
    """
    keys = torch.cat([_plain(run.keys, run.key_scales, query.dtype) for run in runs], 1)
    values = torch.cat([_plain(run.values, run.value_scales, query.dtype) for run in runs], 1)
    num_heads = query.shape[1]
    group_size = num_heads // keys.shape[0]
    for head in range(num_heads):
        head_keys, head_values = keys[head // group_size], values[head // group_size]
        scores = query[:, head] @ head_keys.T * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        out[:, head] = torch.softmax(scores, -1) @ head_values


def _plain(codes: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    numbers = codes.to(dtype)
    return numbers if scales is None else numbers * scales.to(dtype).unsqueeze(-1)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 * I] -> silu(gate) * up [T, I] (Shazeer 2020)."""
    gate, up = gate_up.chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


def geglu(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 * I] -> gelu(gate) * up [T, I], gelu in its tanh form (Hendrycks and Gimpel
    2016; Shazeer 2020)."""
    gate, up = gate_up.chunk(2, -1)
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + torch.tanh(inner)) * up


def dequantize_int4(codes: torch.Tensor, scale_zero: torch.Tensor, group: int) -> torch.Tensor:
    """codes int [N, K] in 0..15, scale_zero [K / group, N, 2] -> (code - 8) * scale + zero."""
    scale = scale_zero[..., 0].T.repeat_interleave(group, 1)
    zero = scale_zero[..., 1].T.repeat_interleave(group, 1)
    return (codes.to(scale.dtype) - 8) * scale + zero


def int4_matmul(
    x: torch.Tensor, codes: torch.Tensor, scale_zero: torch.Tensor, group: int
) -> torch.Tensor:
    """x [T, K] times the transposed dequantised weight -> [T, N]."""
    return x @ dequantize_int4(codes, scale_zero, group).T


def int8_matmul(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [T, K], codes int8 [N, K], scale [N] -> [T, N]."""
    return x @ (codes.to(scale.dtype) * scale.unsqueeze(1)).T


def fake_quantize_rows(x: torch.Tensor, group: int) -> torch.Tensor:
    """x [T, K] after quantisation of each ``group`` of a row to symmetric int8 and back.

    The last group may be shorter. W8A8 and W4A8 products quantise activations so.
    """
    result = torch.empty_like(x)
    for first in range(0, x.shape[1], group):
        part = x[:, first : first + group]
        scale = part.abs().amax(1, keepdim=True) / 127
        codes = torch.where(scale > 0, part / scale, 0).round()
        result[:, first : first + group] = codes * scale
    return result


def grouped_matmul(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, group: int
) -> torch.Tensor:
    """x [T, K] times the transposed [N, K] of codes * scale + zero, with a pair per ``group``.

    scale and zero [N, ceil(K / group)].
    """
    num_in = codes.shape[1]
    weight = codes.to(x.dtype) * scale.to(x.dtype).repeat_interleave(group, 1)[:, :num_in]
    if zero is not None:
        weight = weight + zero.to(x.dtype).repeat_interleave(group, 1)[:, :num_in]
    return x @ weight.T


def dynamic_int8_matmul(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """W8A8: codes int8 [N, K], scale [N, G]; x is quantised in the same groups."""
    group = codes.shape[1] // scale.shape[1]
    weight = codes.to(scale.dtype) * scale.repeat_interleave(group, 1)
    return fake_quantize_rows(x, group) @ weight.T


def float8_matmul(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [T, K], codes float8_e4m3fn [N, K], scale [N] -> [T, N] (Micikevicius et al. 2022)."""
    return x @ (codes.to(scale.dtype) * scale.unsqueeze(1)).T
