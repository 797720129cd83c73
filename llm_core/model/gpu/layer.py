"""The weights of one layer of a decoder on a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kernels.gpu import GpuWeight
from llm_core.config import ModelConfig
from llm_core.model.gpu.weights import GpuFormat, gpu_weight
from llm_core.quant import Weight, stack_rows, to_float


class GpuLayer:
    """One layer's weights, on the device."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        index: int,
        form: GpuFormat,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """``weights`` by the names of ``loading.layer_shapes``; ``dtype``: of activations."""

        def matrix(*names: str) -> GpuWeight:
            stacked = stack_rows([weights[f"layers.{index}.{name}"] for name in names])
            return gpu_weight(stacked, form, dtype, device)

        def vector(*names: str, present: bool = True) -> torch.Tensor | None:
            if not present:
                return None
            values = [to_float(weights[f"layers.{index}.{name}"]) for name in names]
            return torch.cat(values).to(device)

        self.attention_norm = _present(vector("attention_norm"))
        self.query_key_value = matrix("query", "key", "value")
        self.bias = vector("query_bias", "key_bias", "value_bias", present=config.attention_bias)
        self.query_norm = vector("query_norm", present=config.qk_norm)
        self.key_norm = vector("key_norm", present=config.qk_norm)
        self.attention_output = matrix("attention_output")
        self.attention_post_norm = vector("attention_post_norm", present=config.post_norms)
        self.ffn_norm = _present(vector("ffn_norm"))
        self.gate_up = matrix("gate", "up")
        self.down = matrix("down")
        self.ffn_post_norm = vector("ffn_post_norm", present=config.post_norms)

    @property
    def matrices(self) -> tuple[GpuWeight, ...]:
        return self.query_key_value, self.attention_output, self.gate_up, self.down


def _present(vector: torch.Tensor | None) -> torch.Tensor:
    assert vector is not None
    return vector
