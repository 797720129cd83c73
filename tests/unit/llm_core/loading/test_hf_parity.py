"""Logits of all families and options equal those of transformers for the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from llm_core.config import LinearRope
from llm_core.loading.fields import Fields
from llm_core.loading.hf.config import read_hf_config
from tests.support.hf_models import our_logits, our_runner, random_ids, save_model, their_logits
from tests.support.random_llama import run_chunk

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0],
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 6}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_gqa": ("llama", {}),
    "llama_mha": ("llama", {"num_key_value_heads": 4}),
    "llama_mqa": ("llama", {"num_key_value_heads": 1}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_wide_heads": ("llama", {"head_dim": 24, "rms_norm_eps": 1e-3}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama_linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.5}}),
    "llama_dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama_yarn": ("llama", {"rope_parameters": YARN}),
    "llama_yarn_mscale": (
        "llama",
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.3}},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen2_yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen2_windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_tied_wide": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", GEMMA),
    "gemma2_caps": (
        "gemma2",
        GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": ("gemma3_text", GEMMA),
    "gemma3_scaled": (
        "gemma3_text",
        GEMMA
        | {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 9000.0},
            },
            "tie_word_embeddings": False,
        },
    ),
    "phi3": ("phi3", {}),
    "phi3_window": ("phi3", {"sliding_window": 9, "num_key_value_heads": 4}),
    "phi3_part_turns": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ),
}
# float32 sums in another order, after three layers.
TOLERANCE = {"atol": 5e-5, "rtol": 5e-5}
LEN = 40


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(tmp_path: Path, case: str) -> None:
    model_type, changes = CASES[case]
    model = save_model(tmp_path, model_type, **changes)
    ids = random_ids(model.config.vocab_size, LEN)
    expected = their_logits(model, ids)
    torch.testing.assert_close(our_logits(tmp_path, ids), expected, **TOLERANCE)
    # The same, a part after the other: windows and tables by position, not by row.
    runner = our_runner(tmp_path)
    parts = [run_chunk(runner, ids[:13])]
    parts += [run_chunk(runner, ids[at : at + 1], start=at) for at in range(13, 16)]
    parts.append(run_chunk(runner, ids[16:], start=16))
    torch.testing.assert_close(torch.cat(parts), expected, **TOLERANCE)


@pytest.mark.parametrize(("max_context", "length"), [(30, 30), (64, 50)])
def test_longrope_by_context(tmp_path: Path, max_context: int, length: int) -> None:
    """Short factors for a short context; long ones, like transformers' beyond 32 tokens."""
    model = save_model(tmp_path, "phi3", rope_parameters=LONG, original_max_position_embeddings=32)
    ids = random_ids(101, length)
    ours = our_logits(tmp_path, ids, max_context=max_context)
    torch.testing.assert_close(ours, their_logits(model, ids), **TOLERANCE)


def old_spelling(directory: Path, **changes: Any) -> None:
    """config.json as files from before rope_parameters have it."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config.pop("rope_parameters")
    file.write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("llama3", {"rope_theta": 500.0, "rope_scaling": LLAMA3}),
        (
            "llama_yarn",
            {
                "rope_theta": 1000.0,
                "rope_scaling": {"type": "yarn"}
                | {"factor": 4.0, "original_max_position_embeddings": 32},
            },
        ),
        ("llama_linear", {"rope_scaling": {"type": "linear", "factor": 2.5}}),
        ("qwen2", {"rope_theta": 10000.0, "rope_scaling": None}),
        ("phi3_part_turns", {"partial_rotary_factor": 0.5}),
        (
            "gemma3_scaled",
            {
                "rope_theta": 9000.0,
                "rope_local_base_freq": 100.0,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        ),
    ],
)
def test_old_rope_schema(tmp_path: Path, case: str, changes: dict[str, Any]) -> None:
    model_type, options = CASES[case]
    model = save_model(tmp_path, model_type, **options)
    old_spelling(tmp_path, **changes)
    ids = random_ids(101, LEN)
    torch.testing.assert_close(our_logits(tmp_path, ids), their_logits(model, ids), **TOLERANCE)


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_old_names_of_longrope(tmp_path: Path, kind: str) -> None:
    model = save_model(tmp_path, "phi3", rope_parameters=LONG, original_max_position_embeddings=32)
    old = {"type": kind} | {name: LONG[name] for name in ("short_factor", "long_factor")}
    old_spelling(tmp_path, rope_scaling=old)
    ids = random_ids(101, 50)
    ours = our_logits(tmp_path, ids, max_context=64)
    torch.testing.assert_close(ours, their_logits(model, ids), **TOLERANCE)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_language_part_of_a_vision_model(tmp_path: Path, prefix: str) -> None:
    """Gemma 3's larger files: text_config, other names, and a vision tower beside."""
    model = save_model(tmp_path, "gemma3_text", **GEMMA)
    file = tmp_path / "model.safetensors"
    tensors = {prefix + k.removeprefix("model."): v for k, v in load_file(file).items()}
    save_file(tensors | {"vision_tower.x.weight": torch.ones(3)}, file)
    text = json.loads((tmp_path / "config.json").read_text())
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    ids = random_ids(101, LEN)
    torch.testing.assert_close(our_logits(tmp_path, ids), their_logits(model, ids), **TOLERANCE)


def test_gemma_3_defaults(tmp_path: Path) -> None:
    published = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    ours = read_hf_config(Fields("config.json", published))
    theirs = Gemma3TextConfig(**published)
    assert ours.vocab_size == theirs.vocab_size
    assert (ours.num_heads, ours.num_kv_heads) == (8, theirs.num_key_value_heads)
    assert (ours.head_dim, ours.context_len) == (theirs.head_dim, theirs.max_position_embeddings)
    assert ours.rope_theta == theirs.rope_parameters["full_attention"]["rope_theta"]
    assert ours.local_rope_theta == theirs.rope_parameters["sliding_attention"]["rope_theta"]
    assert ours.rope_scaling == LinearRope(factor=8.0)
    sliding = tuple(kind == "sliding_attention" for kind in theirs.layer_types)
    assert ours.layer_is_sliding == sliding
    assert ours.tie_embeddings


def test_options_matter(tmp_path: Path) -> None:
    """The parity above would not notice an option that both ignore: each changes the logits."""
    plain = save_model(tmp_path, "gemma2", **GEMMA)
    ids = random_ids(101, LEN)
    base = their_logits(plain, ids)
    for change in (
        {"attn_logit_softcapping": 2.0},
        {"final_logit_softcapping": 3.0},
        {"sliding_window": 3},
        {"query_pre_attn_scalar": 40},
    ):
        changed = save_model(tmp_path, "gemma2", **(GEMMA | change))
        assert (their_logits(changed, ids) - base).abs().max() > 1e-2, change


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files(tmp_path: Path, dtype: torch.dtype) -> None:
    save_model(tmp_path, "qwen2").to(dtype).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = random_ids(101, LEN)
    expected = their_logits(model, ids)
    torch.testing.assert_close(our_logits(tmp_path, ids), expected, **TOLERANCE)


def test_shards_equal_one_file(tmp_path: Path) -> None:
    model = save_model(tmp_path / "one", "llama")
    model.save_pretrained(tmp_path / "many", max_shard_size="60KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    ids = random_ids(101, LEN)
    ours = our_logits(tmp_path / "many", ids)
    assert torch.equal(ours, our_logits(tmp_path / "one", ids))
