"""The paged KV cache of one layer, as kernels read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Largest code of each quantised dtype, to which a head's largest magnitude is scaled.
MAX_CODES = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@dataclass(frozen=True, slots=True)
class KvPages:
    """Keys and values of one layer.

    ``data`` [2 * num_kv_heads, num_positions, head_dim], key heads first: float32, bfloat16,
    float16, int8 or float8_e4m3fn. ``scales`` float32 [2 * num_kv_heads, num_positions] for the
    last two, else None: a number is its code times the scale of its head and position. Position p
    of a sequence lies at block_table[p // block_size] * block_size + p % block_size.

    Raises ValueError for tensors that disagree.
    """

    data: torch.Tensor
    scales: torch.Tensor | None
    block_size: int

    def __post_init__(self) -> None:
        if self.data.dim() != 3 or self.data.shape[0] % 2 or self.data.stride(2) != 1:
            raise ValueError(
                f"KV data has shape {tuple(self.data.shape)} and strides {self.data.stride()}, "
                "expected [2 * num_kv_heads, num_positions, head_dim] with a dense last dimension"
            )
        if self.data.shape[1] % self.block_size:
            raise ValueError(
                f"KV data has {self.data.shape[1]} positions, not a multiple of block_size "
                f"{self.block_size}"
            )
        is_quantised = self.data.dtype in MAX_CODES
        if is_quantised != (self.scales is not None):
            raise ValueError(
                f"KV data is {self.data.dtype}, expected {'' if is_quantised else 'no '}scales"
            )
        if self.scales is not None and (
            self.scales.shape != self.data.shape[:2] or self.scales.dtype != torch.float32
        ):
            raise ValueError(
                f"KV scales are {self.scales.dtype} {tuple(self.scales.shape)}, expected float32 "
                f"{tuple(self.data.shape[:2])}"
            )

    @property
    def num_kv_heads(self) -> int:
        return self.data.shape[0] // 2

    @property
    def head_dim(self) -> int:
        return self.data.shape[2]
