"""Draft trees and features in the compiled decoder: bits of a chain, and torch's values."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from kernels.native import Library
from kernels.native.library import MAX_TREE_ROWS
from llm_core.batch import ForwardBatch, ForwardResult, Segment, tree_depths
from llm_core.config import KvDtype
from llm_core.model.kv_cache import KvCache
from tests.support.native_library import FORMS, native_library
from tests.support.native_pair import NUM_BLOCKS, TOLERANCE, Pair, round_activations
from tests.support.random_llama import random_tokens, tiny_config

SHAPES: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "heads of 24, three a group": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 24},
    "multi-query": {"num_heads": 5, "num_kv_heads": 1, "head_dim": 8},
    "windows of 40 and 3": {"sliding_window": 40, "layer_is_sliding": (True, True)},
    "gemma2": {
        "post_norms": True,
        "attention_softcap": 5.0,
        "sliding_window": 3,
        "layer_is_sliding": (True, False),
    },
    "qwen3": {"qk_norm": True, "head_dim": 32},
}


@pytest.fixture(params=FORMS)
def library(request: pytest.FixtureRequest) -> Library:
    return native_library(request.param)


@pytest.fixture
def rounded_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    round_activations(monkeypatch)


def random_tree(dice: random.Random, num_rows: int) -> tuple[int, ...]:
    """Parents; one root or several, deep or flat."""
    reach = dice.choice([1, 2, 4, num_rows])
    return tuple(max(-1, row - dice.randint(1, reach)) for row in range(num_rows))


def path_to(parents: tuple[int, ...], row: int) -> list[int]:
    """The rows from a root to ``row``."""
    path = []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path[::-1]


class Trees:
    """One random model with a prompt in its cache; runs trees and chains behind it."""

    def __init__(self, pair: Pair, prompt_len: int, seed: int) -> None:
        self.pair, self.prompt_len = pair, prompt_len
        self.cache: KvCache = pair.caches[1]
        blocks = list(range(NUM_BLOCKS))
        random.Random(seed).shuffle(blocks)
        self.table = tuple(blocks[: NUM_BLOCKS * 3 // 4])
        self.others = tuple(blocks[NUM_BLOCKS * 3 // 4 :])
        self.run(random_tokens(pair.config, prompt_len, seed), Segment(self.table, 0, prompt_len))

    def run(self, tokens: torch.Tensor, *segments: Segment, **options: Any) -> ForwardResult:
        batch = ForwardBatch(tokens, segments, torch.arange(tokens.shape[0]), **options)
        return self.pair.native.forward(batch, self.cache)

    def tree(self, parents: tuple[int, ...]) -> Segment:
        return Segment(self.table, self.prompt_len, len(parents), parents)

    def check(self, parents: tuple[int, ...], tokens: torch.Tensor) -> None:
        """Every row's logits are those of its path as a chain."""
        logits = self.run(tokens, self.tree(parents)).logits
        leaves = set(range(len(parents))) - set(parents)
        for leaf in leaves:
            path = path_to(parents, leaf)
            chain = self.run(tokens[path], Segment(self.table, self.prompt_len, len(path))).logits
            assert torch.equal(logits[path], chain), f"{parents}, leaf {leaf}"


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_tree_is_bit_identical_to_its_paths(
    library: Library, shape: str, kv_dtype: KvDtype
) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    dice = random.Random(seed)
    config = tiny_config(context_len=256, **SHAPES[shape])
    pair = Pair(library, config, kv_dtype=kv_dtype, block_size=dice.choice([4, 16]))
    for prompt_len in (dice.randint(1, 63), dice.choice([64, 120, 127])):
        trees = Trees(pair, prompt_len, seed % 1000)
        for num_rows in (2, dice.randint(3, 16), dice.randint(17, 30)):
            tokens = random_tokens(config, num_rows, seed % 1000 + num_rows)
            trees.check(random_tree(dice, num_rows), tokens)


def test_a_deep_tree_crosses_chunks(library: Library) -> None:
    """A path of 150 rows with stubs beside it: several chunks of the sequence lie in the tree."""
    config = tiny_config(context_len=512)
    parents = tuple(row - 1 if row % 3 else max(-1, row - 2) for row in range(200))
    trees = Trees(Pair(library, config, block_size=16), 50, seed=1)
    trees.check(parents, random_tokens(config, 200, seed=2))


def test_a_tree_does_not_depend_on_the_batch(library: Library) -> None:
    """Alone, and between a prompt's chunk, another tree and a chain: the same bits."""
    config = tiny_config(context_len=256, num_heads=6)
    trees = Trees(Pair(library, config), 70, seed=3)
    tokens, parents = random_tokens(config, 6), (-1, 0, 0, 1, 1, 2)
    alone = trees.run(tokens, trees.tree(parents)).logits
    chunk = Segment(trees.others[:2], 0, 20)
    other = Segment(trees.others[2:3], 0, 3, (-1, -1, 0))
    chain = Segment(trees.others[3:4], 0, 4, (-1, 0, 1, 2))
    company = random_tokens(config, 27, seed=4)
    rows = torch.cat((company[:20], tokens, company[20:]))
    together = trees.run(rows, chunk, trees.tree(parents), other, chain).logits
    assert torch.equal(together[20:26], alone)
    plain = Segment(trees.others[3:4], 0, 4)
    assert torch.equal(trees.run(company[23:], plain).logits, together[29:])


@pytest.mark.usefixtures("rounded_activations")
@pytest.mark.parametrize("shape", SHAPES)
def test_trees_equal_torch(library: Library, shape: str) -> None:
    pair = Pair(library, tiny_config(**SHAPES[shape]), seed=6)
    table = tuple(range(8))
    pair.run(random_tokens(pair.config, 40), (Segment(table, 0, 40),), torch.tensor([39]))
    parents = (-1, 0, 0, 1, 2, 2, 3, 3)
    tokens = random_tokens(pair.config, 8, seed=7)
    pair.run(tokens, (Segment(table, 40, 8, parents),), torch.arange(8))
    assert max(tree_depths(parents)) == 3


@pytest.mark.usefixtures("rounded_activations")
@pytest.mark.parametrize("layers", [(0,), (1,), (2,), (2, 0, 1), (0, 2)])
@pytest.mark.parametrize("post_norms", [False, True])
def test_features_equal_torch(library: Library, layers: tuple[int, ...], post_norms: bool) -> None:
    """Of all rows, whichever logits are asked for; and the logits do not change a bit by it."""
    pair = Pair(library, tiny_config(post_norms=post_norms), seed=8)
    for model in (pair.torch, pair.native):
        model.set_feature_layers(layers)
    tokens, segment = random_tokens(pair.config, 21), Segment((0, 1), 0, 21)
    for logit_rows in (torch.tensor([20]), torch.arange(21), torch.tensor([], dtype=torch.int64)):
        batch = ForwardBatch(tokens, (segment,), logit_rows, wants_features=True)
        with torch.inference_mode():
            expected = pair.torch.forward(batch, pair.caches[0]).features
            result = pair.native.forward(batch, pair.caches[1])
        assert expected is not None and result.features is not None
        assert result.features.shape == expected.shape == (21, 64 * len(layers))
        for theirs, ours in zip(expected.split(64, 1), result.features.split(64, 1), strict=True):
            error = (ours - theirs).square().mean().sqrt() / theirs.square().mean().sqrt()
            assert float(error) < TOLERANCE
        plain = pair.native.forward(ForwardBatch(tokens, (segment,), logit_rows), pair.caches[1])
        assert plain.features is None
        assert torch.equal(plain.logits, result.logits)


def test_no_layers_no_features(library: Library) -> None:
    pair = Pair(library, tiny_config())
    batch = ForwardBatch(torch.tensor([1]), (Segment((0,), 0, 1),), torch.tensor([0]), True)
    assert pair.native.forward(batch, pair.caches[1]).features is None


def test_malformed_trees_are_rejected(library: Library) -> None:
    pair = Pair(library, tiny_config(context_len=2 * MAX_TREE_ROWS), block_size=16)
    table = tuple(range(NUM_BLOCKS))
    for parents in [(0, 0), (-1, 1), (-2, 0), (-1,) * (MAX_TREE_ROWS + 1), (-1, 0, 0)]:
        num_rows = 2 if len(parents) == 3 else len(parents)
        segment = Segment(table, 0, num_rows, parents)
        batch = ForwardBatch(torch.ones(num_rows, dtype=torch.int64), (segment,), torch.arange(1))
        with pytest.raises(IndexError, match="tree"):
            pair.native.forward(batch, pair.caches[1])
