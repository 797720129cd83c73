"""Writes a model, quantised or not, as a Hugging Face directory.

Quantised matrices use the established formats: GPTQ (AutoGPTQ), AWQ (AutoAWQ "gemm"), and
compressed-tensors for INT8 and FP8. Other tensors become float16.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from llm_core.config import ModelConfig
from llm_core.errors import InvalidRequestError
from llm_core.loading import (
    LAYER_NAMES,
    POST_NORM_NAMES,
    TURNING,
    interleaved,
    read_json,
    read_metadata,
    write_safetensors,
)
from llm_core.offline.quantize.hf_config_file import config_file, layer_settings
from llm_core.offline.quantize.hf_tokenizer_files import tokenizer_files
from llm_core.offline.quantize.packing import awq_tensors, gptq_tensors, int8_tensors
from llm_core.offline.quantize.rounding import Grid, RoundedMatrix
from llm_core.quant import quantize_float8

Container = Literal["", "gptq", "awq", "int8", "fp8"]
_COPIED = (
    *("tokenizer.json", "tokenizer_config.json", "generation_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
)
_FUSED = {
    **dict.fromkeys(("query", "key", "value"), "self_attn.qkv_proj"),
    **dict.fromkeys(("gate", "up"), "mlp.gate_up_proj"),
}
_PACKERS = {"gptq": gptq_tensors, "awq": awq_tensors, "int8": int8_tensors}
_MAX_FLOAT16 = 65504.0


@dataclass(frozen=True, slots=True)
class Exported:
    """A model to write: ``weights`` by the names of ``weight_shapes``; matrices in ``rounded``
    replace those of the same name. ``settings`` becomes quantization_config."""

    config: ModelConfig
    weights: Mapping[str, torch.Tensor]
    container: Container = ""
    rounded: Mapping[str, RoundedMatrix] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


def check_target(out_dir: Path) -> None:
    """Raises InvalidRequestError unless a directory can be created at ``out_dir``."""
    if out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        raise InvalidRequestError(f"{out_dir} exists already and is not an empty directory")
    if not out_dir.absolute().parent.is_dir():
        raise InvalidRequestError(f"{out_dir.absolute().parent} is not a directory")


def export_model(out_dir: Path, source: Path, exported: Exported) -> None:
    """Writes the directory ``out_dir`` atomically. The tokenizer and, for a Hugging Face directory,
    the configuration are taken from ``source``. Raises ModelLoadError for a damaged source."""
    check_target(out_dir)
    partial = out_dir.absolute().with_name(f".{out_dir.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        config = _write_tokenizer(partial, source, exported.config)
        config |= {"torch_dtype": "float16"} | layer_settings(exported.config)
        if exported.settings:
            config["quantization_config"] = dict(exported.settings)
        _write_json(partial / "config.json", config)
        write_safetensors(partial / "model.safetensors", _tensors(exported))
        partial.replace(out_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_tokenizer(target: Path, source: Path, model_config: ModelConfig) -> dict[str, Any]:
    """Writes the tokenizer's files; returns the content of config.json."""
    if source.is_dir():
        for name in _COPIED:
            if (source / name).exists():
                shutil.copyfile(source / name, target / name)
        config = read_json(source / "config.json")
        config = dict(config.get("text_config", config))  # the language part alone is written
        config.pop("quantization_config", None)
        config.pop("dtype", None)
        return config
    files = tokenizer_files(read_metadata(source), model_config.context_len)
    for name, content in files.items():
        if isinstance(content, str):
            (target / name).write_text(content, encoding="utf-8")
        else:
            _write_json(target / name, content)
    ends = files["generation_config.json"]
    return config_file(model_config, ends.get("bos_token_id"), ends["eos_token_id"])


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _tensors(exported: Exported) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    fused: dict[str, list[torch.Tensor | RoundedMatrix]] = {}
    for name, weight in exported.weights.items():
        value = _in_hf_order(exported.config, name, exported.rounded.get(name, weight))
        base = _hf_name(exported.config, name)
        fused.setdefault(base, []).append(value)
    for base, parts in fused.items():
        is_layer_matrix = ".layers." in base and base.endswith("_proj")
        matrix = _stacked(parts)
        if isinstance(matrix, RoundedMatrix):
            pack = _PACKERS[exported.container]
            tensors |= {f"{base}.{part}": tensor for part, tensor in pack(matrix).items()}
        elif is_layer_matrix and exported.container == "fp8":
            codes, scale = quantize_float8(matrix)
            tensors |= {f"{base}.weight": codes, f"{base}.weight_scale": scale.unsqueeze(1)}
        else:
            suffix = "" if base.endswith(".bias") else ".weight"
            tensors[base + suffix] = _as_float(matrix)
    return tensors


def _hf_name(config: ModelConfig, name: str) -> str:
    """The name in Hugging Face checkpoints, without ".weight"."""
    outside = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
    if name in outside:
        return outside[name]
    _, index, part = name.split(".")
    names = LAYER_NAMES | (POST_NORM_NAMES if config.post_norms else {})
    if config.family == "phi3":
        names = names | _FUSED
    if part.endswith("_bias"):
        return f"model.layers.{index}.{names[part.removesuffix('_bias')]}.bias"
    return f"model.layers.{index}.{names[part]}"


def _in_hf_order(
    config: ModelConfig, name: str, value: torch.Tensor | RoundedMatrix
) -> torch.Tensor | RoundedMatrix:
    """As Hugging Face stores it: rotary rows in halves instead of pairs; Gemma's norms minus
    one."""
    part = name.rpartition(".")[2]
    if part in TURNING:
        num_rows = value.shape[0] if isinstance(value, torch.Tensor) else value.codes.shape[0]
        order = interleaved(num_rows // config.head_dim, config.head_dim, config.num_rotated)
        inverse = order.argsort()
        value = value[inverse] if isinstance(value, torch.Tensor) else value.select_rows(inverse)
    if part.endswith("_norm") and config.family in ("gemma2", "gemma3"):
        assert isinstance(value, torch.Tensor), "norms are plain tensors"
        return value - 1
    return value


def _stacked(parts: Sequence[torch.Tensor | RoundedMatrix]) -> torch.Tensor | RoundedMatrix:
    """The rows of all parts, which are all tensors or all rounded with the same ``GridSpec``."""
    matrices = [part for part in parts if isinstance(part, RoundedMatrix)]
    if not matrices:
        return torch.cat([part for part in parts if isinstance(part, torch.Tensor)])
    grid = Grid(
        torch.cat([m.grid.scale for m in matrices]), torch.cat([m.grid.zero for m in matrices])
    )
    return RoundedMatrix(matrices[0].spec, grid, torch.cat([m.codes for m in matrices]))


def _as_float(values: torch.Tensor) -> torch.Tensor:
    """float16, or bfloat16 where that would overflow."""
    fits = bool(values.abs().max() <= _MAX_FLOAT16)
    return values.to(torch.float16 if fits else torch.bfloat16)
