"""The GPU decoder against torch's, with the same weights: through the oracles of its operations for
every family, and through the kernels themselves in Triton's interpreter for what differs there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels import select_backend
from kernels.gpu import OpsName, load_ops
from llm_core.batch import ForwardBatch, Segment
from llm_core.config import ModelConfig
from llm_core.cuda_graphs import Capture
from llm_core.cuda_weights import GpuFormat
from llm_core.decoder import Decoder
from llm_core.gpu_decoder import TritonDecoder
from llm_core.kv_cache import KvCache
from llm_core.messages import KvDtype
from llm_core.quant.codes import GroupedCodes
from llm_core.quant.formats import Weight, to_float
from llm_core.quant.linear import FormatChoice
from tests.fake_graph import RecordedRun
from tests.random_llama import FAMILIES, random_tokens, random_weights, tiny_config

NUM_BLOCKS, BLOCK_SIZE = 64, 16
# float32 sums in another order, through two or three layers.
TOLERANCE = {"atol": 5e-5, "rtol": 5e-5}


@pytest.fixture
def seed() -> int:
    number = random.randrange(1 << 30)
    print("seed", number)
    return number


class Pair:
    """Both decoders of one random model, each with a cache of its own."""

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Weight],
        ops: OpsName = "oracle",
        *,
        kv_dtype: KvDtype = "float32",
        weight_format: GpuFormat = "auto",
        capture: Capture | None = None,
        layers: tuple[int, ...] = (),
    ) -> None:
        torch.set_num_threads(1)  # the tensors are tiny
        self.config = config
        floats = {name: to_float(weight) for name, weight in weights.items()}
        formats = FormatChoice("float32", "float32")
        self.torch = Decoder(config, floats, formats, select_backend("cpu"), config.context_len)
        self.triton = TritonDecoder(
            config,
            weights,
            load_ops(ops),
            device=torch.device("cpu"),
            dtype=torch.float32,
            max_context=config.context_len,
            weight_format=weight_format,
            capture=capture,
        )
        for model in (self.torch, self.triton):
            model.set_feature_layers(layers)
        self.caches = [KvCache(config, NUM_BLOCKS, BLOCK_SIZE, kv_dtype) for _ in range(2)]

    def run(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(expected, result): logits, with the features of each row behind those of the rows."""
        with torch.inference_mode():
            expected = self.torch.forward(batch, self.caches[0])
            result = self.triton.forward(batch, self.caches[1])
        assert (result.features is None) == (expected.features is None) != batch.wants_features
        for tensor in (result.logits, result.features):
            assert tensor is None or tensor.dtype == torch.float32
        if result.features is not None and expected.features is not None:
            torch.testing.assert_close(result.features, expected.features, **TOLERANCE)
        assert result.logits.shape == (batch.logit_rows.shape[0], self.config.vocab_size)
        return expected.logits, result.logits

    def check(self, batch: ForwardBatch) -> None:
        expected, result = self.run(batch)
        torch.testing.assert_close(result, expected, **TOLERANCE)


Steps = list[tuple[list[tuple[int, int, int | tuple[int, ...]]], bool]]

# Steps of four sequences, as (sequence, start, length or parents): prompts long and short, chunks,
# single rows, trees of several sequences beside one another, chains of drafts.
STEPS: Steps = [
    ([(0, 0, 1)], True),
    ([(0, 1, 37), (1, 0, 5)], True),
    ([(2, 0, 12)], False),
    ([(0, 38, 1), (1, 5, 1), (2, 12, 1)], True),
    ([(0, 39, 1), (1, 6, 1), (2, 13, 9), (3, 0, 66)], True),
    ([(0, 40, (-1, 0, 0, 1, 2, 2)), (1, 7, 1)], True),
    ([(0, 40, (-1, 0, 1, 2)), (1, 8, (-1, 0, 0, 0)), (2, 22, (-1, -1, 1))], True),
    ([(0, 44, 1)], True),
]


def batches(config: ModelConfig, seed: int, steps: Steps = STEPS) -> Iterator[ForwardBatch]:
    """The steps with random tokens, in blocks out of order."""
    chance = random.Random(seed)
    order = chance.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    tables = [tuple(order[n * 8 : n * 8 + 8]) for n in range(8)]
    for number, (rows, has_logits) in enumerate(steps):
        segments, wanted, at = [], [], 0
        for sequence, start, shape in rows:
            parents = shape if isinstance(shape, tuple) else None
            length = len(shape) if isinstance(shape, tuple) else shape
            segments.append(Segment(tables[sequence], start, length, parents))
            at += length
            wanted += [at - 1] if parents is None else list(range(at - length, at))
        yield ForwardBatch(
            random_tokens(config, at, seed + number),
            tuple(segments),
            torch.tensor(wanted if has_logits else [], dtype=torch.int64),
            wants_features=number % 2 == 1,
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_equals_torch(family: str, seed: int) -> None:
    config = tiny_config(**FAMILIES[family])
    pair = Pair(config, dict(random_weights(config, seed)), layers=(0, config.num_layers))
    for batch in batches(config, seed):
        pair.check(batch)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_replayed_steps_equal_torch(family: str, seed: int) -> None:
    """Padded to shapes, and computed into tensors that stay in place."""
    config = tiny_config(**FAMILIES[family])
    runs: list[RecordedRun] = []

    def capture(run: Any) -> RecordedRun:
        runs.append(RecordedRun(run))
        return runs[-1]

    pair = Pair(config, dict(random_weights(config, seed)), capture=capture)
    pair.triton.warm_up(pair.caches[1], max_sequences=3)
    assert len(runs) == 3  # 1, 2 and 4 sequences
    for model in (pair.torch, pair.triton):
        model.set_feature_layers((0,))
    assert len(runs) == 6, "recorded again, with features"
    del runs[:3]
    decoding: Steps = [
        ([(0, 45 + n, 1), (1, 8 + n, 1), (2, 22 + n, 1)][: 1 + n % 3], True) for n in range(4)
    ]
    trees: Steps = [
        ([(0, 49, (-1, 0, 0, 1, 2, 2, 4)), (1, 12, 3 + n), (3, 66, (-1, 0, 1))], True)
        for n in range(4)
    ]
    for batch in batches(config, seed, STEPS + decoding + trees):
        pair.check(batch)
    assert len(runs) == 4 and runs[3].num_replays == 2, "the trees' shape at the third time"
    assert sum(run.num_replays for run in runs[:3]) == 7, "every step of single rows"


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_other_dtypes_of_keys_and_values(kv_dtype: KvDtype, seed: int) -> None:
    """Rounded as torch's cache rounds; a value at the edge of a step may fall to either side."""
    config = tiny_config()
    pair = Pair(config, dict(random_weights(config, seed)), kv_dtype=kv_dtype)
    for batch in batches(config, seed):
        expected, result = pair.run(replace(batch, wants_features=False))
        torch.testing.assert_close(result, expected, atol=0.02, rtol=0.02)


def quantised(weights: dict[str, torch.Tensor], bits: int, group: int) -> dict[str, Weight]:
    """Matrices as codes with scales and zeros, as a file may have them."""
    result: dict[str, Weight] = {}
    for name, weight in weights.items():
        if weight.ndim == 1:
            result[name] = weight
            continue
        parts = weight.view(weight.shape[0], -1, group)
        low, high = parts.amin(-1), parts.amax(-1)
        scale = (high - low) / (2**bits - 1)
        codes = ((parts - low.unsqueeze(-1)) / scale.unsqueeze(-1)).round().to(torch.uint8)
        result[name] = GroupedCodes(codes.flatten(1), scale, low, 4 if bits == 4 else 8, group)
    return result


@pytest.mark.parametrize(("bits", "name"), [(4, "int4"), (8, "int8")])
def test_stored_codes_are_kept(bits: int, name: str, seed: int) -> None:
    config = tiny_config(tie_embeddings=bits == 4)
    pair = Pair(config, quantised(random_weights(config, seed), bits, 32))
    assert pair.triton.weight_format == name
    for batch in list(batches(config, seed))[:4]:
        expected, result = pair.run(replace(batch, wants_features=False))
        # Scales of 4 bits are kept in float16: 2^-11 of each weight, in sums of 64 of them.
        torch.testing.assert_close(result, expected, atol=0.01, rtol=0.01)


@pytest.mark.parametrize(("weight_format", "limit"), [("int8", 0.05), ("fp8", 0.2)])
def test_weights_can_be_rounded(weight_format: GpuFormat, limit: float, seed: int) -> None:
    config = tiny_config()
    pair = Pair(config, dict(random_weights(config, seed)), weight_format=weight_format)
    assert pair.triton.weight_format == weight_format
    expected, result = pair.run(next(batches(config, seed)))
    error = (result - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert 0 < float(error) < limit
