"""Configuration and weights of a model, from a GGUF file or a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llm_core.config import ModelConfig
from llm_core.errors import ModelLoadError
from llm_core.loading.gguf_model import open_gguf_model
from llm_core.loading.hf_model import open_hf_model
from llm_core.quant.formats import Weight


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """``weights`` reads each tensor from its file when it is asked for."""

    name: str
    config: ModelConfig
    weights: Mapping[str, Weight]


@contextmanager
def open_weights(path: str | Path) -> Iterator[ModelWeights]:
    """The model at ``path``, all tensors checked but none read. Raises ModelLoadError.

    The weights must be read inside the context.
    """
    path = Path(path)
    if path.is_dir():
        with open_hf_model(path) as hf_model:
            yield ModelWeights(model_name(path), hf_model.config, hf_model.weights)
        return
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"):
        raise ModelLoadError(
            f"{path.name}: is a pickle by its name, which can run any program when it is loaded, "
            "and is never read; give a .gguf file or a directory with safetensors"
        )
    if path.suffix == ".safetensors":
        raise ModelLoadError(f"{path.name}: give its directory, which also has config.json")
    with open_gguf_model(path) as gguf_model:
        yield ModelWeights(model_name(path), gguf_model.config, gguf_model.weights)


def model_name(path: Path) -> str:
    """What to call the model: its file's or directory's name; in the hub's cache, where directories
    are named by commit, the repository's."""
    if path.parent.name == "snapshots":
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    return path.name if path.is_dir() else path.stem
