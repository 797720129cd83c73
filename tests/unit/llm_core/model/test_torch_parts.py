"""Torch operations of a GPU step: eager, compiled, and without a working compiler."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor

from kernels.gpu import load_ops
from llm_core.config import ModelConfig
from llm_core.errors import ModelLoadError
from llm_core.model import backend as backend_module
from llm_core.model.backend import RunnerOptions
from llm_core.model.gpu.decoder import TritonDecoder
from llm_core.model.gpu.torch_parts import TorchParts
from llm_core.model.kv_cache import KvCache
from llm_core.quant.formats import Weight
from tests.support.random_llama import FAMILIES, random_weights, tiny_config
from tests.unit.llm_core.model.test_triton_decoder import BLOCK_SIZE, NUM_BLOCKS, Steps, batches

CPU = torch.device("cpu")
# More than one row each: single ones are a program of their own, which takes seconds to compile.
STEPS: Steps = [
    ([(0, 0, 9), (1, 0, 4)], True),
    ([(0, 9, 1), (1, 4, 1)], True),
    ([(0, 10, (-1, 0, 0)), (1, 5, 1)], True),
]


def decoder(config: ModelConfig, weights: dict[str, Weight], parts: TorchParts) -> TritonDecoder:
    return TritonDecoder(
        config,
        weights,
        load_ops("oracle"),
        device=CPU,
        dtype=torch.float32,
        max_context=config.context_len,
        parts=parts,
    )


@pytest.mark.timeout(300)
def test_compiled_operations_give_equal_logits() -> None:
    """Soft caps and all, in steps of several sizes, with one program for all of them."""
    config = tiny_config(**FAMILIES["gemma2"])
    assert config.logit_softcap is not None
    weights: dict[str, Weight] = dict(random_weights(config, 3))
    # What a compiler can be spared here: its processes, and looking for the widest vectors.
    cheap = inductor.patch({"compile_threads": 1, "cpp.simdlen": 1})
    with cheap, warnings.catch_warnings():  # of the compiler's own code
        warnings.simplefilter("ignore")
        compiled = decoder(config, weights, TorchParts(CPU))
        plain = decoder(config, weights, TorchParts())
        caches = [KvCache(config, NUM_BLOCKS, BLOCK_SIZE) for _ in range(2)]
        with torch.inference_mode():
            for batch in batches(config, 5, STEPS):
                results = [
                    model.forward(batch, cache).logits
                    for model, cache in zip((compiled, plain), caches, strict=True)
                ]
                torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


def test_failure_to_compile_is_a_load_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(function: Any, **options: object) -> Any:
        def run(*args: object) -> None:
            raise RuntimeError("no C++ compiler was found\nand a long trace")

        return run

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(ValueError, match=r"torch\.compile does not work here: no C\+\+ compiler"):
        TorchParts(CPU)
    monkeypatch.setattr(backend_module, "why_no_gpu", lambda backend: None)
    config = tiny_config()
    options = RunnerOptions(backend="triton", weight_format="auto", torch_compile=True)
    with pytest.raises(ModelLoadError, match=r"torch\.compile does not work here") as error:
        backend_module.make_model(config, dict(random_weights(config)), options, 64)
    assert "long trace" not in str(error.value)
