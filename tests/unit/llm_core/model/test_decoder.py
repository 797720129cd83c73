"""The torch decoder gives each position the same logits in any batching."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import BackendName, reference
from llm_core.batch import ForwardBatch, Segment
from llm_core.config import ModelConfig
from llm_core.model.runner import ModelRunner
from tests.support.random_llama import (
    blocks,
    random_tokens,
    random_weights,
    run_chunk,
    tiny_config,
    tiny_runner,
)

CONFIGS = {
    "gqa": tiny_config(),
    "mha": tiny_config(num_kv_heads=4),
    "mqa": tiny_config(num_kv_heads=1),
    "tied": tiny_config(tie_embeddings=True),
    "head_dim_6_wider_than_hidden": tiny_config(hidden_size=32, num_heads=9, num_kv_heads=3),
    "odd_sizes": tiny_config(hidden_size=40, num_heads=3, num_kv_heads=3, head_dim=10),
    "one_layer": tiny_config(num_layers=1),
    "bias": tiny_config(attention_bias=True),
    "qk_norm": tiny_config(qk_norm=True),
    "window": tiny_config(sliding_window=5, layer_is_sliding=(True, True)),
    "gemma": tiny_config(
        num_layers=3,
        activation="gelu_tanh",
        qk_norm=True,
        post_norms=True,
        embedding_scale=8.0,
        attention_scale=0.1,
        attention_softcap=5.0,
        logit_softcap=3.0,
        sliding_window=4,
        layer_is_sliding=(True, False, True),
        local_rope_theta=100.0,
    ),
    "theta": tiny_config(rope_theta=1_000_000.0, rms_eps=1e-3),
}
# float32 sums in another order.
TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_fast_kernels_equal_reference(config: ModelConfig) -> None:
    tokens = random_tokens(config, 23)
    fast = run_chunk(tiny_runner(config), tokens)
    plain = run_chunk(tiny_runner(config, torch_kernels="reference"), tokens)
    torch.testing.assert_close(fast, plain, **TOLERANCE)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("chunks", [(1,) * 23, (22, 1), (1, 22), (7, 2, 9, 5)])
def test_chunks_equal_whole(config: ModelConfig, chunks: tuple[int, ...]) -> None:
    tokens = random_tokens(config, 23)
    whole = run_chunk(tiny_runner(config), tokens)
    runner = tiny_runner(config)
    parts, start = [], 0
    for length in chunks:
        parts.append(run_chunk(runner, tokens[start : start + length], start=start))
        start += length
    torch.testing.assert_close(torch.cat(parts), whole, **TOLERANCE)


def test_mixed_batch_equals_separate_runs() -> None:
    """Two prefill chunks and a decode row, in blocks out of order, in one batch."""
    config = tiny_config()
    runner = tiny_runner(config, num_blocks=24)
    prompts = [random_tokens(config, 11, seed) for seed in (1, 2, 3)]
    alone = [run_chunk(tiny_runner(config), prompt) for prompt in prompts]
    run_chunk(runner, prompts[1][:10], block_ids=blocks(1))
    run_chunk(runner, prompts[2][:4], block_ids=blocks(2))
    batch = ForwardBatch(
        torch.cat((prompts[2][4:], prompts[1][10:], prompts[0])),
        (Segment(blocks(2), 4, 7), Segment(blocks(1), 10, 1), Segment(blocks(0), 0, 11)),
        torch.arange(19),
    )
    expected = torch.cat((alone[2][4:], alone[1][10:], alone[0]))
    torch.testing.assert_close(runner.forward(batch).logits, expected, **TOLERANCE)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("chunks", [(1,) * 50, (20, 15, 15), (50,), (17, 1, 32)])
def test_scattered_blocks_equal_consecutive_ones(
    config: ModelConfig, backend: BackendName, chunks: tuple[int, ...]
) -> None:
    """Blocks in any order, with neighbours in between: runs are cut, results stay."""
    tokens = random_tokens(config, 50)
    whole = run_chunk(tiny_runner(config, torch_kernels=backend), tokens)
    runner = tiny_runner(config, torch_kernels=backend)
    parts, start = [], 0
    for length in chunks:
        ids = tokens[start : start + length]
        parts.append(run_chunk(runner, ids, block_ids=(5, 6, 1, 14), start=start))
        start += length
    torch.testing.assert_close(torch.cat(parts), whole, **TOLERANCE)


def test_two_segments_of_a_batch_share_prefix_blocks() -> None:
    config = tiny_config()
    shared = random_tokens(config, 32)
    ends = [random_tokens(config, 5, seed) for seed in (8, 9)]
    expected = [run_chunk(tiny_runner(config), torch.cat((shared, end)))[32:] for end in ends]
    runner = tiny_runner(config)
    run_chunk(runner, shared, block_ids=(3, 4))
    segments = (Segment((3, 4, 9), 32, 5), Segment((3, 4, 5), 32, 5))
    both = runner.forward(ForwardBatch(torch.cat(ends), segments, torch.arange(10))).logits
    torch.testing.assert_close(both, torch.cat(expected), **TOLERANCE)


def test_logit_rows_select_and_order() -> None:
    config = tiny_config()
    tokens = random_tokens(config, 9)
    every = run_chunk(tiny_runner(config), tokens)
    rows = torch.tensor([8, 0, 3])
    batch = ForwardBatch(tokens, (Segment(blocks(0), 0, 9),), rows)
    some = tiny_runner(config).forward(batch).logits
    torch.testing.assert_close(some, every[rows], **TOLERANCE)


def test_batch_without_logit_rows_fills_the_cache() -> None:
    config = tiny_config()
    tokens = random_tokens(config, 9)
    expected = run_chunk(tiny_runner(config), tokens)[8:]
    runner = tiny_runner(config)
    nothing = runner.forward(
        ForwardBatch(tokens[:8], (Segment(blocks(0), 0, 8),), torch.empty(0, dtype=torch.int64))
    )
    assert nothing.logits.shape == (0, config.vocab_size)
    torch.testing.assert_close(run_chunk(runner, tokens[8:], start=8), expected, **TOLERANCE)


# Parents of the rows, and the length of the text before.
TREES = {
    "chain": ((-1, 0, 1, 2, 3), 13),
    "star": ((-1, 0, 0, 0, 0), 2),
    "two_roots": ((-1, -1, 0, 1, 1, 2, 5, 3, 7, 8), 0),
    "deep": ((-1, 0, 1, 1, 3, 4, 0, 6, 5, 8, 9, 10, 2), 13),
}


def path_of(parents: tuple[int, ...], row: int) -> list[int]:
    path = []
    while row >= 0:
        path.insert(0, row)
        row = parents[row]
    return path


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize(("parents", "start"), TREES.values(), ids=TREES.keys())
def test_each_path_of_a_tree_equals_a_separate_sequence(
    config: ModelConfig, parents: tuple[int, ...], start: int
) -> None:
    """Beside a prompt's chunk, in scattered blocks; and its rows can be kept as a text."""
    prefix, drafts = random_tokens(config, start), random_tokens(config, len(parents), 2)
    runner = tiny_runner(config)
    table = (9, 3, 12)
    if start:
        run_chunk(runner, prefix, block_ids=table)
    other = random_tokens(config, 7, 3)
    tree = Segment(table, start, len(parents), parents)
    batch = ForwardBatch(
        torch.cat((other, drafts)),
        (Segment((5,), 0, 7), tree),
        torch.arange(6, 7 + len(parents)),
    )
    logits = runner.forward(batch).logits
    alone = tiny_runner(config)
    torch.testing.assert_close(logits[:1], run_chunk(alone, other)[-1:], **TOLERANCE)
    for row in range(len(parents)):
        path = path_of(parents, row)
        text = torch.cat((prefix, drafts[path]))
        torch.testing.assert_close(logits[1 + row], run_chunk(alone, text)[-1], **TOLERANCE)
    path = path_of(parents, len(parents) - 1)
    after = random_tokens(config, 2, 4)
    runner.move_rows(table, start, path)
    kept = run_chunk(runner, after, block_ids=table, start=start + len(path))
    expected = run_chunk(alone, torch.cat((prefix, drafts[path], after)))[-2:]
    torch.testing.assert_close(kept, expected, **TOLERANCE)


@pytest.mark.parametrize("layers", [(0, 1, 2), (1,), (2, 0), (0,)])
@pytest.mark.parametrize("name", ["gqa", "gemma"])
def test_features_are_the_states_between_layers(name: str, layers: tuple[int, ...]) -> None:
    """Of all rows, whichever have logits; a model of fewer layers is what a layer's state is."""
    config = CONFIGS[name]
    tokens = random_tokens(config, 9)
    weights = random_weights(config)
    runner = ModelRunner(config, weights)
    runner.set_feature_layers(layers)
    segment, rows = Segment((0,), 0, 9), torch.tensor([8, 3])
    result = runner.forward(ForwardBatch(tokens, (segment,), rows, wants_features=True))
    plain = runner.forward(ForwardBatch(tokens, (segment,), rows))
    assert plain.features is None and result.features is not None
    torch.testing.assert_close(result.logits, plain.logits, **TOLERANCE)
    assert result.features.shape == (9, len(layers) * config.hidden_size)
    for layer, states in zip(layers, result.features.chunk(len(layers), 1), strict=True):
        cut = min(layer + 1, config.num_layers)
        sliding = config.layer_is_sliding[:cut] if config.layer_is_sliding else ()
        shallow = replace(config, num_layers=cut, layer_is_sliding=sliding, logit_softcap=None)
        through_norm = run_chunk(ModelRunner(shallow, weights), tokens)
        if layer < config.num_layers:
            norm = reference.rms_norm(states, weights["final_norm"], config.rms_eps)
        else:
            norm = states
        head = weights["embedding" if config.tie_embeddings else "head"]
        torch.testing.assert_close(norm @ head.T, through_norm, atol=1e-4, rtol=1e-4)


def test_position_zero_does_not_depend_on_later_tokens() -> None:
    config = tiny_config()
    tokens = random_tokens(config, 6)
    changed = tokens.clone()
    changed[1:] = (changed[1:] + 1) % config.vocab_size
    first = run_chunk(tiny_runner(config), tokens)
    second = run_chunk(tiny_runner(config), changed)
    torch.testing.assert_close(first[0], second[0], **TOLERANCE)
    assert not torch.allclose(first[1], second[1], atol=1e-2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "multiple of num_kv_heads"),
        ({"head_dim": 15}, "needs it even"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"rms_eps": -1e-5}, "rms_eps is -1e-05"),
    ],
)
def test_inconsistent_configs_are_rejected(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(**changes)
