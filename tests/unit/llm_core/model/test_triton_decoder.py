"""The GPU decoder against torch's, with the same weights: through the oracles of its operations for
every family, and through the kernels themselves in Triton's interpreter for what differs there."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from kernels import select_backend
from kernels.gpu import OpsName, SamplingInputs, load_ops
from llm_core.batch import ForwardBatch, Segment, TokenChoices
from llm_core.config import KvDtype, ModelConfig
from llm_core.model.gpu.decoder import TritonDecoder
from llm_core.model.gpu.graphs import Capture
from llm_core.model.gpu.weights import GpuFormat
from llm_core.model.kv_cache import KvCache
from llm_core.model.parallel.group import PendingSum
from llm_core.model.parallel.shards import ShardedWeights, shard_config
from llm_core.model.torch_decoder import TorchDecoder
from llm_core.quant.codes import GroupedCodes
from llm_core.quant.formats import Weight, to_float
from llm_core.quant.linear import FormatChoice
from tests.support.fake_graph import RecordedRun
from tests.support.random_llama import FAMILIES, random_tokens, random_weights, tiny_config

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
        self.torch = TorchDecoder(
            config, floats, formats, select_backend("cpu"), config.context_len
        )
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
def test_other_kv_dtypes(kv_dtype: KvDtype, seed: int) -> None:
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
def test_stored_codes_are_not_requantised(bits: int, name: str, seed: int) -> None:
    config = tiny_config(tie_embeddings=bits == 4)
    pair = Pair(config, quantised(random_weights(config, seed), bits, 32))
    assert pair.triton.weight_format == name
    for batch in list(batches(config, seed))[:4]:
        expected, result = pair.run(replace(batch, wants_features=False))
        # Scales of 4 bits are kept in float16: 2^-11 of each weight, in sums of 64 of them, through
        # layers; one logit of some hundred thousand passes 0.01.
        torch.testing.assert_close(result, expected, atol=0.02, rtol=0.01)


@pytest.mark.parametrize(("weight_format", "limit"), [("int8", 0.05), ("fp8", 0.2)])
def test_weights_can_be_quantised(weight_format: GpuFormat, limit: float, seed: int) -> None:
    config = tiny_config()
    pair = Pair(config, dict(random_weights(config, seed)), weight_format=weight_format)
    assert pair.triton.weight_format == weight_format
    expected, result = pair.run(next(batches(config, seed)))
    error = (result - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert 0 < float(error) < limit


class ThreadRanks:
    """Ranks that are threads of this process: a sum is there when all have brought their part."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.sizes: list[int] = []
        self._parts: list[list[torch.Tensor]] = []
        self._lock = threading.Lock()
        self._barrier = threading.Barrier(num_ranks, timeout=60)

    def rank(self) -> _ThreadRank:
        return _ThreadRank(self)

    def exchange(self, number: int, x: torch.Tensor, rank: int) -> list[torch.Tensor]:
        with self._lock:
            while len(self._parts) <= number:
                self._parts.append([torch.empty(0)] * self.num_ranks)
            self._parts[number][rank] = x.clone()
        self._barrier.wait()
        return self._parts[number]


class _ThreadRank:
    """``Collectives`` of one thread. A sum that was begun is not there before it is waited for."""

    numbers = count()

    def __init__(self, ranks: ThreadRanks) -> None:
        self.num_ranks = ranks.num_ranks
        self.most_begun = 0
        self._ranks = ranks
        self._index = next(self.numbers) % ranks.num_ranks
        self._num_calls = 0
        self._num_begun = 0

    def start_sum(self, x: torch.Tensor) -> PendingSum:
        self._num_begun += 1
        self.most_begun = max(self.most_begun, self._num_begun)
        self._num_calls += 1
        mine, number, rank = x.clone(), self._num_calls - 1, self
        x.fill_(torch.nan)  # until it is there

        class Sum:
            def wait(self) -> torch.Tensor:
                rank._num_begun -= 1
                parts = rank._ranks.exchange(number, mine, rank._index)
                return x.copy_(torch.stack(parts).sum(0))

        return Sum()

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        self._num_calls += 1
        return torch.cat(self._ranks.exchange(self._num_calls - 1, x, self._index), -1)


@pytest.mark.parametrize("overlap_rows", [0, 2, 9])
def test_overlapping_halves_give_the_same(overlap_rows: int, seed: int) -> None:
    """Two ranks; the steps of ``overlap_rows`` rows and more in two halves."""
    config = tiny_config(num_kv_heads=2, post_norms=True)
    weights: dict[str, Weight] = dict(random_weights(config, seed))
    formats = FormatChoice("float32", "float32")
    alone = TorchDecoder(config, weights, formats, select_backend("cpu"), config.context_len)
    ranks = ThreadRanks(2)
    members = [ranks.rank() for _ in range(2)]
    share = shard_config(config, 2)
    models = [
        TritonDecoder(
            share,
            ShardedWeights(weights, config, rank=member._index, num_ranks=2),
            load_ops("oracle"),
            device=torch.device("cpu"),
            dtype=torch.float32,
            max_context=config.context_len,
            collectives=member,
            overlap_rows=overlap_rows,
        )
        for member in members
    ]
    caches = [KvCache(share, NUM_BLOCKS, BLOCK_SIZE) for _ in range(2)]
    whole_cache = KvCache(config, NUM_BLOCKS, BLOCK_SIZE)

    def run(index: int, batch: ForwardBatch) -> torch.Tensor:
        with torch.inference_mode():
            return models[index].forward(batch, caches[index]).logits

    with ThreadPoolExecutor(2) as pool:
        for batch in batches(config, seed):
            batch = replace(batch, wants_features=False)
            with torch.inference_mode():
                expected = alone.forward(batch, whole_cache).logits
            for result in pool.map(run, (0, 1), (batch, batch)):
                torch.testing.assert_close(result, expected, **TOLERANCE)
    assert members[0].most_begun == (2 if overlap_rows else 1), "one half's sum beside the other"


def test_tokens_are_sampled_and_fed_back_on_the_device(seed: int) -> None:
    """Greedy steps, each of which takes its tokens from the one before, eager and replayed; a row
    whose logits are asked for beside one whose token is."""
    config = tiny_config()
    weights = dict(random_weights(config, seed))
    reference, late = Pair(config, weights), Pair(config, weights, capture=RecordedRun)
    size = config.vocab_size - 3
    late.triton.set_vocab_size(size)
    tables = ((1, 3), (2, 5))
    tokens = torch.tensor([4, 7])

    def step(start: int, ids: torch.Tensor, choices: TokenChoices | None) -> ForwardBatch:
        segments = tuple(Segment(table, start, 1) for table in tables)
        return ForwardBatch(ids, segments, torch.arange(2), choices=choices)

    zeros = torch.zeros(2, dtype=torch.int32)
    inputs = SamplingInputs(
        *(zeros.float(), zeros, zeros.float() + 1, zeros.float(), zeros.long(), zeros)
    )
    unknown = torch.tensor([-1, -1])
    with torch.inference_mode():
        for start in range(7):
            logits = reference.torch.forward(step(start, tokens, None), reference.caches[0]).logits
            tokens = logits[:, :size].argmax(-1)
            keeps = (1,) if start == 5 else ()
            sources = torch.tensor([-1, -1] if start == 0 else [0, 1], dtype=torch.int32)
            ids = torch.tensor([4, 7]) if start == 0 else unknown
            batch = step(start, ids, TokenChoices(inputs, keeps, sources))
            result = late.triton.launch(batch, late.caches[1]).result()
            assert result.tokens is not None and result.tokens.tolist() == tokens.tolist()
            torch.testing.assert_close(result.logits, logits[list(keeps)], **TOLERANCE)
    assert late.triton._graphs is not None and len(late.triton._graphs) == 1, "later ones replayed"
