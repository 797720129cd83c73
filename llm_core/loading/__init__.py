"""Readers of GGUF files and Hugging Face checkpoints: configuration and named weights."""

from llm_core.loading.gguf.container import read_metadata
from llm_core.loading.hf.checkpoint import read_json
from llm_core.loading.hf.model import LAYER_NAMES, POST_NORM_NAMES
from llm_core.loading.model_files import OpenModel, open_model
from llm_core.loading.model_weights import open_weights
from llm_core.loading.safetensors import SafetensorsFile
from llm_core.loading.safetensors_writer import write_safetensors
from llm_core.loading.weights import TURNING, ModelWeights, interleaved, layer_shapes

__all__ = [
    "LAYER_NAMES",
    "ModelWeights",
    "OpenModel",
    "POST_NORM_NAMES",
    "SafetensorsFile",
    "TURNING",
    "interleaved",
    "layer_shapes",
    "open_model",
    "open_weights",
    "read_json",
    "read_metadata",
    "write_safetensors",
]
