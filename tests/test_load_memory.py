"""Loading holds little more than what is loaded: peak memory of a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.hf_models import save_model

# Imports everything first, and loads once a tiny model, so that what is measured is the model.
PROGRAM = """
import json, sys
from pathlib import Path
from llm_core.loading.model_weights import open_weights
from llm_core.runner import ModelRunner

def status_bytes(name):  # of this program's memory; ru_maxrss would count what forked it, too
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

def load(path):
    with open_weights(path) as model:
        return ModelRunner(
            model.config, model.weights, weight_format=sys.argv[3], num_blocks=4, max_context=64
        )

load(sys.argv[1])
before = status_bytes("VmRSS")
runner = load(sys.argv[2])
after = status_bytes("VmRSS")
peak = status_bytes("VmHWM")
print(json.dumps({"final": after - before, "peak": peak - before}))
"""
MEDIUM: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 14,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8000,
    "tie_word_embeddings": True,
}


def measured(tiny: Path, path: Path, weight_format: str) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tiny, path, weight_format],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, int] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    save_model(directory / "tiny", "llama")
    save_model(directory / "medium", "llama", **MEDIUM)
    file = directory / "medium" / "model.safetensors"
    save_file({k: v.bfloat16() for k, v in load_file(file).items()}, file)
    return directory


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("weight_format", ["float32", "float16"])
def test_peak_is_near_the_final_size(models: Path, weight_format: str) -> None:
    sizes = measured(models / "tiny", models / "medium", weight_format)
    num_weights = sum(
        tensor.numel() for tensor in load_file(models / "medium" / "model.safetensors").values()
    )
    assert sizes["final"] > 1.8 * num_weights  # it is all there
    assert sizes["peak"] < 1.3 * sizes["final"], sizes
