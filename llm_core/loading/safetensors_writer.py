"""Writer of the safetensors format (https://github.com/huggingface/safetensors#format)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from llm_core.loading.safetensors import DTYPES

_ALIGNMENT = 8
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes ``tensors``, those with the largest elements first, so that all are aligned."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in ordered:
        end = at + tensor.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _, tensor in ordered:
            file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
