"""The sliding window: against transformers with the same mask, whatever else the engine does."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from app.config import load_settings
from app.engine_options import engine_config
from app.errors import ConfigError
from kernels.native import Library
from llm_core.batch import ForwardBatch, Segment
from llm_core.chat.template import ChatTemplate
from llm_core.engine.batch_builder import windowed_segments
from llm_core.engine.engine import Engine
from llm_core.errors import ModelLoadError, PromptTooLongError
from llm_core.messages import (
    ChatMessage,
    EngineConfig,
    FirstToken,
    GenerationDone,
    SamplingParams,
)
from llm_core.model.backend import RunnerOptions
from llm_core.model.runner import ModelRunner
from llm_core.scheduling.attention_window import GONE, AttentionWindow
from llm_core.scheduling.block_tables import BlockTables
from llm_core.scheduling.sequence import TokenSequence
from tests.support.native_library import FORMS, native_library
from tests.support.native_pair import Pair, round_activations
from tests.support.random_llama import (
    random_tokens,
    random_weights,
    tiny_config,
    transformers_llama,
)
from tests.support.tiny_model import CONTROL, TEMPLATE, TOKENS, tiny_tokenizer, write_tiny_gguf
from tests.unit.llm_core.engine.test_engine_random import Alone, EngineMachine, runners

WINDOW = AttentionWindow(num_sinks=1, num_recent=2)
BLOCK_SIZE = 8


def sees(at: int, other: int, window: AttentionWindow, block_size: int) -> bool:
    """What the window means, for one pair of positions."""
    block, its = at // block_size, other // block_size
    return other <= at and (its < window.num_sinks or its >= block - window.num_recent)


def transformers_logits(
    model: Any, token_ids: torch.Tensor, window: AttentionWindow, block_size: int
) -> torch.Tensor:
    """float32 [T, vocab] under the window's mask."""
    length = len(token_ids)
    mask = torch.full((length, length), torch.finfo(torch.float32).min)
    for at in range(length):
        for other in range(at + 1):
            if sees(at, other, window, block_size):
                mask[at, other] = 0.0
    with torch.inference_mode():
        logits: torch.Tensor = model(token_ids[None], attention_mask=mask[None, None]).logits[0]
    return logits


@pytest.fixture(scope="module", params=FORMS)
def library(request: pytest.FixtureRequest) -> Library:
    """The compiled code in each of its forms that this CPU runs."""
    return native_library(request.param)


@cache
def transformers_model() -> Any:
    config = runners()[0].config
    return transformers_llama(config, random_weights(config))


class WindowAlone(Alone):
    """Transformers, with everything in one pass."""

    @cache  # noqa: B019 - there is one of it
    def continuation(self, prompt_ids: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
        chosen: tuple[int, ...] = ()
        while len(chosen) < num_tokens:
            chosen += (int(self.last_logits(prompt_ids + chosen).argmax()),)
        return chosen

    def last_logits(self, token_ids: tuple[int, ...]) -> torch.Tensor:
        found = transformers_logits(
            transformers_model(), torch.tensor(token_ids), WINDOW, BLOCK_SIZE
        )
        return found[-1, : len(TOKENS)]


class WindowMachine(EngineMachine):
    """All that happens to an engine, with a window of four small blocks over a pool of 16."""

    model = WindowAlone()
    window = WINDOW


WindowMachine.TestCase.settings = settings(
    max_examples=8,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
test_random_load_under_a_window = pytest.mark.timeout(600)(WindowMachine.TestCase)


@pytest.mark.parametrize("chunks", [[90], [1] * 90, [5, 40, 17, 28], [24, 8, 58]])
def test_logits_are_those_of_transformers_however_the_text_is_cut(chunks: list[int]) -> None:
    config = tiny_config()
    runner = ModelRunner(
        config, random_weights(config), RunnerOptions(num_blocks=16, block_size=BLOCK_SIZE)
    )
    tokens = random_tokens(config, 90)
    model = transformers_llama(config, random_weights(config))
    expected = transformers_logits(model, tokens, WINDOW, BLOCK_SIZE)
    found, start = [], 0
    for length in chunks:
        segments = tuple(windowed_segments(WINDOW, list(range(12)), start, length, BLOCK_SIZE))
        batch = ForwardBatch(tokens[start : start + length], segments, torch.arange(length))
        found.append(runner.forward(batch).logits.clone())
        start += length
    assert (torch.cat(found) - expected).abs().max() < 1e-4
    plain = model(tokens[None]).logits[0]
    assert (plain[-1] - expected[-1]).abs().max() > 0.01, "the window matters"


def test_the_compiled_decoder_slides_as_torch_does(
    monkeypatch: pytest.MonkeyPatch, library: Library
) -> None:
    round_activations(monkeypatch)
    pair = Pair(library, tiny_config(), block_size=8)
    tokens = random_tokens(tiny_config(), 100)
    for start, length in ((0, 40), (40, 45), (85, 1), (86, 1), (87, 2), (89, 11)):
        segments = tuple(windowed_segments(WINDOW, list(range(20)), start, length, 8))
        pair.run(tokens[start : start + length], segments, torch.arange(length))


# --- the arithmetic ---


def test_rows_of_a_segment_see_the_same_and_just_what_the_window_says() -> None:
    block_ids = list(range(100, 112))
    for start in range(88):
        rows = 0
        for segment in windowed_segments(WINDOW, block_ids, start, 8, BLOCK_SIZE):
            for at in range(segment.start, segment.end):
                place = at + segment.skipped
                seen = {
                    block_ids.index(segment.block_ids[p // BLOCK_SIZE]) * BLOCK_SIZE
                    + p % BLOCK_SIZE
                    for p in range(at + 1)
                }
                assert place == start + rows
                assert seen == {o for o in range(96) if sees(place, o, WINDOW, BLOCK_SIZE)}
                rows += 1
        assert rows == 8


def test_sizes_are_whole_blocks_at_least_as_large_as_asked() -> None:
    assert AttentionWindow.of_tokens(64, 512, 16) == AttentionWindow(4, 32)
    assert AttentionWindow.of_tokens(1, 17, 16) == AttentionWindow(1, 2)
    assert AttentionWindow.of_tokens(0, 16, 16).unseen(5) == range(4)


def test_blocks_that_the_window_left_are_free_and_a_cut_behind_them_computes_anew() -> None:
    tables = BlockTables(16, BLOCK_SIZE, WINDOW)
    sequence = TokenSequence(1, range(88), max_len=100, is_open=True)
    assert tables.admit(sequence, spare=0) == []
    for _ in range(11):
        assert tables.prepare(sequence, sequence.computed_len + BLOCK_SIZE) == []
        sequence.computed_len += BLOCK_SIZE
        tables.publish(sequence)
        tables.slide(sequence)
        tables.check([sequence])
    assert [block == GONE for block in sequence.block_ids] == [False] + [True] * 6 + [False] * 4
    assert sequence.num_unseen == 56  # the last row is in block 10 and sees 0, 8, 9 and its own
    assert tables.num_available == 16 - 5
    kept = list(sequence.block_ids)
    sequence.replace(list(range(80)))  # still among what is kept
    tables.cut(sequence)
    assert sequence.block_ids == kept[:10] and sequence.computed_len == 80
    sequence.replace(list(range(50)))
    tables.cut(sequence)
    assert sequence.block_ids == [] and sequence.computed_len == 0
    tables.check([sequence])
    # What the window had left is in the cache still, and found again.
    assert tables.admit(sequence, spare=0) is not None
    assert sequence.computed_len >= 48
    tables.release(sequence)
    tables.check([])


# --- an engine ---


def small_engine(window: AttentionWindow | None, num_blocks: int = 12) -> Engine:
    config = tiny_config(vocab_size=len(TOKENS), context_len=1024, hidden_size=32, num_heads=2)
    runner = ModelRunner(
        config,
        random_weights(config),
        RunnerOptions(num_blocks=num_blocks, block_size=8, is_pool_limit=window is None),
    )
    template = ChatTemplate(TEMPLATE, control_tokens=CONTROL)
    engine = Engine(runner, tiny_tokenizer(), template, max_sequences=2, window=window)
    engine.scheduler.prompt_budget = engine.scheduler.mixed_budget = 16
    return engine


def test_a_conversation_longer_than_the_pool_goes_on_and_says_that_it_slid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("llm_core.engine.engine.LARGEST_CHUNK", 16)
    question = [ChatMessage("user", "hello " * 40)]
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    with pytest.raises(PromptTooLongError, match="must also hold"):
        small_engine(None).submit(1, question, params, received_ns=0)
    engine = small_engine(WINDOW)
    engine.submit(1, question, params, received_ns=0)
    events: list[Any] = []
    most = 0
    while engine.has_work:
        events += [event for _, event in engine.step()]
        engine.scheduler.check()
        most = max(most, engine.stats().num_blocks - engine.stats().num_free_blocks)
    (first,) = [event for event in events if isinstance(event, FirstToken)]
    (done,) = [event for event in events if isinstance(event, GenerationDone)]
    assert done.usage.completion_tokens == 200
    total = done.usage.prompt_tokens + 199  # the last token is not computed
    assert total > 2 * 12 * 8
    assert first.unseen_tokens == len(WINDOW.unseen((first.prompt_tokens - 1) // 8)) * 8 > 0
    assert done.usage.unseen_tokens == len(WINDOW.unseen((total - 1) // 8)) * 8
    assert most <= WINDOW.num_blocks + 2 + 3  # what is kept in case, and a chunk
    assert engine.stats().num_free_blocks == 12


def test_a_short_conversation_sees_everything() -> None:
    said = []
    for window in (None, WINDOW):
        engine = small_engine(window)
        engine.submit(1, [ChatMessage("user", "x")], SamplingParams(max_tokens=8), received_ns=0)
        events: list[Any] = []
        while engine.has_work:
            events += [event for _, event in engine.step()]
        (done,) = [event for event in events if isinstance(event, GenerationDone)]
        assert done.usage.unseen_tokens == 0
        said.append([event.text for event in events if hasattr(event, "text")])
    assert said[0] == said[1]


# --- settings ---


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attention_window": 8}, "attention_window must be at least 16, got 8"),
        ({"attention_sinks": -1}, "attention_sinks must be at least 0, got -1"),
        ({"attention_window": 64, "speculation": "ngram"}, "needs speculation to be off or auto"),
    ],
)
def test_impossible_windows_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        EngineConfig(model_path="x", **changes)


def test_a_server_that_asks_for_both_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARLEY_LLM_ATTENTION_WINDOW", "512")
    monkeypatch.setenv("PARLEY_LLM_SPECULATION", "ngram")
    with pytest.raises(ConfigError, match="attention_window needs speculation to be off or auto"):
        engine_config(load_settings(), Path("x"))


def test_a_window_narrower_than_the_models_own_is_refused() -> None:
    config = tiny_config(sliding_window=40, layer_is_sliding=(True, False))
    runner = ModelRunner(config, random_weights(config))
    asked = EngineConfig(model_path="x", attention_window=32, backend="torch")
    with pytest.raises(ModelLoadError, match="is 32, but layers of this model see 40"):
        runner.attention_window(asked)


def test_a_gpu_says_that_it_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm_core.model.runner.why_no_gpu", lambda backend: None)
    runner = runners()[0]
    with pytest.raises(ModelLoadError, match="the GPU decoder has none"):
        runner.attention_window(EngineConfig(model_path="x", attention_window=32))


def test_an_engine_is_loaded_with_its_window(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", context_len=1024)
    asked = EngineConfig(
        model_path=str(path),
        backend="torch",
        kv_cache_tokens=1024,
        attention_window=128,
        attention_sinks=20,
    )
    engine = Engine.load(asked)
    assert engine.scheduler.tables.window == AttentionWindow(2, 8)
    assert engine.info.context_len == 1024


def test_a_segments_place_in_the_text_must_exist() -> None:
    runner = runners()[0]
    segment = Segment((0,), 0, 1, skipped=runner.max_context)
    batch = ForwardBatch(torch.tensor([1]), (segment,), torch.tensor([0]))
    with pytest.raises(AssertionError, match="exceeds"):
        runner.forward(batch)
