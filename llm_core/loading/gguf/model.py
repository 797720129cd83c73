"""A GGUF model: configuration, and weights under the decoder's names.

Files of the llama architecture have query and key in interleaved RoPE order, as the decoder uses.
Those of all other architectures are in half-split order and are permuted here. Gemma's norm weights
already include the added 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from llm_core.config import ModelConfig
from llm_core.errors import ModelLoadError
from llm_core.loading.gguf.config import read_config
from llm_core.loading.gguf.container import GgufFile
from llm_core.loading.weights import (
    TURNING,
    ModelWeights,
    interleaved,
    model_name,
    weight_shapes,
)
from llm_core.quant import Weight, take_rows

_GLOBAL_NAMES = {
    "embedding": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
}
_LAYER_NAMES = {
    "attention_norm": "attn_norm.weight",
    "query": "attn_q.weight",
    "key": "attn_k.weight",
    "value": "attn_v.weight",
    "query_bias": "attn_q.bias",
    "key_bias": "attn_k.bias",
    "value_bias": "attn_v.bias",
    "query_norm": "attn_q_norm.weight",
    "key_norm": "attn_k_norm.weight",
    "attention_output": "attn_output.weight",
    "attention_post_norm": "post_attention_norm.weight",
    "ffn_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "ffn_post_norm": "post_ffw_norm.weight",
}
_ROPE_TENSORS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}


@contextmanager
def open_gguf_model(path: Path) -> Iterator[ModelWeights]:
    """A context with the model at ``path``, all tensors checked, which must be read within it.
    Raises ModelLoadError."""
    with GgufFile(path) as file:
        config = read_config(file)
        yield ModelWeights(model_name(path), config, _GgufWeights(file, config))


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows [first, last) of the tensor ``name`` of shape ``shape``."""

    name: str
    shape: tuple[int, ...]
    first: int
    last: int


class _GgufWeights(Mapping[str, Weight]):
    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        self._parts = {
            name: self._part(name, shape) for name, shape in weight_shapes(config).items()
        }
        unused = set(file.tensors)
        if config.rope_scaling is not None:
            unused -= _ROPE_TENSORS
        for part in self._parts.values():
            unused.discard(file.check(part.name, part.shape).name)
        if unused:
            raise ModelLoadError(
                f"{file.path.name}: has tensors that the {config.family} decoder does not use, "
                f"such as {min(unused)}"
            )

    def __getitem__(self, name: str) -> Weight:
        part, config = self._parts[name], self._config
        weight = self._file.read(part.name, part.shape)
        if config.family != "llama" and name.rpartition(".")[2] in TURNING:
            num_heads = (part.last - part.first) // config.head_dim
            rows = interleaved(num_heads, config.head_dim, config.num_rotated) + part.first
            return take_rows(weight, rows)
        if part.last - part.first < part.shape[0]:
            return take_rows(weight, torch.arange(part.first, part.last))
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def _part(self, name: str, shape: tuple[int, ...]) -> _Part:
        """layers.3.query -> all rows of blk.3.attn_q.weight, or some of Phi-3's fused tensor."""
        if name in _GLOBAL_NAMES:
            return _Part(_GLOBAL_NAMES[name], shape, 0, shape[0])
        config = self._config
        _, index, part = name.split(".")
        prefix = f"blk.{index}."
        if config.family == "phi3" and part in ("query", "key", "value"):
            num_rows = config.query_size + 2 * config.kv_size
            first = {"query": 0, "key": config.query_size}.get(part, num_rows - config.kv_size)
            whole = (num_rows, config.hidden_size)
            return _Part(f"{prefix}attn_qkv.weight", whole, first, first + shape[0])
        if config.family == "phi3" and part in ("gate", "up"):
            first = 0 if part == "gate" else config.intermediate_size
            whole = (2 * config.intermediate_size, config.hidden_size)
            return _Part(f"{prefix}ffn_up.weight", whole, first, first + shape[0])
        return _Part(prefix + _LAYER_NAMES[part], shape, 0, shape[0])
