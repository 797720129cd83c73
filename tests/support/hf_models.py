"""Tiny random models of every family, saved by transformers, and its logits of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from llm_core.loading.hf.model import open_hf_model
from llm_core.model.backend import RunnerOptions
from llm_core.model.runner import ModelRunner
from tests.support.random_llama import run_chunk

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def save_model(directory: Path, model_type: str, *, seed: int = 0, **changes: Any) -> Any:
    """A float32 model of ``model_type``, saved to ``directory``; returned ready for inference.

    All parameters are random, norms and biases too, so that each of them matters.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **(SIZES | changes))
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(0.3 * values)
            else:
                parameter.copy_(values / parameter.shape[-1] ** 0.5)
    model.save_pretrained(directory)
    return model


def random_ids(vocab_size: int, length: int, seed: int = 7) -> torch.Tensor:
    """int64 [length]."""
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed))


def their_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """float32 [T, vocab]."""
    with torch.inference_mode():
        logits: torch.Tensor = model(ids.unsqueeze(0), use_cache=False).logits[0]
    return logits


def our_runner(directory: Path, **options: Any) -> ModelRunner:
    """The model in ``directory``, in float32."""
    with open_hf_model(directory) as model:
        return ModelRunner(
            model.config, model.weights, RunnerOptions(**{"num_blocks": 16} | options)
        )


def our_logits(directory: Path, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """float32 [T, vocab]."""
    return run_chunk(our_runner(directory, **options), ids)
