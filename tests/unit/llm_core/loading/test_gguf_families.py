"""GGUF files of every architecture give transformers' logits.

The files are written here from a Hugging Face model the way llama.cpp's converter does it (tensor
names from the gguf package; llama's q/k rows permuted, Gemma's norms made whole, Phi-3 fused), and,
where transformers reads such files itself, its reading is a second opinion.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import gguf
import gguf.quants
import numpy as np
import pytest
import torch
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from llm_core.config import FrequencyFactors, LinearRope, LongRope, YarnRope
from llm_core.loading.gguf.model import open_gguf_model
from llm_core.model.backend import RunnerOptions
from llm_core.model.runner import ModelRunner
from llm_core.quant.gguf_blocks import BLOCK_BYTES, BlockKind, BlockTensor, block_len
from tests.support.hf_models import random_ids, save_model, their_logits
from tests.support.random_llama import run_chunk
from tests.unit.llm_core.loading.test_quant_linear import random_blocks

TOLERANCE = {"atol": 5e-5, "rtol": 5e-5}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6}
Edit = Callable[[gguf.GGUFWriter], object]


def nothing(writer: gguf.GGUFWriter) -> None:
    """Leaves the file as it is."""


def convert(model: Any, path: Path, arch: str, *, edit: Edit = nothing) -> Path:
    """Writes ``model`` as llama.cpp's converter would, in float32."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    edit(writer)
    kinds = {getattr(gguf.MODEL_ARCH, arch.upper())}
    names = gguf.get_tensor_name_map(kinds.pop(), config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        base, _, suffix = name.rpartition(".")
        values = tensor.numpy()
        if arch == "llama" and base.endswith(("q_proj", "k_proj")):
            values = pairs(values, head_dim)
        if arch.startswith("gemma") and base.endswith("norm"):
            values = values + 1
        writer.add_tensor(f"{names.get_name(base)}.{suffix}", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def pairs(values: np.ndarray[Any, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """Halves of each head to interleaved pairs."""
    halves = values.reshape(-1, 2, head_dim // 2, values.shape[1])
    return halves.swapaxes(1, 2).reshape(values.shape)


def our_logits(path: Path, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    with open_gguf_model(path) as model:
        runner = ModelRunner(
            model.config, model.weights, RunnerOptions(**{"num_blocks": 8} | options)
        )
    return run_chunk(runner, ids)


def llama3_factors(writer: gguf.GGUFWriter) -> None:
    """What the converter stores for rope_type llama3: 1 for short waves, 8 for long ones."""
    frequencies = 500.0 ** (-np.arange(0, 16, 2) / 16)
    turns = frequencies * 32 / (2 * np.pi)
    kept = np.clip((turns - 1) / 3, 0, 1)
    factors = (1 / (kept + (1 - kept) / 8)).astype(np.float32)
    writer.add_tensor("rope_freqs.weight", factors)


def yarn(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(32)


def gemma2(writer: gguf.GGUFWriter) -> None:
    writer.add_sliding_window(6)
    writer.add_attn_logit_softcapping(2.0)
    writer.add_final_logit_softcapping(3.0)


CASES: dict[str, tuple[str, str, dict[str, Any], Edit]] = {
    "llama": ("llama", "llama", {}, nothing),
    "llama_tied": ("llama", "llama", {"tie_word_embeddings": True}, nothing),
    "llama3": (
        "llama",
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
        llama3_factors,
    ),
    "mistral": ("llama", "mistral", {"sliding_window": None}, nothing),
    "qwen2": ("qwen2", "qwen2", {}, nothing),
    "qwen2_yarn": (
        "qwen2",
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
        yarn,
    ),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 16}, nothing),
    "gemma2": (
        "gemma2",
        "gemma2",
        GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        gemma2,
    ),
    "gemma3": (
        "gemma3",
        "gemma3_text",
        GEMMA | {"num_hidden_layers": 7},
        lambda writer: writer.add_sliding_window(6),
    ),
    "phi3": ("phi3", "phi3", {"sliding_window": 9}, lambda writer: writer.add_sliding_window(9)),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(tmp_path: Path, case: str) -> None:
    arch, model_type, changes, edit = CASES[case]
    model = save_model(tmp_path, model_type, **changes)
    path = convert(model, tmp_path / "m.gguf", arch, edit=edit)
    ids = random_ids(101, 40)
    torch.testing.assert_close(our_logits(path, ids), their_logits(model, ids), **TOLERANCE)


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"])
def test_transformers_reads_the_same_file_equally(tmp_path: Path, case: str) -> None:
    """Its reader undoes what the converter did; ours must come to the same logits."""
    arch, model_type, changes, edit = CASES[case]
    model = save_model(tmp_path, model_type, **changes)
    path = convert(model, tmp_path / "m.gguf", arch, edit=edit)
    for parameter in model.parameters():
        parameter.data.zero_()
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    model.load_state_dict(read["tensors"], strict=not model.config.tie_word_embeddings)
    ids = random_ids(101, 40)
    torch.testing.assert_close(our_logits(path, ids), their_logits(model, ids), **TOLERANCE)


@pytest.mark.parametrize(("max_context", "length"), [(30, 30), (64, 50)])
def test_longrope(tmp_path: Path, max_context: int, length: int) -> None:
    short = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7]
    long = [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0]
    rope = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    model = save_model(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=32)

    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_orig_ctx_len(32)
        writer.add_tensor("rope_factors_short.weight", np.float32(short))
        writer.add_tensor("rope_factors_long.weight", np.float32(long))

    path = convert(model, tmp_path / "m.gguf", "phi3", edit=edit)
    ids = random_ids(101, length)
    ours = our_logits(path, ids, max_context=max_context)
    torch.testing.assert_close(ours, their_logits(model, ids), **TOLERANCE)


def test_scalings_are_read(tmp_path: Path) -> None:
    model = save_model(tmp_path, "llama")

    def config(edit: Edit) -> Any:
        with open_gguf_model(convert(model, tmp_path / "m.gguf", "llama", edit=edit)) as opened:
            return opened.config

    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    assert config(nothing).rope_scaling is None
    assert config(linear).rope_scaling == LinearRope(factor=4.0)
    assert isinstance(config(yarn).rope_scaling, YarnRope)
    assert isinstance(config(llama3_factors).rope_scaling, FrequencyFactors)
    assert not isinstance(config(yarn).rope_scaling, LongRope)


@pytest.mark.parametrize("layers", [26, 46])
def test_gemma_27b_attention_scale(tmp_path: Path, layers: int) -> None:
    sizes = {"num_hidden_layers": layers, "hidden_size": 16, "intermediate_size": 8}
    model = save_model(tmp_path, "gemma2", **(GEMMA | sizes))
    with open_gguf_model(convert(model, tmp_path / "m.gguf", "gemma2", edit=gemma2)) as opened:
        expected = 16**-0.5 if layers == 26 else (16 / 4) ** -0.5
        assert opened.config.score_scale == pytest.approx(expected)


def stored_as(model: Any, path: Path, arch: str, kind: BlockKind) -> Path:
    """``model`` with matrices of random blocks of ``kind``, written so; it gets their values."""
    quantised = gguf.GGMLQuantizationType[kind]
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), 9)
    rows = {}
    for seed, (name, tensor) in enumerate(model.state_dict().items()):
        if tensor.ndim == 2:
            num_out, num_in = tensor.shape
            shape = (num_out, num_in // block_len(kind), BLOCK_BYTES[kind])
            raw = random_blocks(kind, shape, seed).blocks.flatten(1).numpy()
            tensor.copy_(torch.from_numpy(gguf.quants.dequantize(raw, quantised)))
            rows[f"{names.get_name(name.rpartition('.')[0])}.weight"] = raw
    plain_add = gguf.GGUFWriter.add_tensor

    def add(self: Any, name: str, values: Any) -> None:
        if name not in rows:
            plain_add(self, name, values)
        elif arch == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            head_rows = rows[name].reshape(-1, 2, 32, rows[name].shape[1]).swapaxes(1, 2)
            plain_add(self, name, head_rows.reshape(rows[name].shape), raw_dtype=quantised)
        else:
            plain_add(self, name, rows[name], raw_dtype=quantised)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tensor", add)
        return convert(model, path, arch)


@pytest.mark.parametrize("kind", get_args(BlockKind))
@pytest.mark.parametrize("arch", ["llama", "qwen2", "phi3"])
def test_quantised_rows_are_sliced_and_permuted_in_place(
    tmp_path: Path, kind: BlockKind, arch: str
) -> None:
    """Every kind, rows fused and rows to be interleaved: transformers' logits of the values that
    the gguf package finds in the bytes."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    model = save_model(tmp_path, arch, **sizes)
    path = stored_as(model, tmp_path / "q.gguf", arch, kind)
    with open_gguf_model(path) as opened:
        query = opened.weights["layers.0.query"]
        assert isinstance(query, BlockTensor)
        assert query.kind == kind
    ids = random_ids(101, 20)
    torch.testing.assert_close(
        our_logits(path, ids), their_logits(model, ids), atol=1e-4, rtol=1e-4
    )
