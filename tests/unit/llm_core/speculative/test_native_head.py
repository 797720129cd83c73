"""The compiled draft head against PyTorch's, with equally rounded activations."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels import reference
from kernels.native import Library
from llm_core.batch import Segment, tree_depths
from llm_core.messages import SamplingParams
from llm_core.model.native_decoder import NativeDecoder
from llm_core.quant.grouped import quantize_grouped
from llm_core.scheduling.draft_tree import DraftTree
from llm_core.scheduling.sequence import TokenSequence
from llm_core.speculative.drafters.base import ComputedTokens, DraftRequest, DraftShape
from llm_core.speculative.drafters.eagle import EagleDrafter
from llm_core.speculative.drafters.tree_expansion import HEAD_COUPLING, proposal_probs
from llm_core.speculative.heads.base import ChainHead, DraftHead, HeadBatch
from llm_core.speculative.heads.config import HeadConfig
from llm_core.speculative.heads.eagle import EagleHead, TargetEmbeddings
from llm_core.speculative.heads.native_eagle import NativeEagleHead, unsupported_head_reason
from tests.support.native_library import FORMS, native_library
from tests.support.random_llama import random_tokens, random_weights, tiny_config

NUM_BLOCKS = 40
TOLERANCE = 0.05  # 0.011 was seen: an activation that rounds the other way

KINDS: dict[str, dict[str, Any]] = {
    "published": {},
    "all additions": {
        "normalises_features": True,
        "has_embedding_proj": True,
        "has_hidden_proj": True,
    },
    "the target's words": {"has_lm_head": False, "has_draft_vocab": False, "draft_vocab_size": 97},
    "other heads": {"num_heads": 6, "num_kv_heads": 1, "head_dim": 24, "draft_vocab_size": 37},
}


@pytest.fixture(params=FORMS)
def library(request: pytest.FixtureRequest) -> Library:
    return native_library(request.param)


def head_config(**changes: Any) -> HeadConfig:
    fields: dict[str, Any] = {
        "kind": "eagle3",
        "hidden_size": 64,
        "vocab_size": 97,
        "draft_vocab_size": 53,
        "feature_layers": (0, 1, 2),
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
    }
    return HeadConfig(**(fields | changes))


def head_tensors(config: HeadConfig, seed: int) -> dict[str, torch.Tensor]:
    """Random weights that 8-bit codes represent exactly."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = {
        "fc": (hidden, config.num_features),
        "hidden_proj": (hidden, hidden),
        "embedding_proj": (hidden, hidden),
        "midlayer.self_attn.q_proj": (config.query_size, 2 * hidden),
        "midlayer.self_attn.k_proj": (config.kv_size, 2 * hidden),
        "midlayer.self_attn.v_proj": (config.kv_size, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, config.query_size),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "lm_head": (config.draft_vocab_size, hidden),
    }
    tensors = {}
    for name, (rows, columns) in shapes.items():
        weight = torch.randn(rows, columns, generator=generator) / columns**0.5
        exact = quantize_grouped(weight, 32).dequantize()
        tensors[f"{name}.weight"] = exact[:, :columns]
    names = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    for name in (*(f"midlayer.{name}" for name in names), "norm"):
        tensors[f"{name}.weight"] = 1 + 0.2 * torch.randn(hidden, generator=generator)
    chosen = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size]
    tensors["d2t"] = chosen.sort().values - torch.arange(config.draft_vocab_size)
    return tensors


class Heads:
    """A random head, compiled and in PyTorch, for a random target."""

    def __init__(
        self, library: Library, *, seed: int = 0, num_threads: int = 2, **changes: Any
    ) -> None:
        target_config = tiny_config(embedding_scale=3.0)
        weights = random_weights(target_config, seed)
        for name in ("embedding", "head"):
            weights[name] = quantize_grouped(weights[name], 32).dequantize()[:, :64]
        self.target = NativeDecoder(
            target_config, dict(weights), library, num_threads=num_threads, max_context=128
        )
        self.config = head_config(**changes)
        assert unsupported_head_reason(self.config) is None
        tensors = head_tensors(self.config, seed)
        self.native = NativeEagleHead(self.config, tensors, self.target, max_context=512)
        rows = TargetEmbeddings.of(target_config, dict(weights))
        self.torch = EagleHead(self.config, tensors, rows, max_context=512)
        self.caches = [head.make_cache(NUM_BLOCKS, 16) for head in (self.native, self.torch)]

    def features(self, num_rows: int, seed: int = 1) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(num_rows, self.config.num_features, generator=generator)

    def tokens(self, num_rows: int, seed: int = 1) -> torch.Tensor:
        return random_tokens(tiny_config(), num_rows, seed)

    def batch(
        self,
        tokens: torch.Tensor,
        states: torch.Tensor,
        *segments: Segment,
        outputs: torch.Tensor | None = None,
    ) -> HeadBatch:
        from_target = states.shape[1] == self.config.num_features
        rows = torch.arange(tokens.shape[0]) if outputs is None else outputs
        return HeadBatch(tokens, states, from_target, segments, rows)

    def run(
        self,
        tokens: torch.Tensor,
        states: torch.Tensor,
        *segments: Segment,
        outputs: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch = self.batch(tokens, states, *segments, outputs=outputs)
        result = self.native.forward(batch, self.caches[0])
        return result.logits, result.states

    def compare(
        self, tokens: torch.Tensor, states: torch.Tensor, *segments: Segment
    ) -> torch.Tensor:
        """Both agree; returns the states."""
        batch = self.batch(tokens, states, *segments)
        ours = self.native.forward(batch, self.caches[0])
        with torch.inference_mode():
            theirs = self.torch.forward(batch, self.caches[1])
        for mine, expected in ((ours.logits, theirs.logits), (ours.states, theirs.states)):
            error = (mine - expected).square().mean().sqrt() / expected.square().mean().sqrt()
            assert float(error) < TOLERANCE
        return theirs.states


@pytest.mark.parametrize("kind", KINDS)
def test_forward_matches_pytorch(
    library: Library, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's features, the head's own outputs, a tree; two sequences; blocks in any order."""
    linear = torch.nn.functional.linear

    def rounded(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        return linear(reference.fake_quantize_rows(x, 32), weight, bias)

    monkeypatch.setattr("llm_core.speculative.heads.eagle.functional.linear", rounded)
    seed = random.randrange(1 << 20)
    print("seed", seed)
    heads = Heads(library, seed=seed, **KINDS[kind])
    tables, lengths = ((3, 1, 7), (2, 0, 5)), (31, 9)
    segments = [Segment(table, 0, n) for table, n in zip(tables, lengths, strict=True)]
    states = heads.compare(heads.tokens(40, seed), heads.features(40, seed), *segments)
    ends = states[[30, 39]]
    for step in range(2):
        after = [Segment(t, n + step, 1) for t, n in zip(tables, lengths, strict=True)]
        ends = heads.compare(heads.tokens(2, seed + step), ends, *after)
    tree = Segment(tables[0], 33, 5, (-1, -1, 0, 2, 2))
    heads.compare(heads.tokens(5, seed), states[:5], tree)


def test_results_are_bitwise_independent_of_chunks_batch_and_threads(library: Library) -> None:
    """And of the requested output rows, and of whether a path is part of a tree."""
    results = []
    for num_threads in (1, 2):
        heads = Heads(library, num_threads=num_threads)
        tokens, features, table = heads.tokens(150), heads.features(150), tuple(range(12))
        whole, states = heads.run(tokens, features, Segment(table, 0, 150))
        for cuts in ((0, 64, 150), (0, 1, 3, 148, 150)):
            parts = [
                heads.run(tokens[a:b], features[a:b], Segment(table, a, b - a))[0]
                for a, b in itertools.pairwise(cuts)
            ]
            assert torch.equal(torch.cat(parts), whole)
        wanted = torch.tensor([3, 70, 149])
        some, _ = heads.run(tokens, features, Segment(table, 0, 150), outputs=wanted)
        assert torch.equal(some, whole[wanted])
        none, _ = heads.run(tokens, features, Segment(table, 0, 150), outputs=wanted[:0])
        assert none.shape == (0, 53)
        company = Segment((20,), 0, 9)
        both = torch.cat((heads.tokens(9, 5), tokens[140:]))
        with_features = torch.cat((heads.features(9, 5), features[140:]))
        after, _ = heads.run(both, with_features, company, Segment(table, 140, 10))
        assert torch.equal(after[9:], whole[140:])
        parents = (-1, 0, 0, 1, 2, 2)
        tree, tree_states = heads.run(tokens[:6], states[:6], Segment(table, 150, 6, parents))
        for path in ([0, 1, 3], [0, 2, 4], [0, 2, 5]):
            chain, _ = heads.run(tokens[path], states[path], Segment(table, 150, 3))
            assert torch.equal(tree[path], chain)
        assert max(tree_depths(parents)) == 2
        results.append((whole, tree, tree_states))
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


class HeadWithoutChains:
    """The compiled head without ``draft_chains``: one call for each draft."""

    def __init__(self, head: NativeEagleHead) -> None:
        self.feature_layers, self.target_ids = head.feature_layers, head.target_ids
        self.make_cache, self.forward = head.make_cache, head.forward


def drafts_of(
    head: DraftHead, heads: Heads, requests: list[DraftRequest], features: list[torch.Tensor]
) -> list[DraftTree]:
    drafter = EagleDrafter(head, num_blocks=NUM_BLOCKS, block_size=16, max_sequences=4)
    drafter.observe_computed(
        [
            ComputedTokens(request.sequence, 0, range(len(rows)), rows)
            for request, rows in zip(requests, features, strict=True)
        ]
    )
    return drafter.propose(requests)


@pytest.mark.parametrize("kind", ["published", "all additions"])
def test_chains_match_single_steps(library: Library, kind: str) -> None:
    """Sequences of different lengths in one batch, sampled and greedy, with and without limits."""
    heads = Heads(library, **KINDS[kind])
    without_chains = HeadWithoutChains(heads.native)
    assert isinstance(heads.native, ChainHead) and not isinstance(without_chains, ChainHead)
    dice = random.Random(1)
    greedy = SamplingParams(temperature=0.0)
    drawn = [
        SamplingParams(temperature=0.7, top_p=0.8),
        SamplingParams(temperature=1.3, top_k=5),
        SamplingParams(temperature=1.0, min_p=0.2),
        SamplingParams(temperature=0.9, top_k=20, top_p=0.5, min_p=0.01),
        SamplingParams(temperature=0.001),
    ]
    num_drafts = 0
    for case in range(20):
        requests, features = [], []
        for index, length in enumerate((30, 17, 2)):
            params = greedy if index == case % 3 else dice.choice(drawn)
            depth = dice.randint(1, 6)
            least, followed = dice.choice([0.0, 0.01, 0.05]), dice.choice([0.0, 0.0, 0.03, 0.5])
            shape = DraftShape(depth, 6, 1, least, followed)
            uniforms = () if params is greedy else tuple(dice.random() for _ in range(6))
            tokens = heads.tokens(length + 1, case * 3 + index).tolist()
            sequence = TokenSequence(index, tokens, max_len=100, arrival_ns=0)
            sequence.block_ids.extend(range(4 * index, 4 * index + 3))
            sequence.computed_len = length
            requests.append(DraftRequest(sequence, shape, params, uniforms))
            features.append(heads.features(length, case * 3 + index))
        chains = drafts_of(heads.native, heads, requests, features)
        singly = drafts_of(without_chains, heads, requests, features)
        for one, other, request in zip(chains, singly, requests, strict=True):
            assert one.token_ids == other.token_ids
            # What is nearly as likely as the likeliest has a share at 0.001 yet, here or there.
            is_cold = 0 < request.params.temperature < 0.01
            rel = 0.01 if is_cold else 1e-4
            assert one.probabilities == pytest.approx(other.probabilities, rel=rel)
            num_drafts += len(one)
    assert num_drafts > 60


def test_siblings_are_the_next_best_candidates(library: Library) -> None:
    """The chain is the same with and without them and comes first; behind it, for each depth, the
    likeliest words (to be drawn) but the chain's."""
    heads = Heads(library)
    params = (SamplingParams(temperature=0.0), SamplingParams(temperature=0.7, top_p=0.9))
    plain, wanted, features = [], [], []
    for index, (length, siblings) in enumerate(((30, 3), (17, 1), (9, 0), (5, 2))):
        tokens = heads.tokens(length + 1, index).tolist()
        sequence = TokenSequence(index, tokens, max_len=100, arrival_ns=0)
        sequence.block_ids.extend(range(4 * index, 4 * index + 3))
        sequence.computed_len = length
        uniforms = (0.3, 0.6, 0.9) if index % 2 else ()
        shape = DraftShape(20, 3)
        plain.append(DraftRequest(sequence, shape, params[index % 2], uniforms))
        wanted.append(replace(plain[-1], shape=replace(shape, siblings=siblings)))
        features.append(heads.features(length, index))
    chains = drafts_of(heads.native, heads, plain, features)
    trees = drafts_of(heads.native, heads, wanted, features)
    ids = heads.native.target_ids.tolist()
    for index, (chain, tree) in enumerate(zip(chains, trees, strict=True)):
        tree.check()
        count, depth = wanted[index].shape.siblings, len(chain)
        assert len(tree) == depth * (1 + count) and tree.subtree(range(depth)) == chain
        length = len(features[index])
        tokens = torch.tensor(plain[index].sequence.token_ids[1:])
        table = tuple(plain[index].sequence.block_ids)
        logits, _ = heads.run(tokens, features[index], Segment(table, 0, length))
        expected = logits[-1].softmax(-1)
        uniforms = wanted[index].uniforms
        if uniforms:
            row = logits[-1].numpy()
            kept, probs_drawn = proposal_probs(
                row, wanted[index].params, uniforms[0], HEAD_COUPLING
            )
            expected = torch.zeros(len(row), dtype=torch.float64)
            expected[torch.arange(len(row)) if kept is None else kept] = torch.tensor(probs_drawn)
        order = [
            i for i in expected.argsort(descending=True).tolist() if ids[i] != chain.token_ids[0]
        ]
        assert tree.token_ids[depth : depth + count] == tuple(ids[i] for i in order[:count])
        probs = tree.probabilities[depth : depth + count]
        assert probs == pytest.approx([float(expected[i]) for i in order[:count]], rel=1e-3)
        assert tree.parents[depth:] == tuple(d - 1 for d in range(depth) for _ in range(count))


def test_out_of_range_indices_are_refused(library: Library) -> None:
    heads = Heads(library)
    features, zero = heads.features(2), torch.tensor([0])
    for tokens, segment, outputs, words in [
        ([97], Segment((0,), 0, 1), zero, "token"),
        ([1], Segment((NUM_BLOCKS,), 0, 1), zero, "block"),
        ([1], Segment((0,), 16, 1), zero, "too few blocks"),
        ([1], Segment(tuple(range(33)), 512, 1), zero, "context"),
        ([1], Segment((0,), 0, 1), torch.tensor([1]), "row"),
        ([1, 1], Segment((0,), 0, 2), torch.tensor([1, 0]), "row"),
        ([1, 1], Segment((0,), 0, 2, (1, -1)), zero, "tree"),
    ]:
        rows = torch.tensor(tokens)
        with pytest.raises(IndexError, match=words):
            heads.run(rows, features[: len(tokens)], segment, outputs=outputs)
    batch = heads.batch(torch.tensor([1]), features[:1], Segment((0,), 13, 1))
    sequence = TokenSequence(0, [1], max_len=9, arrival_ns=0)
    request = DraftRequest(sequence, DraftShape(9, 9), SamplingParams(temperature=0.0))
    (chain,) = heads.native.draft_chains(batch, heads.caches[0], [request])
    assert len(chain) == 3  # what the block has room for, and one that is not read


def test_invalid_heads_are_refused(library: Library) -> None:
    heads = Heads(library)
    tensors = head_tensors(heads.config, 0)
    tensors["d2t"][52] = 50
    with pytest.raises(ValueError, match="d2t"):
        NativeEagleHead(heads.config, tensors, heads.target, max_context=64)
    tensors = head_tensors(heads.config, 0)
    tensors["fc.weight"][3, 4] = float("inf")
    with pytest.raises(ValueError, match="finite"):
        NativeEagleHead(heads.config, tensors, heads.target, max_context=64)
    assert "head_dim 12" in str(unsupported_head_reason(head_config(head_dim=12)))
    medusa = head_config(kind="medusa", feature_layers=(2,), num_medusa_heads=2)
    assert "medusa" in str(unsupported_head_reason(medusa))
