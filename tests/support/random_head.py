"""A draft head with random weights, for tests of what runs or reads one."""

from __future__ import annotations

import torch

from llm_core.speculative.heads.config import HeadConfig
from llm_core.speculative.heads.eagle import head_shapes


def random_head_tensors(config: HeadConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Float32 tensors of a head's file, and d2t (words at even distances)."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in head_shapes(config).items():
        values = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.1 * values if len(shape) == 1 else values / shape[-1] ** 0.5
    if config.has_draft_vocab:
        spread = (config.vocab_size - 1) // config.draft_vocab_size
        ids = torch.arange(config.draft_vocab_size)
        tensors["d2t"] = ids * spread + 1 - ids
    return tensors
