"""The compiled decoder and torch's of one random model, side by side."""

from __future__ import annotations

import pytest
import torch

from kernels import reference, select_backend
from kernels.native import Library
from llm_core.batch import ForwardBatch, Segment
from llm_core.config import KvDtype, ModelConfig
from llm_core.model.kv_cache import KvCache
from llm_core.model.native_decoder import NativeDecoder
from llm_core.model.torch_decoder import TorchDecoder
from llm_core.quant.formats import Weight
from llm_core.quant.grouped import quantize_grouped
from llm_core.quant.linear import FormatChoice, Linear
from tests.support.random_llama import random_weights

NUM_BLOCKS = 64
# Activations are rounded alike on both sides, but where one lies between two steps the last bit
# decides, and a step is 1/127 of the largest value around it: 0.035 was seen with random
# seeds. What is computed wrongly is off by the size of the logits, 1.
TOLERANCE = 0.1


def round_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's products see what the compiled ones see."""
    exact = Linear.__call__

    def rounded(self: Linear, x: torch.Tensor) -> torch.Tensor:
        return exact(self, reference.fake_quantize_rows(x, 32))

    monkeypatch.setattr(Linear, "__call__", rounded)


class Pair:
    """Both decoders of one random model, each with a cache of its own."""

    def __init__(
        self,
        library: Library,
        config: ModelConfig,
        *,
        seed: int = 0,
        num_threads: int = 2,
        kv_dtype: KvDtype = "float32",
        block_size: int = 16,
    ) -> None:
        floats: dict[str, Weight] = dict(random_weights(config, seed))
        grouped: dict[str, Weight] = {}
        for name, weight in floats.items():
            assert isinstance(weight, torch.Tensor)
            if weight.ndim == 2 and weight.shape[1] % 32 == 0:
                grouped[name] = quantize_grouped(weight, 32)
                floats[name] = grouped[name].dequantize()  # type: ignore[union-attr]
            elif weight.ndim == 2:  # rounded when it is packed
                grouped[name] = weight
                codes = quantize_grouped(weight, 32).dequantize()
                floats[name] = codes[:, : weight.shape[1]]
            else:
                grouped[name] = weight
        self.config = config
        formats = FormatChoice("float32", "float32")
        self.torch = TorchDecoder(
            config, floats, formats, select_backend("cpu"), config.context_len
        )
        self.native = NativeDecoder(
            config, grouped, library, num_threads=num_threads, max_context=config.context_len
        )
        self.caches = [
            KvCache(config, NUM_BLOCKS, block_size=block_size, dtype=kv_dtype) for _ in range(2)
        ]

    def run(
        self, tokens: torch.Tensor, segments: tuple[Segment, ...], logit_rows: torch.Tensor
    ) -> None:
        """Both forward passes agree."""
        batch = ForwardBatch(tokens, segments, logit_rows)
        with torch.inference_mode():
            expected = self.torch.forward(batch, self.caches[0]).logits
            result = self.native.forward(batch, self.caches[1]).logits
        assert result.shape == expected.shape == (logit_rows.shape[0], self.config.vocab_size)
        assert result.dtype == torch.float32
        if logit_rows.shape[0]:
            error = (result - expected).square().mean().sqrt() / expected.square().mean().sqrt()
            assert float(error) < TOLERANCE
