"""Random Llama models in memory, and the same model as Hugging Face transformers runs it."""

from __future__ import annotations

from typing import Any

import torch

from llm_core.batch import ForwardBatch, Segment
from llm_core.config import ModelConfig, YarnRope
from llm_core.loading.weights import weight_shapes
from llm_core.model.backend import RunnerOptions
from llm_core.model.runner import ModelRunner

# Changes to ``tiny_config`` that make it a small one of each kind.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied, narrow": {"tie_embeddings": True, "hidden_size": 40, "intermediate_size": 50},
    "multi-query": {"num_heads": 9, "num_kv_heads": 1},
    "heads for each": {"num_heads": 3, "num_kv_heads": 3, "head_dim": 24},
    "qwen2": {"attention_bias": True, "tie_embeddings": True},
    "qwen3": {"qk_norm": True, "head_dim": 32},
    "gemma2": {
        "post_norms": True,
        "activation": "gelu_tanh",
        "embedding_scale": 8.0,
        "attention_scale": 0.2,
        "attention_softcap": 5.0,
        "logit_softcap": 3.0,
        "sliding_window": 9,
        "layer_is_sliding": (True, False),
        "tie_embeddings": True,
    },
    "gemma3": {
        "num_layers": 3,
        "post_norms": True,
        "qk_norm": True,
        "activation": "gelu_tanh",
        "sliding_window": 20,
        "layer_is_sliding": (False, True, True),
        "local_rope_theta": 100.0,
    },
    "phi3": {
        "rotary_dim": 12,
        "rope_scaling": YarnRope(factor=2.0, original_context_len=64, attention_factor=1.1),
    },
}


def tiny_config(**changes: Any) -> ModelConfig:
    """Two layers, 4 heads over 2 key/value heads of width 16, 97 words."""
    fields: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 97,
        "context_len": 128,
    }
    return ModelConfig(**(fields | changes))


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights scaled so that activations keep their size; norms differ from 1."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in weight_shapes(config).items():
        values = torch.randn(shape, generator=generator)
        weights[name] = values / shape[-1] ** 0.5 if len(shape) == 2 else 1 + 0.2 * values
    return weights


def tiny_runner(config: ModelConfig | None = None, **options: Any) -> ModelRunner:
    """A runner of a random model; float32 and room for two contexts unless told otherwise."""
    config = config or tiny_config()
    return ModelRunner(config, random_weights(config), RunnerOptions(**options))


def blocks(number: int, config: ModelConfig | None = None) -> tuple[int, ...]:
    """Block table of the ``number``-th sequence, when each has consecutive blocks for a whole
    context of its own."""
    count = -(-(config or tiny_config()).context_len // 16)
    return tuple(range(number * count, (number + 1) * count))


def random_tokens(config: ModelConfig, length: int, seed: int = 1) -> torch.Tensor:
    """int64 [length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (length,), generator=generator)


def run_chunk(
    runner: ModelRunner,
    tokens: torch.Tensor,
    *,
    block_ids: tuple[int, ...] | None = None,
    start: int = 0,
) -> torch.Tensor:
    """Logits of all ``tokens`` (a copy), computed as one segment; in the first blocks, if not told
    otherwise."""
    if block_ids is None:
        block_ids = tuple(range(-(-(start + tokens.shape[0]) // runner.block_size)))
    segment = Segment(block_ids, start, tokens.shape[0])
    batch = ForwardBatch(tokens, (segment,), torch.arange(tokens.shape[0]))
    return runner.forward(batch).logits.clone()


def transformers_llama(config: ModelConfig, weights: dict[str, torch.Tensor]) -> Any:
    """A float32 LlamaForCausalLM with our weights, RoPE rows put into its order of halves."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.context_len,
            rms_norm_eps=config.rms_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tie_embeddings,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=None,
        )
    )
    state = {
        "model.embed_tokens.weight": weights["embedding"],
        "model.norm.weight": weights["final_norm"],
        "lm_head.weight": weights["embedding" if config.tie_embeddings else "head"],
    }
    names = {
        "attention_norm": "input_layernorm",
        "query": "self_attn.q_proj",
        "key": "self_attn.k_proj",
        "value": "self_attn.v_proj",
        "attention_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }
    for layer in range(config.num_layers):
        for ours, theirs in names.items():
            weight = weights[f"layers.{layer}.{ours}"]
            if ours in ("query", "key"):
                weight = _halves(weight, config.head_dim)
            state[f"model.layers.{layer}.{theirs}.weight"] = weight
    model.load_state_dict(state)
    return model.eval()


def _halves(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of each head from pairs (2j, 2j + 1) to halves (j, j + head_dim / 2)."""
    pairs = weight.view(-1, head_dim // 2, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)
