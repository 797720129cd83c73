"""Packs matrices into the tensors of GPTQ, AWQ and compressed-tensors files."""

from __future__ import annotations

import torch

from llm_core.offline.quantize.rounding import RoundedMatrix

# Column _AWQ_ORDER[i] of eight is the i-th nibble of a word.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[A, B * 32 / bits] integers -> int32 [A, B], the first code in the lowest bits."""
    per_word = 32 // bits
    parts = codes.long().reshape(len(codes), -1, per_word)
    words = (parts << (bits * torch.arange(per_word))).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def gptq_tensors(matrix: RoundedMatrix) -> dict[str, torch.Tensor]:
    """qweight int32 [K * bits / 32, N], qzeros int32 [G, N * bits / 32] (zero points less one),
    scales float16 [G, N], g_idx int32 [K]."""
    bits, num_in = matrix.spec.bits, matrix.codes.shape[1]
    return {
        "qweight": pack_words(matrix.codes, bits).T.contiguous(),
        "qzeros": pack_words(matrix.grid.zero.T - 1, bits),
        "scales": matrix.grid.scale.T.half().contiguous(),
        "g_idx": matrix.spec.group_index(num_in).int(),
    }


def awq_tensors(matrix: RoundedMatrix) -> dict[str, torch.Tensor]:
    """qweight int32 [K, N / 8], qzeros int32 [G, N / 8], scales float16 [G, N]."""
    order = torch.tensor(_AWQ_ORDER)

    def packed(columns: torch.Tensor) -> torch.Tensor:
        return pack_words(columns.reshape(len(columns), -1, 8)[..., order].flatten(1), 4)

    return {
        "qweight": packed(matrix.codes.T),
        "qzeros": packed(matrix.grid.zero.T),
        "scales": matrix.grid.scale.T.half().contiguous(),
    }


def int8_tensors(matrix: RoundedMatrix) -> dict[str, torch.Tensor]:
    """INT8 without zero points, as compressed-tensors packs weights of weight-only schemes:
    weight_packed int32 [N, K / 4 rounded up] of codes plus 128, weight_scale float16 [N, G],
    weight_shape int64 [2]."""
    assert matrix.spec.bits == 8 and matrix.spec.is_symmetric
    padded = torch.nn.functional.pad(matrix.codes, (0, -matrix.codes.shape[1] % 4))
    return {
        "weight_packed": pack_words(padded, 8),
        "weight_scale": matrix.grid.scale.half(),
        "weight_shape": torch.tensor(matrix.codes.shape),
    }
