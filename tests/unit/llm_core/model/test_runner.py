"""ModelRunner: blocks, copies, weight formats and model info."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llm_core.batch import ForwardBatch, Segment
from llm_core.errors import ModelLoadError
from llm_core.messages import EngineConfig, ModelInfo
from llm_core.model.backend import RunnerOptions
from llm_core.model.runner import ModelRunner
from tests.support.random_llama import (
    blocks,
    random_tokens,
    random_weights,
    run_chunk,
    tiny_config,
    tiny_runner,
)
from tests.support.tiny_model import write_tiny_gguf

TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}


def test_copied_rows_continue_in_another_block() -> None:
    config = tiny_config()
    tokens, other = random_tokens(config, 28), random_tokens(config, 40, seed=5)
    expected = run_chunk(tiny_runner(config), tokens)[24:]
    runner = tiny_runner(config)
    run_chunk(runner, other, block_ids=(7, 8, 9))
    run_chunk(runner, tokens, block_ids=(2, 3))
    runner.copy_block_rows(3, 8, 8)
    continued = run_chunk(runner, tokens[24:], block_ids=(2, 8), start=24)
    torch.testing.assert_close(continued, expected, **TOLERANCE)
    # The source is untouched.
    again = run_chunk(runner, tokens[24:], block_ids=(2, 3), start=24)
    torch.testing.assert_close(again, expected, **TOLERANCE)


def test_rollback_overwrites_stale_positions() -> None:
    config = tiny_config()
    tokens, other = random_tokens(config, 12), random_tokens(config, 12, seed=5)
    expected = run_chunk(tiny_runner(config), tokens)[5:]
    runner = tiny_runner(config)
    run_chunk(runner, torch.cat((tokens[:5], other[5:])))
    torch.testing.assert_close(run_chunk(runner, tokens[5:], start=5), expected, **TOLERANCE)


def test_last_position_of_the_context() -> None:
    config = tiny_config(context_len=16)
    tokens = random_tokens(config, 16)
    assert bool(run_chunk(tiny_runner(config), tokens).isfinite().all())


@pytest.mark.parametrize(
    "segments",
    [
        (Segment(blocks(0), 0, 0),),
        (Segment((16,), 0, 3),),
        (Segment(blocks(0), 127, 3),),
        (Segment((0,), 15, 3),),
        (Segment(blocks(0), 0, 2),),
        (Segment(blocks(0), 0, 1), Segment(blocks(0), 1, 2)),
        (),
        (Segment(blocks(0), 0, 3, (-1, 0)),),
        (Segment(blocks(0), 0, 3, (-1, 1, 0)),),
        (Segment(blocks(0), 0, 3, (-2, 0, 1)),),
    ],
    ids=[
        *("empty", "no such block", "beyond the context", "too few blocks", "too few rows"),
        *("block written twice", "no segment", "a parent for each row", "its own parent"),
        "no parent",
    ],
)
def test_invalid_batches_are_rejected(segments: tuple[Segment, ...]) -> None:
    runner = tiny_runner()
    with pytest.raises(AssertionError):
        runner.forward(ForwardBatch(torch.zeros(3, dtype=torch.int64), segments, torch.arange(1)))


def test_info_fields_make_a_model_info() -> None:
    runner = tiny_runner(max_context=50, weight_format="int8")
    info = ModelInfo(**runner.info_fields)
    assert (info.context_len, info.vocab_size, info.num_layers) == (50, 97, 2)
    assert (info.weight_format, info.num_threads, info.name) == ("int8", 1, "in-memory")


def test_max_context_cannot_exceed_the_models() -> None:
    assert tiny_runner(max_context=1_000_000).max_context == 128


def test_cache_larger_than_memory_is_rejected() -> None:
    config = tiny_config(context_len=1 << 24)
    with pytest.raises(ModelLoadError, match=r"10000000 blocks of 16 positions needs .* GiB"):
        ModelRunner(config, random_weights(config), RunnerOptions(num_blocks=10_000_000))


def test_unknown_weight_format_is_named() -> None:
    with pytest.raises(ValueError, match="'int3'"):
        tiny_runner(weight_format="int3")


@pytest.mark.parametrize(
    ("weight_format", "tolerance"),
    [("auto", 0.12), ("float16", 5e-3), ("bfloat16", 0.08), ("int8", 0.12)],
)
def test_formats_stay_near_float32(weight_format: str, tolerance: float) -> None:
    """Logits have standard deviation 1, and two random layers amplify each rounding about 5 times:
    10 x 2^-11 for float16, and about 20 x 2^-8 for bfloat16 and 8-bit operands."""
    config = tiny_config()
    tokens = random_tokens(config, 20)
    exact = run_chunk(tiny_runner(config), tokens)
    runner = tiny_runner(config, weight_format=weight_format)
    whole = run_chunk(runner, tokens)
    stepped = torch.cat([run_chunk(runner, tokens[i : i + 1], start=i) for i in range(20)])
    assert (whole - exact).abs().max() < tolerance
    assert (stepped - exact).abs().max() < tolerance


def test_loaded_file_equals_in_memory_model(tmp_path: Path) -> None:
    """A GGUF file written by the gguf package, loaded twice: same logits, sensible info."""
    config = EngineConfig(model_path=str(write_tiny_gguf(tmp_path / "tiny.gguf")), backend="torch")
    exact = ModelRunner.load(config, weight_format="float32")
    default = ModelRunner.load(config)
    assert (exact.info_fields["name"], exact.max_context) == ("tiny", 256)
    tokens = random_tokens(exact.config, 30)
    assert (run_chunk(default, tokens) - run_chunk(exact, tokens)).abs().max() < 0.06


def test_default_pool_size(tmp_path: Path) -> None:
    path = str(write_tiny_gguf(tmp_path / "tiny.gguf", context_len=8192))

    def num_blocks(**options: Any) -> int:
        return ModelRunner.load(EngineConfig(model_path=path, **options)).num_blocks

    assert num_blocks(kv_cache_tokens=1000) == 64
    assert num_blocks(max_sequences=2) == 8192 // 16 + 1
    assert num_blocks(max_sequences=8) == 8 * 2048 // 16 + 1
    assert num_blocks(max_sequences=8, max_context=100) == 50 + 1


def test_results_do_not_change_under_later_calls() -> None:
    """Logits returned earlier stay what they were (the sampler may still read them)."""
    runner = tiny_runner()
    tokens = random_tokens(runner.config, 4)
    batch = ForwardBatch(tokens, (Segment(blocks(0), 0, 4),), torch.arange(4))
    first = runner.forward(batch).logits
    copy = first.clone()
    run_chunk(runner, tokens.flip(0), block_ids=blocks(1))
    assert torch.equal(first, copy)
