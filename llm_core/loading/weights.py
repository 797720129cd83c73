"""Names, shapes and order of the decoder's weights, independent of the file format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from llm_core.config import ModelConfig
from llm_core.quant import Weight

# Weights in RoPE order: those of queries and keys.
TURNING = frozenset(("query", "key", "query_bias", "key_bias", "query_norm", "key_norm"))


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """An open model. ``weights`` reads tensors from the file on access."""

    name: str
    config: ModelConfig
    weights: Mapping[str, Weight]


def model_name(path: Path) -> str:
    """Display name of the model: name of the file or directory; for the Hugging Face cache, where
    directories are named by commit, name of the repository."""
    if path.parent.name == "snapshots":
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    return path.name if path.is_dir() else path.stem


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight the decoder needs; matrices are [out, in].

    ``head`` exists unless it is tied to the embedding. ``query`` and ``key`` with their biases and
    norms are in interleaved RoPE order: dimensions 2j and 2j + 1 of a head are rotated together.
    Norm weights are plain factors: the loader adds the 1 of Gemma's 1 + w.
    """
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (config.vocab_size, hidden),
        "final_norm": (hidden,),
    }
    if not config.tie_embeddings:
        shapes["head"] = (config.vocab_size, hidden)
    layer = layer_shapes(config)
    for index in range(config.num_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name within a layer -> shape."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "attention_norm": (hidden,),
        "query": (config.query_size, hidden),
        "key": (config.kv_size, hidden),
        "value": (config.kv_size, hidden),
        "attention_output": (hidden, config.query_size),
        "ffn_norm": (hidden,),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    if config.attention_bias:
        shapes["query_bias"] = (config.query_size,)
        shapes["key_bias"] = shapes["value_bias"] = (config.kv_size,)
    if config.qk_norm:
        shapes["query_norm"] = shapes["key_norm"] = (config.head_dim,)
    if config.post_norms:
        shapes["attention_post_norm"] = shapes["ffn_post_norm"] = (hidden,)
    return shapes


def interleaved(num_heads: int, head_dim: int, rotary_dim: int) -> torch.Tensor:
    """Permutation int64 [num_heads * head_dim] from half-split to interleaved RoPE order.

    Row 2j of a head is row j of the half-split order, row 2j + 1 is row j + rotary_dim / 2; rows
    from ``rotary_dim`` on are unchanged.
    """
    pairs = torch.arange(rotary_dim).view(2, -1).T.flatten()
    one = torch.cat((pairs, torch.arange(rotary_dim, head_dim)))
    return (torch.arange(num_heads).unsqueeze(1) * head_dim + one).flatten()
