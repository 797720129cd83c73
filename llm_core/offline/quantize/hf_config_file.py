"""Generates config.json for a model from a GGUF file; the inverse of the loader's ``hf.config``.

The config.json of a Hugging Face directory is kept instead.
"""

from __future__ import annotations

from typing import Any

from llm_core.config import LinearRope, Llama3Rope, LongRope, ModelConfig, YarnRope

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}


def config_file(config: ModelConfig, bos_id: int | None, eos_ids: list[int]) -> dict[str, Any]:
    """The content of config.json."""
    family = config.family
    written: dict[str, Any] = {
        "architectures": [_CLASSES[family]],
        "model_type": "gemma3_text" if family == "gemma3" else family,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_len,
        "rms_norm_eps": config.rms_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope_theta,
        "bos_token_id": bos_id,
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids or None,
    }
    is_gemma = family in ("gemma2", "gemma3")
    written["hidden_activation" if is_gemma else "hidden_act"] = (
        "gelu_pytorch_tanh" if is_gemma else "silu"
    )
    if is_gemma:
        written["query_pre_attn_scalar"] = 1 / config.score_scale**2
        written["attn_logit_softcapping"] = config.attention_softcap
        written["final_logit_softcapping"] = config.logit_softcap
    if config.local_rope_theta is not None:
        written["rope_local_base_freq"] = config.local_rope_theta
    if config.num_rotated != config.head_dim:
        written["partial_rotary_factor"] = config.num_rotated / config.head_dim
    return written | layer_settings(config) | _windows(config) | _scaling(config)


def layer_settings(config: ModelConfig) -> dict[str, Any]:
    """The per-layer settings, which pruning changes."""
    written: dict[str, Any] = {"num_hidden_layers": config.num_layers}
    if config.layer_is_sliding and config.family not in ("mistral", "phi3"):
        kinds = {True: "sliding_attention", False: "full_attention"}
        written["layer_types"] = [kinds[is_sliding] for is_sliding in config.layer_is_sliding]
    return written


def _windows(config: ModelConfig) -> dict[str, Any]:
    written: dict[str, Any] = {"sliding_window": config.sliding_window}
    if config.sliding_window is None:
        return written if config.family in ("mistral", "phi3") else {}
    if config.family in ("qwen2", "qwen3"):
        written["use_sliding_window"] = True
    return written


def _scaling(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    if scaling is None:
        return {}
    if isinstance(scaling, LinearRope):
        return {"rope_scaling": {"rope_type": "linear", "factor": scaling.factor}}
    if isinstance(scaling, YarnRope):
        rope: dict[str, Any] = {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_context_len,
            "attention_factor": scaling.attention_factor,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
        }
        return {"rope_scaling": rope}
    if isinstance(scaling, Llama3Rope):
        rope = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context_len,
        }
        return {"rope_scaling": rope}
    if isinstance(scaling, LongRope):
        short, long = scaling.short_factors, scaling.long_factors
        original_len, magnitude = scaling.original_context_len, scaling.attention_factor
    else:  # GGUF files of Llama 3 have one list of divisors for all lengths
        short = long = scaling.factors
        original_len, magnitude = config.context_len, 1.0
    rope = {
        "rope_type": "longrope",
        "short_factor": list(short),
        "long_factor": list(long),
        "attention_factor": magnitude,
    }
    return {"rope_scaling": rope, "original_max_position_embeddings": original_len}
