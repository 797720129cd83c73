"""Draft heads with random weights, for small random targets."""

from __future__ import annotations

from typing import Any

import torch

from llm_core.config import ModelConfig
from llm_core.speculative.heads.config import HeadConfig
from llm_core.speculative.heads.eagle import head_shapes


def head_tensors(config: HeadConfig, seed: int = 3) -> dict[str, torch.Tensor]:
    """Float tensors by the names of a head's file, and d2t."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in head_shapes(config).items():
        values = torch.randn(shape, generator=generator)
        tensors[name] = values / shape[-1] ** 0.5 if len(shape) == 2 else 1 + 0.1 * values
    if config.has_draft_vocab:
        # Every second word of the target.
        tensors["d2t"] = torch.arange(config.draft_vocab_size)
    return tensors


def head_config(target: ModelConfig, kind: Any, **changes: Any) -> HeadConfig:
    """A head of two heads of 16 for a target of two layers, with 120 draft words."""
    fields: dict[str, Any] = {
        "kind": kind,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": 120,
        "feature_layers": (0, 1, 2) if kind == "eagle3" else (2,),
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 24,
    }
    return HeadConfig(**(fields | changes))
