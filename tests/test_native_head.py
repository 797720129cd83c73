"""The compiled draft head against its formulas in torch, with the same rounded activations."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from kernels import reference
from kernels.native import Library
from llm_core.batch import Segment, tree_depths
from llm_core.config import ModelConfig
from llm_core.kv_cache import KvCache
from llm_core.native_decoder import NativeDecoder
from llm_core.quant.grouped import quantize_grouped
from llm_core.rope import rope_tables
from llm_core.speculative.draft_head import HeadBatch
from llm_core.speculative.head_config import HeadConfig
from llm_core.speculative.native_head import ChainOptions, NativeHead, unsupported_head_reason
from tests.native_library import FORMS, native_library
from tests.random_llama import random_tokens, random_weights, tiny_config

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
    """Random weights that 8 bits hold exactly."""
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


class PlainHead:
    """The formulas of ``head_config``, a sequence's rows one by one, keys and values in a list."""

    def __init__(
        self,
        config: HeadConfig,
        tensors: dict[str, torch.Tensor],
        embedding: torch.Tensor,
        words: torch.Tensor,
    ) -> None:
        self.config, self.tensors, self.embedding, self.words = config, tensors, embedding, words
        model = ModelConfig(
            num_layers=1,
            hidden_size=64,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=1,
            vocab_size=1,
            context_len=512,
        )
        self.rotations = rope_tables(model, 512).of_layer(0)[:, 0]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self.words if name == "lm_head" else self.tensors[f"{name}.weight"]
        return reference.fake_quantize_rows(x.unsqueeze(0), 32)[0] @ weight.T

    def norm(self, name: str | None, x: torch.Tensor) -> torch.Tensor:
        normed = x / (x.square().mean() + self.config.rms_eps).sqrt()
        return normed if name is None else normed * self.tensors[f"{name}.weight"]

    def rotated(self, heads: torch.Tensor, position: int) -> torch.Tensor:
        """heads [N, head_dim] in halves."""
        halves = torch.complex(*heads.chunk(2, -1))
        turned = halves * self.rotations[position]
        return torch.cat((turned.real, turned.imag), -1)

    def row(
        self,
        token: int,
        state: torch.Tensor,
        is_real: bool,
        position: int,
        seen: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits, state); ``seen`` gets the row's key and value."""
        config, attention = self.config, "midlayer.self_attn."
        if is_real and config.normalises_features:
            state = torch.cat([self.norm(None, part) for part in state.split(config.hidden_size)])
        if is_real:
            residual = self.linear("fc", state)
        else:
            residual = self.linear("hidden_proj", state) if config.has_hidden_proj else state
        embedded = self.embedding[token]
        if config.has_embedding_proj:
            residual = residual + self.linear("embedding_proj", embedded)
        joined = torch.cat(
            (
                self.norm("midlayer.input_layernorm", embedded),
                self.norm("midlayer.hidden_norm", residual),
            )
        )
        query, key, value = (
            self.linear(f"{attention}{name}_proj", joined).view(-1, config.head_dim)
            for name in "qkv"
        )
        seen.append((self.rotated(key, position), value))
        keys = torch.stack([key for key, _ in seen], 1)  # [kv_heads, positions, head_dim]
        values = torch.stack([value for _, value in seen], 1)
        group = config.num_heads // config.num_kv_heads
        queries = self.rotated(query, position).view(config.num_kv_heads, group, -1)
        weights = (queries @ keys.transpose(1, 2) * config.head_dim**-0.5).softmax(-1)
        residual = residual + self.linear(f"{attention}o_proj", (weights @ values).flatten())
        normed = self.norm("midlayer.post_attention_layernorm", residual)
        gate, up = (self.linear(f"midlayer.mlp.{name}_proj", normed) for name in ("gate", "up"))
        inner = torch.nn.functional.silu(gate) * up
        state = residual + self.linear("midlayer.mlp.down_proj", inner)
        return self.linear("lm_head", self.norm("norm", state)), state


class Heads:
    """One random head, compiled and plain, beside one random target."""

    def __init__(
        self, library: Library, *, seed: int = 0, num_threads: int = 2, **changes: Any
    ) -> None:
        target_config = tiny_config(embedding_scale=3.0)
        weights = random_weights(target_config, seed)
        for name in ("embedding", "head"):
            weights[name] = quantize_grouped(weights[name], 32).dequantize()[:, :64]
        target = NativeDecoder(
            target_config, dict(weights), library, num_threads=num_threads, max_context=128
        )
        self.config = head_config(**changes)
        assert unsupported_head_reason(self.config) is None
        tensors = head_tensors(self.config, seed)
        self.native = NativeHead(self.config, tensors, target, max_context=512)
        words = tensors["lm_head.weight"] if self.config.has_lm_head else weights["head"]
        self.plain = PlainHead(self.config, tensors, 3.0 * weights["embedding"], words)
        self.cache: KvCache = self.native.make_cache(NUM_BLOCKS, 16)
        self.seed = seed

    def features(self, num_rows: int, seed: int = 1) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(num_rows, self.config.num_features, generator=generator)

    def tokens(self, num_rows: int, seed: int = 1) -> torch.Tensor:
        return random_tokens(tiny_config(), num_rows, seed)

    def run(
        self,
        tokens: torch.Tensor,
        states: torch.Tensor,
        *segments: Segment,
        outputs: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        is_real = states.shape[1] == self.config.num_features
        rows = torch.arange(tokens.shape[0]) if outputs is None else outputs
        result = self.native.forward(HeadBatch(tokens, states, is_real, segments, rows), self.cache)
        return result.logits, result.states


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    error = (ours - theirs).square().mean().sqrt() / theirs.square().mean().sqrt()
    assert float(error) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_rows_equal_the_formulas(library: Library, kind: str) -> None:
    """Real features, then its own outputs; two sequences together; blocks in any order."""
    seed = random.randrange(1 << 20)
    print("seed", seed)
    heads = Heads(library, seed=seed, **KINDS[kind])
    tables = ((3, 1, 7), (2, 0, 5))
    lengths = (11, 4)
    tokens = heads.tokens(15, seed)
    features = heads.features(15, seed)
    segments = [Segment(table, 0, n) for table, n in zip(tables, lengths, strict=True)]
    logits, states = heads.run(tokens, features, *segments)
    seen: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[], []]
    plain = []
    for sequence, row in [(0, i) for i in range(11)] + [(1, i) for i in range(4)]:
        at = row + 11 * sequence
        plain.append(heads.plain.row(int(tokens[at]), features[at], True, row, seen[sequence]))
    assert_close(logits, torch.stack([each for each, _ in plain]))
    assert_close(states, torch.stack([each for _, each in plain]))
    for step in range(3):  # each compared from the same states
        ends = torch.stack([plain[10][1], plain[14][1]]) if step == 0 else states
        tokens = heads.tokens(2, seed + step)
        after = [Segment(t, n + step, 1) for t, n in zip(tables, lengths, strict=True)]
        logits, states = heads.run(tokens, ends, *after)
        plain = [
            heads.plain.row(int(tokens[i]), ends[i], False, lengths[i] + step, seen[i])
            for i in range(2)
        ]
        assert_close(logits, torch.stack([each for each, _ in plain]))
        assert_close(states, torch.stack([each for _, each in plain]))


def test_cutting_company_and_threads_do_not_change_a_bit(library: Library) -> None:
    """Nor does it which outputs are asked for, nor whether the last rows are a tree."""
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


def chain_step_by_step(
    heads: Heads,
    tokens: torch.Tensor,
    features: torch.Tensor,
    segment: Segment,
    count: int,
    fractions: tuple[float, ...] = (),
    temperature: float = 1.0,
) -> tuple[list[int], list[float]]:
    """What ``draft_chains`` says in one call, by calls of ``forward``."""
    last = torch.tensor([tokens.shape[0] - 1])
    logits, state = heads.run(tokens, features, segment, outputs=last)
    chosen: list[int] = []
    probabilities = []
    for step in range(count):
        weights = (logits[0] / (temperature if step < len(fractions) else 1.0)).softmax(0)
        if step < len(fractions):
            word = int((weights.double().cumsum(0) <= fractions[step]).sum().clamp(max=52))
        else:
            word = int(logits[0].argmax())
        chosen.append(int(heads.native.target_ids[word]))
        probabilities.append(float(weights[word]))
        after = Segment(segment.block_ids, segment.end + step, 1)
        logits, state = heads.run(torch.tensor(chosen[-1:]), state, after)
    return chosen, probabilities


@pytest.mark.parametrize("kind", ["published", "all additions"])
def test_chains_equal_single_steps(library: Library, kind: str) -> None:
    """Of sequences of different lengths together, drawn and likeliest, ended early and not."""
    heads = Heads(library, **KINDS[kind])
    tables, lengths = ((0, 1, 2), (5, 4), (6,)), (30, 17, 2)
    segments = tuple(Segment(t, 0, n) for t, n in zip(tables, lengths, strict=True))
    tokens, features = heads.tokens(49), heads.features(49)
    fractions = ((0.2, 0.9, 0.5, 0.999), (0.7,), ())
    temperatures = (0.7, 1.3, 1.0)
    expected = []
    for i, start in enumerate((0, 30, 47)):
        rows = slice(start, start + lengths[i])
        expected.append(
            chain_step_by_step(
                heads, tokens[rows], features[rows], segments[i], 4, fractions[i], temperatures[i]
            )
        )
    batch = HeadBatch(tokens, features, True, segments, torch.tensor([29, 46, 48]))
    options = ChainOptions(4, fractions=fractions, temperatures=temperatures)
    for chain, (chosen, probabilities) in zip(
        heads.native.draft_chains(batch, heads.cache, options), expected, strict=True
    ):
        assert list(chain.token_ids) == chosen
        assert chain.probabilities == pytest.approx(probabilities, rel=1e-4)
    limit = expected[0][1][0] * expected[0][1][1] * 0.99  # the first sequence has two to say
    options = ChainOptions(4, limit, fractions, temperatures)
    for chain, (chosen, probabilities) in zip(
        heads.native.draft_chains(batch, heads.cache, options), expected, strict=True
    ):
        products = list(itertools.accumulate(probabilities, lambda a, b: a * b))
        count = sum(product >= limit for product in products)
        assert list(chain.token_ids) == chosen[:count]
    nothing = heads.native.draft_chains(batch, heads.cache, ChainOptions(4, 1.0))
    assert all(chain.token_ids == () for chain in nothing)


def test_what_is_outside_is_refused(library: Library) -> None:
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
    batch = HeadBatch(torch.tensor([1]), features[:1], True, (Segment((0,), 14, 1),), zero)
    heads.native.draft_chains(batch, heads.cache, ChainOptions(2))
    with pytest.raises(IndexError, match="too few blocks"):
        heads.native.draft_chains(batch, heads.cache, ChainOptions(3))


def test_words_outside_the_target_and_other_kinds_are_named(library: Library) -> None:
    heads = Heads(library)
    tensors = head_tensors(heads.config, 0)
    tensors["d2t"][52] = 50
    with pytest.raises(ValueError, match="d2t"):
        NativeHead(heads.config, tensors, heads.native._target, max_context=64)
    tensors = head_tensors(heads.config, 0)
    tensors["fc.weight"][3, 4] = float("inf")
    with pytest.raises(ValueError, match="finite"):
        NativeHead(heads.config, tensors, heads.native._target, max_context=64)
    assert "head_dim 12" in str(unsupported_head_reason(head_config(head_dim=12)))
    medusa = head_config(kind="medusa", feature_layers=(2,), num_medusa_heads=2)
    assert "medusa" in str(unsupported_head_reason(medusa))
