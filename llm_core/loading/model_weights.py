"""Configuration and weights of a model, from a GGUF file or a Hugging Face directory."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from llm_core.errors import ModelLoadError
from llm_core.loading.gguf.model import open_gguf_model
from llm_core.loading.hf.model import open_hf_model
from llm_core.loading.weights import ModelWeights


def open_weights(path: str | Path) -> AbstractContextManager[ModelWeights]:
    """A context with the model at ``path``, all tensors checked but none read, which must be read
    within it. Raises ModelLoadError, here or on entering the context."""
    path = Path(path)
    if path.is_dir():
        return open_hf_model(path)
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"):
        raise ModelLoadError(
            f"{path.name}: is a pickle by its name, which can run any program when it is loaded, "
            "and is never read; give a .gguf file or a directory with safetensors"
        )
    if path.suffix == ".safetensors":
        raise ModelLoadError(f"{path.name}: give its directory, which also has config.json")
    return open_gguf_model(path)
