"""The shape of a decoder-only model, as plain numbers.

One decoder serves all families; what differs between them becomes a field here. Nothing in this
file knows of files or tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

Family = Literal["llama"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything the decoder must know besides the weights. Raises ValueError when impossible."""

    family: Family = "llama"
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_len: int
    rope_theta: float = 10000.0
    rms_eps: float = 1e-5
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if not math.isfinite(value) or value <= 0:
                raise ValueError(f"{field.name} is {value}, expected a positive number")
        if self.num_heads % self.num_kv_heads != 0:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2 != 0:
            raise ValueError(f"head_dim is {self.head_dim}, but rotary embedding needs it even")

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads (or value heads) together."""
        return self.num_kv_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads
