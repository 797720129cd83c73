"""The compiled decoder against torch's, with equal weights and equally quantised activations."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kernels.native import Library
from llm_core.batch import MAXIMA_BLOCK, ForwardBatch, Segment
from llm_core.config import KvDtype
from llm_core.model.native_decoder import NativeDecoder, unsupported_reason
from llm_core.quant.formats import Weight
from tests.support.native_library import FORMS, native_library
from tests.support.native_pair import NUM_BLOCKS, Pair, round_activations
from tests.support.random_llama import FAMILIES, random_tokens, random_weights, tiny_config


@pytest.fixture(params=FORMS)
def library(request: pytest.FixtureRequest) -> Library:
    return native_library(request.param)


@pytest.fixture
def rounded_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    round_activations(monkeypatch)


def ragged_steps() -> Iterator[tuple[list[tuple[int, int, int]], bool]]:
    """Steps of three sequences, as (sequence, start, length): prompts, chunks, single rows."""
    yield [(0, 0, 1)], True
    yield [(0, 1, 37), (1, 0, 5)], True
    yield [(2, 0, 50)], False
    yield [(0, 38, 1), (1, 5, 1), (2, 50, 1)], True
    yield [(1, 6, 9), (0, 39, 2)], True
    yield [(0, 41, 1)], True


@pytest.mark.usefixtures("rounded_activations")
@pytest.mark.parametrize("family", FAMILIES)
def test_forward_equals_torch(library: Library, family: str) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    pair = Pair(library, tiny_config(**FAMILIES[family]), seed=seed)
    _run_steps(pair, seed)


@pytest.mark.usefixtures("rounded_activations")
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("block_size", [4, 64])
def test_all_cache_dtypes(library: Library, kv_dtype: KvDtype, block_size: int) -> None:
    config = tiny_config(num_heads=6, num_kv_heads=2, sliding_window=11)
    pair = Pair(library, config, kv_dtype=kv_dtype, block_size=block_size, num_threads=1)
    _run_steps(pair, seed=3)


def _run_steps(pair: Pair, seed: int) -> None:
    per_sequence = -(-64 // pair.caches[0].block_size)
    blocks = list(range(NUM_BLOCKS))
    random.Random(seed).shuffle(blocks)
    tables = [tuple(blocks[i * per_sequence : (i + 1) * per_sequence]) for i in range(3)]
    for cache in pair.caches:  # what is not yet written must not be read
        cache.data.fill_(float("nan") if cache.data.is_floating_point() else 99)
        if cache.scales is not None:
            cache.scales.fill_(float("nan"))
    for step, (parts, wants_logits) in enumerate(ragged_steps()):
        segments = tuple(Segment(tables[s], start, length) for s, start, length in parts)
        num_rows = sum(length for _, _, length in parts)
        tokens = random_tokens(pair.config, num_rows, seed=seed % 1000 + step)
        ends = torch.tensor([length for _, _, length in parts]).cumsum(0) - 1
        rows = ends if wants_logits else torch.empty(0, dtype=torch.int64)
        if step == 4:
            rows = torch.arange(num_rows)
        pair.run(tokens, segments, rows)


@pytest.mark.usefixtures("rounded_activations")
def test_long_prompt_and_many_streams(library: Library) -> None:
    """Several blocks of rows, of queries and of keys; more streams than a block of rows."""
    config = tiny_config(context_len=640)
    pair = Pair(library, config, seed=5)
    table = tuple(range(NUM_BLOCKS // 2))
    pair.run(random_tokens(config, 300), (Segment(table, 0, 300),), torch.tensor([0, 150, 299]))
    pair.run(random_tokens(config, 70), (Segment(table, 300, 70),), torch.tensor([69]))
    streams = tuple(Segment((block,), 0, 1) for block in range(20))
    pair.run(random_tokens(config, 20), streams, torch.arange(20))


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 70, "layer_is_sliding": (True, True)}])
def test_logits_are_bit_identical_in_any_batch(library: Library, changes: dict[str, Any]) -> None:
    """A row's logits are the same alone, among other streams, and within a draft's few rows."""
    config = tiny_config(context_len=256, num_heads=6, **changes)
    pair = Pair(library, config)
    prompt, draft = random_tokens(config, 150), random_tokens(config, 8, seed=2)
    table = tuple(range(16))

    def run(tokens: torch.Tensor, *segments: Segment) -> torch.Tensor:
        batch = ForwardBatch(tokens, segments, torch.arange(tokens.shape[0]))
        return pair.native.forward(batch, pair.caches[1]).logits

    run(prompt, Segment(table, 0, 150))
    alone = [run(draft[i : i + 1], Segment(table, 150 + i, 1)) for i in range(8)]
    assert torch.equal(run(draft, Segment(table, 150, 8)), torch.cat(alone))
    assert torch.equal(run(draft[:5], Segment(table, 150, 5)), torch.cat(alone[:5]))
    others = [Segment((20 + i,), 0, 1) for i in range(12)]
    tokens = torch.cat((random_tokens(config, 12, seed=3), draft[:1]))
    assert torch.equal(run(tokens, *others, Segment(table, 150, 1))[-1:], alone[0])


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_heads": 6, "num_kv_heads": 2},
        {"sliding_window": 40, "layer_is_sliding": (True, False)},
        {"attention_softcap": 20.0, "logit_softcap": 30.0},
    ],
)
def test_logits_are_bit_identical_for_any_chunking(
    library: Library, changes: dict[str, Any], kv_dtype: KvDtype
) -> None:
    """A cached beginning and a cold one, whatever the chunks, give the same logits."""
    config = tiny_config(context_len=256, **changes)
    pair = Pair(library, config, kv_dtype=kv_dtype)
    tokens, table = random_tokens(config, 150), tuple(range(16))

    def run(*lengths: int) -> torch.Tensor:
        logits, start = [], 0
        for length in lengths:
            rows = tokens[start : start + length]
            batch = ForwardBatch(rows, (Segment(table, start, length),), torch.arange(length))
            logits.append(pair.native.forward(batch, pair.caches[1]).logits)
            start += length
        return torch.cat(logits)

    whole = run(150)
    for lengths in ((64, 86), (1,) * 150, (7, 9, 50, 1, 83), (149, 1)):
        assert torch.equal(run(*lengths), whole), lengths


def test_logits_are_bit_identical_for_any_number_of_threads(library: Library) -> None:
    config = tiny_config()
    tokens = random_tokens(config, 60)
    results = []
    for num_threads in (1, 2, 5):
        pair = Pair(library, config, num_threads=num_threads)
        batch = ForwardBatch(tokens, (Segment(tuple(range(4)), 0, 60),), torch.arange(60))
        results += [pair.native.forward(batch, pair.caches[1]).logits for _ in range(3)]
    assert all(torch.equal(result, results[0]) for result in results)


def test_indices_out_of_range_are_rejected(library: Library) -> None:
    pair = Pair(library, tiny_config())
    one, zero = torch.tensor([1]), torch.tensor([0])
    for tokens, segment, rows, words in [
        (torch.tensor([97]), Segment((0,), 0, 1), zero, "token"),
        (torch.tensor([-1]), Segment((0,), 0, 1), zero, "token"),
        (one, Segment((NUM_BLOCKS,), 0, 1), zero, "block"),
        (one, Segment((-1,), 0, 1), zero, "block"),
        (one, Segment((0,), 0, 1), one, "logit row"),
        (one, Segment((0,), 0, 2), zero, "segment"),
        (one, Segment((0,), 16, 1), zero, "too few blocks"),
        (one, Segment(tuple(range(9)), 128, 1), zero, "context"),
        (one, Segment((0,), 0, 0), zero, "segment"),
    ]:
        with pytest.raises(IndexError, match=words):
            pair.native.forward(ForwardBatch(tokens, (segment,), rows), pair.caches[1])


def test_weights_that_are_not_finite_are_rejected(library: Library) -> None:
    weights: dict[str, Weight] = dict(random_weights(tiny_config()))
    weights["layers.1.down"][3, 4] = float("nan")  # type: ignore[index]
    with pytest.raises(ValueError, match="finite"):
        NativeDecoder(tiny_config(), weights, library, num_threads=1, max_context=64)


def test_profile_has_the_phases_that_ran(library: Library) -> None:
    pair = Pair(library, tiny_config())
    pair.native.start_profile()
    batch = ForwardBatch(torch.tensor([1]), (Segment((0,), 0, 1),), torch.tensor([0]))
    pair.native.forward(batch, pair.caches[1])
    times = pair.native.profile_us()
    assert {"query/key/value", "attention", "gate/up", "down", "head"} <= set(times)
    assert "ffn post norm" not in times


@pytest.mark.parametrize("vocab_size", [63, 128, 1000])
@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_block_maxima(library: Library, vocab_size: int, num_rows: int) -> None:
    pair = Pair(library, tiny_config(vocab_size=vocab_size))
    rows = torch.arange(num_rows)
    segment = Segment(tuple(range(3)), 0, num_rows)
    result = pair.native.forward(ForwardBatch(rows, (segment,), rows), pair.caches[1])
    assert result.block_maxima is not None
    pieces = [piece.amax(1) for piece in result.logits.split(MAXIMA_BLOCK, dim=1)]
    assert torch.equal(result.block_maxima, torch.stack(pieces, 1))


def test_block_maximum_is_nan_if_a_logit_is(library: Library) -> None:
    pair = Pair(library, tiny_config(vocab_size=130))
    head = pair.native.struct.head
    bias = torch.zeros(head.num_tiles * 8)
    bias[65], bias[129] = float("nan"), float("inf")
    head.bias = bias.data_ptr()
    pair.native.struct.head = head
    batch = ForwardBatch(torch.tensor([1]), (Segment((0,), 0, 1),), torch.tensor([0]))
    result = pair.native.forward(batch, pair.caches[1])
    assert result.block_maxima is not None
    first, second, third = result.block_maxima[0].tolist()
    assert first == result.logits[0, :64].max() and second != second and third == float("inf")


def test_unsupported_shapes_are_named() -> None:
    assert unsupported_reason(tiny_config()) is None
    assert "head_dim 6" in str(unsupported_reason(tiny_config(head_dim=6)))
    wide = tiny_config(num_heads=64, num_kv_heads=1)
    assert "64 query heads" in str(unsupported_reason(wide))
