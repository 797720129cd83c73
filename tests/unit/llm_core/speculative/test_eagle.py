"""EAGLE heads in PyTorch against their formulas, written out row by row."""

from __future__ import annotations

import math

import pytest
import torch

from llm_core.batch import Segment
from llm_core.offline.options import HeadKind
from llm_core.speculative.heads.base import HeadBatch
from llm_core.speculative.heads.config import HeadConfig
from llm_core.speculative.heads.eagle import (
    EagleHead,
    TargetEmbeddings,
    halves_to_pairs,
    head_shapes,
    pairs_to_halves,
    target_ids,
)
from llm_core.speculative.heads.medusa import MedusaHeads
from tests.support.random_head import random_head_tensors

HIDDEN, VOCAB = 24, 50


def config_for(kind: HeadKind, *, extras: bool = False) -> HeadConfig:
    is_eagle3 = kind == "eagle3"
    return HeadConfig(
        kind=kind,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB if kind == "eagle1" else 20,
        feature_layers=(1, 2, 4) if is_eagle3 else (4,),
        num_heads=3,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=40,
        normalises_features=extras,
        has_embedding_proj=extras,
        has_hidden_proj=extras,
        has_lm_head=is_eagle3 and not extras,
        has_draft_vocab=kind != "eagle1",
        num_medusa_heads=2 if kind == "medusa" else 0,
    )


def norm(x: torch.Tensor, weight: torch.Tensor | float = 1.0) -> torch.Tensor:
    return x / math.sqrt(float((x * x).mean()) + 1e-5) * weight


def turned(head: torch.Tensor, place: int) -> torch.Tensor:
    """RoPE in the published order: value j is rotated with value j + half."""
    half = len(head) // 2
    angles = place * 10000.0 ** (-torch.arange(half).double() / half)
    first, second = head[:half], head[half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin])


class Formulas:
    """The formulas of ``heads.config`` in float64, row by row; ``sees``: rows attended to."""

    def __init__(self, config: HeadConfig, tensors: dict[str, torch.Tensor]) -> None:
        self.config = config
        names = {name.replace("layers.0.", "midlayer."): name for name in tensors}
        self.t = {new: tensors[old].double() for new, old in names.items()}
        self.seen: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []

    def row(
        self, state: torch.Tensor, e: torch.Tensor, from_target: bool, place: int, sees: list[int]
    ) -> torch.Tensor:
        config, t = self.config, self.t
        if config.kind == "eagle1":
            x = resid = t["fc.weight"] @ torch.cat([e, state]) + t["fc.bias"]
        else:
            if from_target:
                parts = state.view(-1, HIDDEN)
                if config.normalises_features:
                    parts = torch.stack([norm(part) for part in parts])
                hidden = t["fc.weight"] @ parts.flatten()
            else:
                hidden = t["hidden_proj.weight"] @ state if config.has_hidden_proj else state
            resid = hidden
            if config.has_embedding_proj:
                resid = hidden + t["embedding_proj.weight"] @ e
            x = torch.cat(
                [
                    norm(e, t["midlayer.input_layernorm.weight"]),
                    norm(resid, t["midlayer.hidden_norm.weight"]),
                ]
            )
        attention = "midlayer.self_attn."
        queries, keys, values = (
            (t[f"{attention}{name}_proj.weight"] @ x).view(-1, config.head_dim) for name in "qkv"
        )
        queries = [turned(head, place) for head in queries]
        self.seen.append(([turned(head, place) for head in keys], list(values)))
        attended = []
        for index, query in enumerate(queries):
            group = index * config.num_kv_heads // config.num_heads
            rows = [self.seen[at] for at in [*sees, len(self.seen) - 1]]
            scores = torch.stack([query @ row[0][group] for row in rows]) / config.head_dim**0.5
            weights = scores.softmax(0)
            attended.append(sum(w * row[1][group] for w, row in zip(weights, rows, strict=True)))
        y = resid + t[f"{attention}o_proj.weight"] @ torch.cat(attended)  # type: ignore[arg-type]
        z = norm(y, t["midlayer.post_attention_layernorm.weight"])
        gate, up = (t[f"midlayer.mlp.{name}_proj.weight"] @ z for name in ("gate", "up"))
        return y + t["midlayer.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)


@pytest.mark.parametrize(
    ("kind", "extras"), [("eagle3", False), ("eagle3", True), ("eagle1", False)]
)
def test_prefill_and_tree_match_the_formulas(kind: HeadKind, extras: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    config = config_for(kind, extras=extras)
    tensors = random_head_tensors(config, seed=1)
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
    words = torch.randn(VOCAB, HIDDEN, generator=generator)
    head = EagleHead(config, tensors, TargetEmbeddings(embedding, words, 2.0), max_context=64)
    plain = Formulas(config, tensors)
    tokens = torch.randint(VOCAB, (7,), generator=generator)
    features = torch.randn(7, config.num_features, generator=generator)
    expected = [
        plain.row(features[i].double(), 2.0 * embedding[tokens[i]].double(), True, i, [*range(i)])
        for i in range(7)
    ]
    cache = head.make_cache(3, 4)
    blocks = (2, 0, 1)
    # The prompt in two parts, in blocks that are not in order.
    for start, end in ((0, 3), (3, 7)):
        part = HeadBatch(
            tokens[start:end],
            features[start:end],
            True,
            (Segment(blocks, start, end - start),),
            torch.tensor([0, end - start - 1]),
        )
        with torch.inference_mode():
            result = head.forward(part, cache)
        for state, row in zip(result.states, (start, end - 1), strict=True):
            torch.testing.assert_close(state.double(), expected[row], rtol=1e-4, atol=1e-4)
    # Then a tree of drafts: two children, and a child of the first.
    drafts = torch.tensor([3, 11, 40])
    parents = (-1, -1, 0)
    states = [expected[6], expected[6]]
    rows = []
    for i, parent in enumerate(parents):
        state = states[i] if parent < 0 else rows[parent]
        sees = [*range(7), *([7] if parent == 0 else [])]
        e = 2.0 * embedding[drafts[i]].double()
        rows.append(plain.row(state, e, False, 7 + (parent == 0), sees))
    # What follows a row takes its output, so the rows of a tree come depth by depth.
    first = HeadBatch(
        drafts[:2],
        torch.stack(states).float(),
        False,
        (Segment(blocks, 7, 2, parents=(-1, -1)),),
        torch.tensor([0, 1]),
    )
    whole = HeadBatch(
        drafts,
        torch.stack([*states, rows[0]]).float(),
        False,
        (Segment(blocks, 7, 3, parents=parents),),
        torch.tensor([0, 1, 2]),
    )
    with torch.inference_mode():
        for batch in (first, whole):
            result = head.forward(batch, cache)
            wanted = torch.stack(rows[: len(batch.token_ids)])
            torch.testing.assert_close(result.states.double(), wanted, rtol=1e-4, atol=1e-4)
    ids = target_ids(config, tensors)
    if kind == "eagle1":
        logits = wanted @ words.double().T
    else:
        own = tensors["lm_head.weight"] if config.has_lm_head else words[ids]
        normed = torch.stack([norm(row, tensors["norm.weight"].double()) for row in wanted])
        logits = normed @ own.double().T
    torch.testing.assert_close(result.logits.double(), logits, rtol=1e-4, atol=1e-4)


def test_medusa_heads_match_the_formula() -> None:
    config = config_for("medusa")
    tensors = random_head_tensors(config, seed=2)
    words = torch.randn(VOCAB, HIDDEN)
    tensors["lm_head.weight"] = torch.randn(20, HIDDEN)
    heads = MedusaHeads(config, tensors, TargetEmbeddings(words, words))
    hidden = torch.randn(4, HIDDEN)
    found = heads.logits(hidden)
    assert found.shape == (4, 2, 20)
    for k in range(2):
        base = f"medusa_head.{k}.0.linear"
        x = hidden @ tensors[f"{base}.weight"].T + tensors[f"{base}.bias"]
        expected = (hidden + x * x.sigmoid()) @ words[target_ids(config, tensors)].T
        torch.testing.assert_close(found[:, k], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_tensors_round_trip(kind: HeadKind) -> None:
    config = config_for(kind)
    tensors = random_head_tensors(config)
    rows = torch.randn(VOCAB, HIDDEN)
    given = EagleHead(config, tensors, TargetEmbeddings(rows, rows), max_context=8).tensors()
    assert {*head_shapes(config)} <= {*given}
    for name, value in tensors.items():
        assert torch.equal(given[name], value), name
    if kind == "eagle3":
        assert given["t2d"].nonzero().squeeze(1).tolist() == target_ids(config, tensors).tolist()


def test_halves_to_pairs_and_back() -> None:
    weight = torch.arange(12.0).view(12, 1)
    pairs = halves_to_pairs(weight, 2)
    assert pairs.squeeze(1).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert torch.equal(pairs_to_halves(pairs, 2), weight)


def test_target_ids_must_ascend_within_the_vocabulary() -> None:
    config = config_for("eagle3")
    good = random_head_tensors(config)["d2t"]
    assert target_ids(config, {"d2t": good}).tolist() == [2 * i + 1 for i in range(20)]
    for bad, message in ((good - 2, "outside"), (good + 20, "outside"), (-good, "ascending")):
        with pytest.raises(ValueError, match=message):
            target_ids(config, {"d2t": bad + (len(good) if message == "ascending" else 0)})
