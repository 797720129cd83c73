"""Metadata of a GGUF file -> ModelConfig.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Their meaning per architecture and
their defaults are those of llama.cpp, which defines these files.
"""

from __future__ import annotations

import math
from typing import TypedDict

from llm_core.config import (
    Family,
    FrequencyFactors,
    LinearRope,
    LongRope,
    ModelConfig,
    RopeScaling,
    YarnRope,
)
from llm_core.loading.fields import MAX_LAYERS, Fields
from llm_core.loading.gguf.container import GgufFile
from llm_core.quant import to_float

_FAMILIES: dict[str, Family] = {
    "llama": "llama",  # also Mistral
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "phi3": "phi3",
}
# Gemma's 27B models scale scores by hidden_size / num_heads instead of head_dim. There is no key
# for that; they are recognised by their number of layers.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
_LARGEST_TABLE = 1 << 12  # RoPE factors of a head


class _Gemma(TypedDict, total=False):
    post_norms: bool
    embedding_scale: float
    attention_scale: float
    attention_softcap: float | None
    logit_softcap: float | None


def read_config(file: GgufFile) -> ModelConfig:
    """The configuration in the metadata. Raises ModelLoadError."""
    fields = Fields(file.path.name, file.metadata, "metadata ")
    architecture = fields.text("general.architecture")
    if architecture not in _FAMILIES:
        known = ", ".join(map(repr, _FAMILIES))
        raise fields.error(f"architecture {architecture!r} is not supported, only {known}")
    return _ArchitectureReader(architecture, file, fields).config()


class _ArchitectureReader:
    def __init__(self, architecture: str, file: GgufFile, fields: Fields) -> None:
        self._arch = architecture
        self._family = _FAMILIES[architecture]
        self._file = file
        self._fields = fields
        self._is_gemma = self._family in ("gemma2", "gemma3")

    def config(self) -> ModelConfig:
        fields = self._fields
        fields.forbid_unless(self._key("expert_count"), 0)
        hidden_size = fields.integer(self._key("embedding_length"))
        num_heads = fields.integer(self._key("attention.head_count"))
        num_layers = fields.integer(self._key("block_count"), limit=MAX_LAYERS)
        head_dim = fields.integer(self._key("attention.key_length"), hidden_size // num_heads)
        fields.forbid_unless(self._key("attention.value_length"), head_dim)
        context_len = fields.integer(self._key("context_length"))
        rotary_dim = self._rotary_dim(head_dim)
        window, is_sliding = self._windows(num_layers, context_len)
        embedding = self._file.tensors.get("token_embd.weight")
        if embedding is None:
            raise fields.error("tensor token_embd.weight is missing")
        default_theta = 1e6 if self._family == "gemma3" else 1e4
        try:
            return ModelConfig(
                family=self._family,
                num_layers=num_layers,
                hidden_size=hidden_size,
                num_heads=num_heads,
                num_kv_heads=fields.integer(self._key("attention.head_count_kv"), num_heads),
                head_dim=head_dim,
                intermediate_size=fields.integer(self._key("feed_forward_length")),
                vocab_size=fields.integer(self._key("vocab_size"), embedding.shape[0]),
                context_len=context_len,
                rms_eps=fields.number(self._key("attention.layer_norm_rms_epsilon")),
                tie_embeddings="output.weight" not in self._file.tensors,
                activation="gelu_tanh" if self._is_gemma else "silu",
                attention_bias=self._family == "qwen2",
                qk_norm=self._family in ("qwen3", "gemma3"),
                sliding_window=window,
                layer_is_sliding=is_sliding,
                rope_theta=fields.number(self._key("rope.freq_base"), default_theta),
                rope_scaling=self._scaling(rotary_dim or head_dim, context_len),
                local_rope_theta=self._local_theta(),
                rotary_dim=rotary_dim,
                **self._gemma(hidden_size, num_heads, num_layers),
            )
        except ValueError as error:
            raise fields.error(str(error)) from error

    def _key(self, name: str) -> str:
        return f"{self._arch}.{name}"

    def _gemma(self, hidden_size: int, num_heads: int, num_layers: int) -> _Gemma:
        if not self._is_gemma:
            return {}
        fields, is_second = self._fields, self._family == "gemma2"
        extras = _Gemma(
            post_norms=True,
            embedding_scale=math.sqrt(hidden_size),
            attention_softcap=fields.number(self._key("attn_logit_softcapping"), 50.0)
            if is_second
            else None,
            logit_softcap=fields.number(self._key("final_logit_softcapping"), 30.0)
            if is_second
            else fields.optional_number(self._key("final_logit_softcapping")),
        )
        if num_layers == _GEMMA_27B_LAYERS[self._arch]:
            extras["attention_scale"] = math.sqrt(num_heads / hidden_size)
        return extras

    def _rotary_dim(self, head_dim: int) -> int | None:
        """Rotated dimensions; None for the whole head. Only Phi-3 rotates a part."""
        key = self._key("rope.dimension_count")
        if self._family != "phi3":
            self._fields.forbid_unless(key, head_dim)
            return None
        rotary_dim = self._fields.integer(key, head_dim)
        return None if rotary_dim == head_dim else rotary_dim

    def _local_theta(self) -> float | None:
        if self._family != "gemma3":
            return None
        return self._fields.number(self._key("rope.freq_base_swa"), 1e4)

    def _windows(self, num_layers: int, context_len: int) -> tuple[int | None, tuple[bool, ...]]:
        fields = self._fields
        key = self._key("attention.sliding_window")
        if self._family == "llama":
            fields.forbid_unless(key, 0)
            return None, ()
        if fields.raw(key) == 0:
            return None, ()
        window = fields.integer(key, 4096) if self._is_gemma else fields.optional_integer(key)
        if window is None or (window >= context_len and self._family != "gemma3"):
            return None, ()
        if not self._is_gemma:
            return window, (True,) * num_layers
        every = fields.integer(
            self._key("attention.sliding_window_pattern"), 2 if self._family == "gemma2" else 6
        )
        return window, tuple((layer + 1) % every != 0 for layer in range(num_layers))

    def _scaling(self, rotary_dim: int, context_len: int) -> RopeScaling | None:
        fields = self._fields
        kind = fields.text(self._key("rope.scaling.type"), "none")
        has_lists = "rope_factors_short.weight" in self._file.tensors
        if has_lists:
            return self._long_rope(rotary_dim, context_len)
        factors = self._factors("rope_freqs.weight", rotary_dim)
        if factors is not None:
            if kind != "none":
                raise fields.error(f"rope_freqs.weight beside {kind!r} scaling is not supported")
            return FrequencyFactors(factors=factors)
        old_factor = fields.optional_number(self._key("rope.scale_linear"))
        if kind == "none" and old_factor not in (None, 0.0, 1.0):
            kind = "linear"
        if kind == "none":
            return None
        factor = fields.number(self._key("rope.scaling.factor"), old_factor)
        if kind == "linear":
            return LinearRope(factor=factor)
        if kind != "yarn":
            raise fields.error(
                f"metadata {self._key('rope.scaling.type')} is {kind!r}, supported are 'none', "
                "'linear' and 'yarn' (and 'longrope' with its factors)"
            )
        magnitude = 1 + 0.1 * math.log(factor) if factor > 1 else 1.0
        return YarnRope(
            factor=factor,
            original_context_len=fields.integer(
                self._key("rope.scaling.original_context_length"), context_len
            ),
            attention_factor=magnitude * fields.number(self._key("rope.scaling.attn_factor"), 1.0),
            beta_fast=fields.number(self._key("rope.scaling.yarn_beta_fast"), 32.0),
            beta_slow=fields.number(self._key("rope.scaling.yarn_beta_slow"), 1.0),
        )

    def _long_rope(self, rotary_dim: int, context_len: int) -> LongRope:
        fields = self._fields
        lists = [
            self._factors(f"rope_factors_{name}.weight", rotary_dim) for name in ("short", "long")
        ]
        short, long = lists
        if short is None or long is None:
            raise fields.error("tensor rope_factors_long.weight is missing")
        original_len = fields.integer(
            self._key("rope.scaling.original_context_length"), context_len
        )
        ratio = context_len / original_len
        magnitude = 1.0
        if ratio > 1 and original_len > 1:
            magnitude = math.sqrt(1 + math.log(ratio) / math.log(original_len))
        return LongRope(
            short_factors=short,
            long_factors=long,
            original_context_len=original_len,
            attention_factor=fields.number(self._key("rope.scaling.attn_factor"), magnitude),
        )

    def _factors(self, name: str, rotary_dim: int) -> tuple[float, ...] | None:
        if name not in self._file.tensors:
            return None
        if not 2 <= rotary_dim <= _LARGEST_TABLE:
            raise self._fields.error(f"{rotary_dim} values turn, expected 2 to {_LARGEST_TABLE}")
        return tuple(to_float(self._file.read(name, (rotary_dim // 2,))).tolist())
