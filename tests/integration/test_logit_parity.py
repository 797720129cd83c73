"""Our decoder against Hugging Face transformers' Llama, on the same dequantised weights.

transformers and the gguf package's own dequantisation are the independent witnesses; our loader,
kernels and cache are what is judged. Float32 throughout, except where drift itself is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from llm_core.config import ModelConfig
from llm_core.loading.gguf.container import read_metadata
from llm_core.loading.gguf.model import open_gguf_model
from llm_core.messages import EngineConfig
from llm_core.model.backend import RunnerOptions
from llm_core.model.runner import ModelRunner
from llm_core.quant.formats import BlockTensor, to_float
from llm_core.tokenizer.tokenizer import Tokenizer
from tests.support.random_llama import (
    random_tokens,
    random_weights,
    run_chunk,
    tiny_config,
    transformers_llama,
)

pytest.importorskip("transformers", reason="transformers is the witness of these tests")

MAX_LOGIT_DIFFERENCE = 1e-3
NUM_POSITIONS = 200
TEXT = (
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\nThe sky appears blue "
    "because molecules of air scatter short waves of sunlight more than long ones. That is why "
    "sunsets are red: by then the light has crossed so much air that most of the blue has gone "
    "elsewhere. In 1871 Lord Rayleigh worked out that the strength of scattering grows with the "
    "fourth power of frequency, 1/λ⁴.<|im_end|>\n<|im_start|>user\nAnd why is it not violet? "
    "Tell me in two sentences, please, and then name three other things that are blue for the same "
    "reason; 12.5% of my class believed it was the sea.<|im_end|>\n<|im_start|>assistant\n"
)


@torch.inference_mode()
def their_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """float32 [T, vocab] by transformers."""
    logits: torch.Tensor = model(tokens.unsqueeze(0)).logits[0]
    return logits


def max_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max())


TINY = {
    "gqa": tiny_config(),
    "mha": tiny_config(num_kv_heads=4),
    "mqa": tiny_config(num_kv_heads=1),
    "tied": tiny_config(tie_embeddings=True),
    "smol_shape": tiny_config(hidden_size=72, num_heads=9, num_kv_heads=3, head_dim=8),
    "head_dim_6": tiny_config(head_dim=6),
    "heads_wider_than_hidden": tiny_config(hidden_size=48, head_dim=34, num_heads=6),
    "deep": tiny_config(num_layers=7),
    "theta_and_eps": tiny_config(rope_theta=1_000_000.0, rms_eps=1e-2),
    "small_theta": tiny_config(rope_theta=10.0),
}


@pytest.mark.parametrize("config", TINY.values(), ids=TINY.keys())
def test_random_models_equal_transformers(config: ModelConfig) -> None:
    weights = random_weights(config, seed=7)
    tokens = random_tokens(config, config.context_len)
    theirs = their_logits(transformers_llama(config, weights), tokens)
    runner = ModelRunner(config, weights, RunnerOptions(weight_format="float32"))
    assert max_difference(run_chunk(runner, tokens), theirs) < 1e-4
    steps = [run_chunk(runner, tokens[i : i + 1], start=i) for i in range(40)]
    assert max_difference(torch.cat(steps), theirs[:40]) < 1e-4


@pytest.fixture(scope="module")
def exact(llm_model_path: Path) -> ModelRunner:
    return ModelRunner.load(
        EngineConfig(model_path=str(llm_model_path), max_sequences=1, max_context=512),
        weight_format="float32",
    )


@pytest.fixture(scope="module")
def witness(llm_model_path: Path, exact: ModelRunner) -> Iterator[Any]:
    import gguf.quants

    weights = {}
    with open_gguf_model(Path(llm_model_path)) as model:
        for name, weight in model.weights.items():
            if isinstance(weight, BlockTensor):
                kind = gguf.GGMLQuantizationType[weight.kind]
                raw = weight.blocks.flatten(1).numpy()
                weights[name] = torch.from_numpy(gguf.quants.dequantize(raw, kind))
            else:
                weights[name] = to_float(weight)
    yield transformers_llama(exact.config, weights)


@pytest.fixture(scope="module")
def tokens(llm_model_path: Path) -> torch.Tensor:
    """int64 [200]: a conversation with control tokens, digits and letters of several bytes."""
    metadata = read_metadata(llm_model_path)
    vocabulary = {text: index for index, text in enumerate(metadata["tokenizer.ggml.tokens"])}
    tokenizer = Tokenizer.from_gguf(metadata)
    ids: list[int] = []
    for part in TEXT.replace("<|im_end|>", "<|im_start|>\0").split("<|im_start|>"):
        if part.startswith("\0"):
            ids += [vocabulary["<|im_end|>"], *tokenizer.encode(part[1:])]
        elif part:
            ids += [vocabulary["<|im_start|>"], *tokenizer.encode(part)]
    while len(ids) < NUM_POSITIONS:
        ids += ids
    return torch.tensor(ids[:NUM_POSITIONS])


def test_logits_equal_transformers(exact: ModelRunner, witness: Any, tokens: torch.Tensor) -> None:
    theirs = their_logits(witness, tokens)
    assert theirs.shape == (NUM_POSITIONS, exact.config.vocab_size)
    whole = max_difference(run_chunk(exact, tokens), theirs)
    chunks = [run_chunk(exact, tokens[i : i + 64], start=i) for i in range(0, NUM_POSITIONS, 64)]
    stepped = [run_chunk(exact, tokens[i : i + 1], start=i) for i in range(60)]
    print(f"max |logit difference|: whole {whole:.2e}")
    assert whole < MAX_LOGIT_DIFFERENCE
    assert max_difference(torch.cat(chunks), theirs) < MAX_LOGIT_DIFFERENCE
    assert max_difference(torch.cat(stepped), theirs[:60]) < MAX_LOGIT_DIFFERENCE


def test_greedy_text_equals_transformers(
    exact: ModelRunner, witness: Any, tokens: torch.Tensor
) -> None:
    prompt = tokens[:100]
    with torch.inference_mode():
        theirs = witness.generate(prompt.unsqueeze(0), do_sample=False, max_new_tokens=64)
    assert greedy(exact, prompt, 64) == theirs[0, 100:].tolist()


def greedy(runner: ModelRunner, prompt: torch.Tensor, num_tokens: int) -> list[int]:
    chosen = [int(run_chunk(runner, prompt)[-1].argmax())]
    while len(chosen) < num_tokens:
        start = prompt.shape[0] + len(chosen) - 1
        logits = run_chunk(runner, torch.tensor(chosen[-1:]), start=start)
        chosen.append(int(logits[0].argmax()))
    return chosen


# Measured on this text with AVX2 kernels: float16 0.04 and 199 of 200, int4 0.78 and 198 of 200.
@pytest.mark.parametrize(
    ("weight_format", "max_drift", "min_agreement"), [("float16", 0.2, 197), ("int4", 2.5, 190)]
)
def test_drift_of_faster_formats(
    exact: ModelRunner,
    llm_model_path: Path,
    tokens: torch.Tensor,
    weight_format: str,
    max_drift: float,
    min_agreement: int,
) -> None:
    """How far logits move, and at how many positions the most likely token stays."""
    runner = ModelRunner.load(
        EngineConfig(model_path=str(llm_model_path), max_sequences=1, max_context=512),
        weight_format=weight_format,
    )
    expected = run_chunk(exact, tokens)
    # By fours: within the row counts for which the 4-bit form is used.
    steps = [run_chunk(runner, tokens[i : i + 4], start=i) for i in range(0, NUM_POSITIONS, 4)]
    drift = max_difference(torch.cat(steps), expected)
    agreement = int((torch.cat(steps).argmax(-1) == expected.argmax(-1)).sum())
    print(f"{weight_format}: max |logit difference| {drift:.3f}, top token {agreement} of 200")
    assert drift < max_drift
    assert agreement >= min_agreement
