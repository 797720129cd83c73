"""Peak memory of loading is little above the size of the loaded model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llm_core.offline.quantize.packing import awq_tensors, gptq_tensors, int8_tensors
from llm_core.offline.quantize.rounding import GridSpec, round_to_nearest
from llm_core.quant.formats import quantize_float8
from tests.support.hf_models import save_model
from tests.support.load_memory import measured

MEDIUM: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 14,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8000,
    "tie_word_embeddings": True,
}
Packing = Callable[[torch.Tensor], dict[str, torch.Tensor]]


def fp8_tensors(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    codes, scale = quantize_float8(weight)
    return {"weight": codes, "weight_scale": scale.unsqueeze(1)}


_GROUPS = {"bits": 4, "group_size": 64}
_PACKED = {"group_0": {"weights": {"num_bits": 8, "type": "int"}}}
FORMS: dict[str, tuple[Packing, dict[str, Any]]] = {
    "bfloat16": (lambda weight: {"weight": weight.bfloat16()}, {}),
    "gptq": (
        lambda weight: gptq_tensors(round_to_nearest(weight, GridSpec(4, 64))),
        {"quant_method": "gptq", "checkpoint_format": "gptq"} | _GROUPS,
    ),
    "awq": (
        lambda weight: awq_tensors(round_to_nearest(weight, GridSpec(4, 64))),
        {"quant_method": "awq", "version": "gemm"} | _GROUPS,
    ),
    "int8": (
        lambda weight: int8_tensors(round_to_nearest(weight, GridSpec(8, 32, True))),
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": _PACKED,
        },
    ),
    "fp8": (fp8_tensors, {"quant_method": "fp8"}),
}
# What runs: packed in 4 or 8 bits, or torch's float16 and float32.
RUNS = [
    *(f"{form}=native=auto" for form in FORMS),
    *("bfloat16=torch=float32", "bfloat16=torch=float16", "gptq=torch=float16"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories tiny and one for each of FORMS."""
    directory = tmp_path_factory.mktemp("models")
    save_model(directory / "tiny", "llama")
    save_model(directory / "whole", "llama", **MEDIUM)
    tensors = load_file(directory / "whole" / "model.safetensors")
    config = json.loads((directory / "whole" / "config.json").read_text())
    for form, (pack, settings) in FORMS.items():
        (directory / form).mkdir()
        written, packed = {}, {}
        for name, tensor in tensors.items():
            base = name.removesuffix(".weight")
            if base.endswith("_proj"):  # matrices of one shape may be the same: sizes are measured
                if tensor.shape not in packed:
                    packed[tensor.shape] = pack(tensor)
                parts = packed[tensor.shape]
                written |= {f"{base}.{part}": value.clone() for part, value in parts.items()}
            else:
                written[name] = tensor.bfloat16()
        save_file(written, directory / form / "model.safetensors")
        extra = {"quantization_config": settings} if settings else {}
        (directory / form / "config.json").write_text(json.dumps(config | extra))
    return directory


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_peak_is_near_the_final_size(models: Path) -> None:
    sizes = measured(models / "tiny", [f"{models}/{run}" for run in RUNS])
    file = models / "bfloat16" / "model.safetensors"
    lengths = [tensor.numel() for tensor in load_file(file).values()]
    num_weights = sum(lengths)
    # One tensor at a time is converted, by way of float32. Against the model's size nothing can be
    # said: it is larger by half where the kernel has huge pages to give.
    largest = 4 * max(lengths)
    assert 1.25 * largest < num_weights / 2  # what all weights of the smallest form take
    assert len(sizes) == len(RUNS)
    for run, size in zip(RUNS, sizes, strict=True):
        print(f"{run}: final {size['final'] / 1e6:.1f} MB, peak {size['peak'] / 1e6:.1f} MB")
        bits = {"gptq=native": 4, "awq=native": 4, "bfloat16=torch": 16}.get(
            run.rpartition("=")[0], 8
        )
        assert size["final"] > 0.9 * bits / 8 * num_weights, (run, size)  # it is all there
        assert size["peak"] - size["final"] < 1.25 * largest, (run, size)
