"""A GGUF file as the decoder wants it: configuration, and weights under the decoder's names.

Llama-architecture files keep the rows of query and key in interleaved RoPE order (their converter
permutes Hugging Face's halves), which is the order that our decoder uses: nothing to undo.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llm_core.config import ModelConfig
from llm_core.errors import ModelLoadError
from llm_core.loading.gguf import GgufFile
from llm_core.loading.weights import weight_shapes
from llm_core.quant.formats import Weight

# Far above any real model. Sizes below it are then checked against the tensors, and those against
# the file's length, before anything is allocated.
_MAX_DIMENSION = 1 << 24
_MAX_LAYERS = 1 << 12

_GLOBAL_NAMES = {
    "embedding": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
}
_LAYER_NAMES = {
    "attention_norm": "attn_norm",
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "attention_output": "attn_output",
    "ffn_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


@dataclass(frozen=True, slots=True)
class GgufModel:
    """``weights`` reads each tensor from the file when it is asked for."""

    config: ModelConfig
    weights: Mapping[str, Weight]


@contextmanager
def open_gguf_model(path: str) -> Iterator[GgufModel]:
    """The model in the file at ``path``, all tensors checked. Raises ModelLoadError.

    The weights must be read inside the context.
    """
    with GgufFile(path) as file:
        config = read_config(file)
        yield GgufModel(config, _GgufWeights(file, config))


class _GgufWeights(Mapping[str, Weight]):
    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._shapes = weight_shapes(config)
        unused = set(file.tensors)
        for name, shape in self._shapes.items():
            unused.discard(file.check(_file_name(name), shape).name)
        if unused:
            raise ModelLoadError(
                f"{file.path.name}: has tensors that the {config.family} decoder does not use, "
                f"such as {min(unused)}"
            )

    def __getitem__(self, name: str) -> Weight:
        return self._file.read(_file_name(name), self._shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def read_config(file: GgufFile) -> ModelConfig:
    """The configuration that the metadata describes. Raises ModelLoadError."""
    fields = _Fields(file)
    architecture = fields.text("general.architecture")
    if architecture != "llama":
        raise fields.error(f"architecture {architecture!r} is not supported, only 'llama'")
    fields.forbid_unless("llama.expert_count", 0)
    fields.forbid_unless("llama.rope.scaling.type", "none")
    hidden_size = fields.integer("llama.embedding_length")
    num_heads = fields.integer("llama.attention.head_count")
    head_dim = fields.integer("llama.attention.key_length", hidden_size // num_heads)
    fields.forbid_unless("llama.attention.value_length", head_dim)
    fields.forbid_unless("llama.rope.dimension_count", head_dim)
    embedding = file.tensors.get(_GLOBAL_NAMES["embedding"])
    if embedding is None:
        raise fields.error(f"tensor {_GLOBAL_NAMES['embedding']} is missing")
    try:
        return ModelConfig(
            family="llama",
            num_layers=fields.integer("llama.block_count", limit=_MAX_LAYERS),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=fields.integer("llama.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            intermediate_size=fields.integer("llama.feed_forward_length"),
            vocab_size=fields.integer("llama.vocab_size", embedding.shape[0]),
            context_len=fields.integer("llama.context_length"),
            rope_theta=fields.number("llama.rope.freq_base", 10000.0),
            rms_eps=fields.number("llama.attention.layer_norm_rms_epsilon"),
            tie_embeddings=_GLOBAL_NAMES["head"] not in file.tensors,
        )
    except ValueError as error:
        raise fields.error(str(error)) from error


def _file_name(name: str) -> str:
    """layers.3.query -> blk.3.attn_q.weight."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    _, index, part = name.split(".")
    return f"blk.{index}.{_LAYER_NAMES[part]}.weight"


class _Fields:
    """Typed access to metadata; each refusal names the key, the value and what was expected."""

    def __init__(self, file: GgufFile) -> None:
        self._metadata = file.metadata
        self._label = file.path.name

    def error(self, message: str) -> ModelLoadError:
        return ModelLoadError(f"{self._label}: {message}")

    def text(self, key: str) -> str:
        value = self._get(key, None)
        if not isinstance(value, str):
            raise self.error(f"metadata {key} is {value!r}, expected text")
        return value

    def integer(self, key: str, default: int | None = None, limit: int = _MAX_DIMENSION) -> int:
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
            raise self.error(f"metadata {key} is {value!r}, expected an integer in 1 to {limit}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(f"metadata {key} is {value!r}, expected a number")
        return float(value)

    def forbid_unless(self, key: str, expected: int | str) -> None:
        """``key`` may be absent or equal ``expected``; anything else is a feature we lack."""
        value = self._metadata.get(key, expected)
        if value != expected:
            raise self.error(f"metadata {key} is {value!r}, supported is only {expected!r}")

    def _get(self, key: str, default: Any) -> Any:
        value = self._metadata.get(key, default)
        if value is None:
            raise self.error(f"metadata {key} is missing")
        return value
