"""The whole engine on the Triton kernels, in their interpreter, says what it says on torch; and so
do two processes that share the model."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llm_core.batch import ForwardBatch, Segment
from llm_core.chat.template import ChatTemplate
from llm_core.engine.engine import Engine
from llm_core.messages import (
    ChatMessage,
    EngineConfig,
    FirstToken,
    GenerationDone,
    ModelBackend,
    SamplingParams,
    TextDelta,
)
from llm_core.model.backend import RunnerOptions
from llm_core.model.runner import ModelRunner
from tests.support.random_llama import random_tokens, random_weights, tiny_config
from tests.support.tiny_model import CONTROL, TEMPLATE, TOKENS, tiny_tokenizer, write_tiny_gguf

# Seconds on a quiet machine; the interpreter gets what others leave.
pytestmark = pytest.mark.timeout(600)

MODEL = tiny_config(
    num_layers=1, num_heads=2, num_kv_heads=1, vocab_size=len(TOKENS), context_len=128
)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")


class _Told:
    """An engine, and what it has said to each request."""

    def __init__(self, backend: ModelBackend) -> None:
        runner = ModelRunner(
            MODEL, random_weights(MODEL, 5), RunnerOptions(backend=backend, num_blocks=16)
        )
        template = ChatTemplate(TEMPLATE, control_tokens=CONTROL)
        self.engine = Engine(runner, tiny_tokenizer(), template, overlap_steps=True)
        self.engine.scheduler.mixed_budget = 12  # a long prompt is read beside the others' tokens
        self.texts: dict[int, str] = {}
        self.cached: dict[int, int] = {}
        self.done: dict[int, str] = {}
        self.batches: list[tuple[int, ...]] = []
        self.logit_rows = 0
        name = "launch" if runner.samples_on_device else "forward"
        compute = getattr(runner, name)

        def watched(batch: ForwardBatch) -> object:
            self.batches.append(tuple(segment.length for segment in batch.segments))
            self.logit_rows += 0 if batch.choices is None else len(batch.choices.keeps)
            return compute(batch)

        setattr(runner, name, watched)

    def ask(self, request_id: int, text: str, max_tokens: int, **more: Any) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more)
        self.engine.submit(request_id, [ChatMessage("user", text)], params, received_ns=0)

    def step(self, until: Callable[[], bool]) -> None:
        while not until():
            for request_id, event in self.engine.step():
                match event:
                    case FirstToken():
                        self.cached[request_id] = event.cached_tokens
                    case TextDelta():
                        self.texts[request_id] = self.texts.get(request_id, "") + event.text
                    case GenerationDone():
                        self.done[request_id] = event.finish_reason
                    case _:
                        raise AssertionError(event)


def conversation(backend: ModelBackend) -> _Told:
    told = _Told(backend)
    told.ask(1, "the user is in hell, in hell", 5)
    told.step(lambda: 1 in told.cached)
    # begins as the first, and is drawn
    told.ask(2, "the user is in hell, in hell, hello?", 3, temperature=0.9, top_k=40, seed=11)
    told.ask(3, "hello the", 20)
    told.step(lambda: len(told.cached) == 3)
    told.engine.abort(3)
    told.step(lambda: len(told.done) == 2)
    stats = told.engine.stats()
    assert stats.num_free_blocks == stats.num_blocks, "nothing is kept for the aborted one"
    return told


def test_the_engine_says_what_it_says_on_torch() -> None:
    triton, plain = conversation("triton"), conversation("torch")
    assert triton.texts[1] == plain.texts[1] and triton.texts[2] == plain.texts[2]
    assert triton.texts[1] and triton.texts[2]
    assert triton.done == plain.done == {1: "length", 2: "length"}
    assert triton.cached == plain.cached and triton.cached[2] >= 16, "a block was reused"
    assert triton.logit_rows == 0, "tokens leave the device, and no logits do"
    assert any(1 in batch and 12 in batch for batch in triton.batches), "a chunk beside a token"


def test_two_ranks_compute_what_one_does(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Greedy tokens, then a tree's logits and features, after copies and moves in both caches."""
    caplog.set_level(logging.INFO, "llm_core.model.parallel")  # which the other rank's is, too
    path = str(write_tiny_gguf(tmp_path / "tiny.gguf"))
    shared = ModelRunner.load(
        EngineConfig(
            model_path=path,
            backend="triton",
            tensor_parallel=2,
            overlap_rows=2,  # halves, from the first step that has any
            kv_cache_tokens=64,
            log_format="json",
        )
    )
    plain = EngineConfig(model_path=path, backend="torch", kv_cache_tokens=64)
    alone = ModelRunner.load(plain, weight_format="float32")
    assert shared.info_fields["weight_format"] == "float32"
    try:
        for runner in (shared, alone):
            runner.set_feature_layers((0, 2))
        tokens = random_tokens(alone.config, 3).tolist()
        start = 0
        for _ in range(2):  # the greedy text
            row = torch.tensor([len(tokens) - start - 1])
            step = ForwardBatch(
                torch.tensor(tokens[start:]), (Segment((1,), start, len(tokens) - start),), row
            )
            start = len(tokens)
            tokens.append(int(_same(shared, alone, step).argmax()))
        for runner in (shared, alone):
            runner.copy_block_rows(1, 3, 16)
        tree = Segment((3,), start, 3, (-1, 0, 0))
        drafts = ForwardBatch(
            random_tokens(alone.config, 3, 7), (tree,), torch.arange(3), wants_features=True
        )
        _same(shared, alone, drafts)
        for runner in (shared, alone):
            runner.move_rows((3,), start, (0, 2))
        last = Segment((3,), start + 2, 1)
        _same(shared, alone, ForwardBatch(torch.tensor([9]), (last,), torch.tensor([0])))
    finally:
        shared.close()
    lines = [line for line in capfd.readouterr().err.splitlines() if "rank1[" in line]
    assert lines and all(json.loads(line)["process"].startswith("rank1[") for line in lines)


def _same(shared: ModelRunner, alone: ModelRunner, batch: ForwardBatch) -> torch.Tensor:
    """The logits, the same of both; the best of a row is the same too."""
    result, expected = shared.forward(batch), alone.forward(batch)
    torch.testing.assert_close(result.logits, expected.logits, atol=1e-4, rtol=1e-4)
    assert torch.equal(result.logits.argmax(-1), expected.logits.argmax(-1))
    if expected.features is not None:
        assert result.features is not None
        torch.testing.assert_close(result.features, expected.features, atol=1e-4, rtol=1e-4)
    return result.logits
