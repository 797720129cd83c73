"""config.json of a Hugging Face model -> ModelConfig.

Keys and defaults are those of the families' configuration classes in transformers. Settings that
would change the result but are not supported by the decoder are rejected by name.
"""

from __future__ import annotations

import math
from typing import cast, get_args

from llm_core.config import Activation, Family, ModelConfig
from llm_core.loading.fields import MAX_LAYERS, Fields
from llm_core.loading.hf.rope import read_rope

_FAMILIES: dict[str, Family] = {name: name for name in get_args(Family)} | {"gemma3_text": "gemma3"}
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    # Gemma's first configurations say "gelu" but mean the tanh form, as later corrected.
    "gelu": "gelu_tanh",
}
# Defaults of Gemma 3, whose published files omit these.
_GEMMA3_DEFAULTS = {
    "num_heads": 8,
    "num_kv_heads": 4,
    "context_len": 131_072,
    "vocab_size": 262_208,
}


def read_hf_config(fields: Fields) -> ModelConfig:
    """The configuration that ``fields`` (config.json) describes. Raises ModelLoadError."""
    if "text_config" in fields:  # the language part of a vision-language model
        fields = fields.section("text_config")
    model_type = fields.text("model_type")
    if model_type not in _FAMILIES:
        raise fields.error(
            f"model_type {model_type!r} is not supported, only {', '.join(_FAMILIES)}"
        )
    return _FamilyReader(_FAMILIES[model_type], fields).config()


class _FamilyReader:
    """Reads the settings of one family."""

    def __init__(self, family: Family, fields: Fields) -> None:
        self._family = family
        self._fields = fields
        self._is_gemma = family in ("gemma2", "gemma3")

    def config(self) -> ModelConfig:
        fields = self._fields
        self._reject_unsupported()
        defaults = _GEMMA3_DEFAULTS if self._family == "gemma3" else {}
        hidden_size = fields.integer("hidden_size")
        num_heads = fields.integer("num_attention_heads", defaults.get("num_heads"))
        num_layers = fields.integer("num_hidden_layers", limit=MAX_LAYERS)
        head_dim = fields.integer("head_dim", self._default_head_dim(hidden_size, num_heads))
        context_len = fields.integer("max_position_embeddings", defaults.get("context_len"))
        window, is_sliding = self._windows(num_layers, context_len)
        try:
            return ModelConfig(
                family=self._family,
                num_layers=num_layers,
                hidden_size=hidden_size,
                num_heads=num_heads,
                num_kv_heads=fields.integer(
                    "num_key_value_heads", defaults.get("num_kv_heads", num_heads)
                ),
                head_dim=head_dim,
                intermediate_size=fields.integer("intermediate_size"),
                vocab_size=fields.integer("vocab_size", defaults.get("vocab_size")),
                context_len=context_len,
                rms_eps=fields.number("rms_norm_eps", 1e-6),
                tie_embeddings=fields.flag("tie_word_embeddings", self._is_gemma),
                activation=self._activation(),
                attention_bias=self._family == "qwen2",
                qk_norm=self._family in ("qwen3", "gemma3"),
                post_norms=self._is_gemma,
                embedding_scale=hidden_size**0.5 if self._is_gemma else 1.0,
                attention_scale=self._attention_scale(),
                attention_softcap=self._softcap("attn_logit_softcapping", 50.0),
                logit_softcap=self._softcap("final_logit_softcapping", 30.0),
                sliding_window=window,
                layer_is_sliding=is_sliding,
                **read_rope(fields, self._family, head_dim, context_len),
            )
        except ValueError as error:
            raise fields.error(str(error)) from error

    def _reject_unsupported(self) -> None:
        fields = self._fields
        fields.forbid_unless("attention_bias", False, *([True] if self._family == "qwen2" else []))
        fields.forbid_unless("mlp_bias", False)
        fields.forbid_unless("use_bidirectional_attention", False)
        fields.forbid_unless("num_local_experts", 0, 1)

    def _default_head_dim(self, hidden_size: int, num_heads: int) -> int:
        if self._is_gemma:
            return 256
        return 128 if self._family == "qwen3" else hidden_size // num_heads

    def _activation(self) -> Activation:
        fields = self._fields
        keys = ("hidden_activation", "hidden_act") if self._is_gemma else ("hidden_act",)
        key = next((key for key in keys if key in fields), keys[0])
        name = fields.text(key, "gelu_pytorch_tanh" if self._is_gemma else "silu")
        fields.forbid_unless(key, *(n for n in _ACTIVATIONS if self._is_gemma or n != "gelu"))
        return _ACTIVATIONS[name]

    def _attention_scale(self) -> float | None:
        if not self._is_gemma:
            return None
        scalar: float = self._fields.number("query_pre_attn_scalar", 256.0)
        if not scalar > 0:
            raise self._fields.error(f"query_pre_attn_scalar is {scalar}, expected above 0")
        return 1 / math.sqrt(scalar)

    def _softcap(self, key: str, default: float) -> float | None:
        """Gemma 2 caps unless the value is null; Gemma 3 only caps if there is a number."""
        if not self._is_gemma:
            return None
        if self._family == "gemma2" and not self._fields.is_written(key):
            return default
        return self._fields.optional_number(key)

    def _windows(self, num_layers: int, context_len: int) -> tuple[int | None, tuple[bool, ...]]:
        """(window, sliding layers). A window as long as the context is ignored, unless sliding
        layers also have a different RoPE."""
        fields = self._fields
        window = self._window()
        if window is None:
            return None, ()
        is_sliding = self._sliding_layers(num_layers)
        if not any(is_sliding) or (window >= context_len and self._family != "gemma3"):
            return None, ()
        if len(is_sliding) != num_layers:
            raise fields.error(
                f"layer_types has {len(is_sliding)} entries, expected {num_layers} "
                "(num_hidden_layers)"
            )
        return window, is_sliding

    def _window(self) -> int | None:
        fields = self._fields
        if self._family == "llama":
            return None
        if self._family in ("qwen2", "qwen3"):
            in_use = fields.flag("use_sliding_window", False)
            return fields.integer("sliding_window", 4096) if in_use else None
        if self._is_gemma or (
            self._family == "mistral" and not fields.is_written("sliding_window")
        ):
            return fields.integer("sliding_window", 4096)
        return fields.optional_integer("sliding_window")

    def _sliding_layers(self, num_layers: int) -> tuple[bool, ...]:
        fields = self._fields
        if self._family in ("mistral", "phi3"):
            return (True,) * num_layers
        if "layer_types" in fields:
            types = fields.get("layer_types")
            known = {"sliding_attention": True, "full_attention": False}
            if not isinstance(types, list) or not all(
                isinstance(name, str) and name in known for name in types
            ):
                raise fields.error(f"layer_types is not a list of {' and '.join(known)}")
            return tuple(known[cast(str, name)] for name in types)
        if self._family == "gemma2":
            return tuple(layer % 2 == 0 for layer in range(num_layers))
        if self._family == "gemma3":
            pattern = fields.integer("sliding_window_pattern", 6)
            return tuple((layer + 1) % pattern != 0 for layer in range(num_layers))
        first = fields.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise fields.error(f"max_window_layers is {first!r:.80}, expected an integer")
        return tuple(layer >= first for layer in range(num_layers))
