"""A Hugging Face model directory: configuration, and weights under the decoder's names.

Hugging Face rotates dimension j of a head with dimension j + rotary_dim / 2; rows of query and key
(and of their biases and norms) are permuted to interleaved order. Phi-3's fused matrices are split,
and 1 is added to Gemma's norm weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from llm_core.config import ModelConfig
from llm_core.errors import ModelLoadError
from llm_core.loading.fields import Fields
from llm_core.loading.hf.checkpoint import Checkpoint, read_json
from llm_core.loading.hf.config import read_hf_config
from llm_core.loading.hf.quantized import IGNORED_PARTS, MatrixReader, QuantSettings, Reader
from llm_core.loading.weights import (
    TURNING,
    ModelWeights,
    interleaved,
    model_name,
    weight_shapes,
)
from llm_core.quant import Weight, take_rows

LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
    "attention_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
# Gemma has norms before and after both blocks, with other names.
POST_NORM_NAMES = {
    "attention_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}
_PREFIXES = ("model.", "model.language_model.", "language_model.model.")
_NOT_LANGUAGE = (
    *("vision_tower.", "multi_modal_projector."),
    *("model.vision_tower.", "model.multi_modal_projector."),
)


@contextmanager
def open_hf_model(directory: Path) -> Iterator[ModelWeights]:
    """A context with the model in ``directory``, all tensors checked, which must be read within it.
    Raises ModelLoadError."""
    if not (directory / "config.json").exists():
        files = ", ".join(sorted(file.name for file in directory.glob("*.gguf")))
        raise ModelLoadError(
            f"{directory}: holds no config.json, so it is no model's directory"
            + (f"; for a GGUF model give the file itself: {files}" if files else "")
        )
    fields = Fields("config.json", read_json(directory / "config.json"))
    config = read_hf_config(fields)
    with Checkpoint(directory) as checkpoint:
        settings = QuantSettings(fields, directory)
        weights = _HfWeights(config, checkpoint, settings)
        yield ModelWeights(model_name(directory), config, weights)


class _HfWeights(Mapping[str, Weight]):
    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, settings: QuantSettings
    ) -> None:
        self._config = config
        self._matrices = MatrixReader(checkpoint, settings)
        self._prefix = next(
            (p for p in _PREFIXES if f"{p}embed_tokens.weight" in checkpoint), _PREFIXES[0]
        )
        self._readers = {
            name: self._reader(name, shape) for name, shape in weight_shapes(config).items()
        }
        self._reject_unused(checkpoint)

    def __getitem__(self, name: str) -> Weight:
        return self._readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)

    def _reader(self, name: str, shape: tuple[int, ...]) -> Reader:
        config = self._config
        if name == "embedding":
            return self._matrices.plain(f"{self._prefix}embed_tokens.weight", shape)
        if name == "final_norm":
            return self._norm(f"{self._prefix}norm.weight", shape)
        if name == "head":
            return self._matrices.matrix("lm_head", (shape[0], shape[1]))
        _, layer, part = name.split(".")
        prefix = f"{self._prefix}layers.{layer}."
        if part.endswith("_norm"):
            names = LAYER_NAMES | (POST_NORM_NAMES if config.post_norms else {})
            return self._norm(f"{prefix}{names[part]}.weight", shape, turns=part in TURNING)
        if part.endswith("_bias"):
            base = prefix + LAYER_NAMES[part.removesuffix("_bias")]
            return self._rows(self._matrices.plain(f"{base}.bias", shape), part, 0, shape[0])
        read, first = self._matrix(prefix, part, (shape[0], shape[1]))
        return self._rows(read, part, first, shape[0])

    def _matrix(self, prefix: str, part: str, shape: tuple[int, int]) -> tuple[Reader, int]:
        """A reader, and the row at which ``part`` begins in its matrix."""
        config = self._config
        if config.family == "phi3" and part in ("query", "key", "value"):
            whole = (config.query_size + 2 * config.kv_size, config.hidden_size)
            first = {"query": 0, "key": config.query_size}.get(part, whole[0] - config.kv_size)
            return self._matrices.matrix(f"{prefix}self_attn.qkv_proj", whole), first
        if config.family == "phi3" and part in ("gate", "up"):
            whole = (2 * config.intermediate_size, config.hidden_size)
            first = 0 if part == "gate" else config.intermediate_size
            return self._matrices.matrix(f"{prefix}mlp.gate_up_proj", whole), first
        return self._matrices.matrix(prefix + LAYER_NAMES[part], shape), 0

    def _rows(self, read: Reader, part: str, first: int, num_rows: int) -> Reader:
        """A reader of rows [first, first + num_rows) of ``read``, in interleaved RoPE order."""
        config = self._config
        if part in TURNING:
            rows = interleaved(num_rows // config.head_dim, config.head_dim, config.num_rotated)
            rows += first
        elif first == 0 and config.family != "phi3":
            return read
        else:
            rows = torch.arange(first, first + num_rows)
        return lambda: take_rows(read(), rows)

    def _norm(self, name: str, shape: tuple[int, ...], *, turns: bool = False) -> Reader:
        read = self._matrices.plain(name, shape)
        head_dim, rotated = self._config.head_dim, self._config.num_rotated
        is_less_one = self._config.family in ("gemma2", "gemma3")

        def norm() -> torch.Tensor:
            weight = read()
            assert isinstance(weight, torch.Tensor), "norms are plain tensors"
            if turns:
                weight = weight.index_select(0, interleaved(1, head_dim, rotated))
            return 1 + weight.float() if is_less_one else weight.float()

        return norm

    def _reject_unused(self, checkpoint: Checkpoint) -> None:
        unused = checkpoint.names - self._matrices.used
        if self._config.tie_embeddings:
            unused.discard("lm_head.weight")
        left = sorted(
            name
            for name in unused
            if name.rpartition(".")[2] not in IGNORED_PARTS
            and not name.endswith("rotary_emb.inv_freq")
            and not name.startswith(_NOT_LANGUAGE)
            and not self._is_zero_bias(checkpoint, name)
        )
        if left:
            raise ModelLoadError(
                f"{checkpoint.label}: has tensors that the {self._config.family} decoder does not "
                f"use, such as {left[0]}"
            )

    def _is_zero_bias(self, checkpoint: Checkpoint, name: str) -> bool:
        """GPTQ writers add zero biases to layers without bias."""
        base, _, part = name.rpartition(".")
        if part != "bias" or f"{base}.qweight" not in checkpoint:
            return False
        return not bool(checkpoint.read(name).any())
