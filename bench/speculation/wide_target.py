"""What drafts gain where decoding is bound by memory: a wider target, for ``speculation.py``.

A target of random weights at 4 bits in the shape of a model of that size. What it says means
nothing, so a drafter who knows it is right as often as ``--acceptance`` says for each depth, and
takes the time of a real head of the target's width. As a real head it is surer of some drafts than
of others, and says so.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from bench.speculation.draft_modes import AUTO, SHAPES, Conversation, Mode, compare, say, table
from llm_core.chat.template import ChatTemplate
from llm_core.config import ModelConfig
from llm_core.engine.engine import Engine
from llm_core.loading.weights import weight_shapes
from llm_core.messages import ChatMessage, SamplingParams
from llm_core.model.backend import RunnerOptions
from llm_core.model.native_decoder import NativeDecoder
from llm_core.model.runner import ModelRunner
from llm_core.quant.codes import GroupedCodes
from llm_core.quant.formats import Weight
from llm_core.scheduling.draft_tree import DraftTree
from llm_core.speculative.control.auto import AutoController
from llm_core.speculative.control.base import FixedController
from llm_core.speculative.control.costs import (
    DraftCost,
    VerificationCost,
    measure_draft_ns,
    measure_forward_ns,
)
from llm_core.speculative.drafters.base import DraftRequest
from llm_core.speculative.drafters.eagle import EagleDrafter
from llm_core.speculative.heads.config import HeadConfig
from llm_core.speculative.heads.eagle import head_shapes
from llm_core.speculative.heads.native_eagle import NativeEagleHead
from llm_core.tokenizer.tokenizer import Tokenizer

SIZES = {
    "1b": ModelConfig(
        num_layers=16,
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        intermediate_size=8192,
        vocab_size=49152,
        context_len=2048,
    ),
    "3b": ModelConfig(
        num_layers=28,
        hidden_size=3072,
        num_heads=24,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=8192,
        vocab_size=49152,
        context_len=2048,
    ),
}
CONTEXT_LEN = 256


class RandomWeights(Mapping[str, Weight]):
    """Weights of any shape, made when they are asked for: codes of 4 bits."""

    def __init__(self, config: ModelConfig) -> None:
        self._shapes = weight_shapes(config)
        self._generator = torch.Generator().manual_seed(0)

    def __getitem__(self, name: str) -> Weight:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape)
        num_out, num_in = shape
        codes = torch.randint(0, 16, shape, generator=self._generator, dtype=torch.uint8)
        scale = torch.full((num_out, num_in // 32), 0.2 / num_in**0.5)
        return GroupedCodes(codes, scale, -7.5 * scale, 4, 32)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


class KnowingDrafter(EagleDrafter):
    """Takes a real head's time, and is right as often as it is told to be, for each depth; how
    likely each draft is, is drawn around that."""

    def __init__(self, head: NativeEagleHead, acceptance: Sequence[float], **options: Any) -> None:
        super().__init__(head, **options)
        self.texts: list[list[int]] = []
        self._acceptance = acceptance
        self._random = random.Random(0)

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        trees = [self._tree(request) for request in requests]
        # The head drafts as far, whatever it thinks of its own drafts.
        timed = [
            replace(r, shape=replace(r.shape, max_depth=n, max_drafts=n, width=1), uniforms=())
            for r, n in zip(requests, (max(1, len(tree)) for tree in trees), strict=True)
        ]
        super().propose(
            [
                replace(
                    r, shape=replace(r.shape, min_path_probability=0.0, min_expand_probability=0.0)
                )
                for r in timed
            ]
        )
        return trees

    def _tree(self, request: DraftRequest) -> DraftTree:
        known, shape = request.sequence.token_ids, request.shape
        text = next((t for t in self.texts if t[: len(known)] == known), known)
        tokens: list[int] = []
        odds: list[float] = []
        path = 1.0
        for depth in range(min(shape.max_depth, shape.max_drafts)):
            mean = self._acceptance[min(depth, len(self._acceptance) - 1)]
            spread = min(mean, 1 - mean)
            odds.append(mean + self._random.uniform(-spread, spread))
            at = len(known) + depth
            right = text[at] if at < len(text) else 5
            tokens.append(right if self._random.random() < odds[-1] else (right + 1) % 1000)
            path *= odds[-1]
            if path < shape.min_expand_probability:
                break
        return DraftTree.chain(tokens, odds)


def bench_wide(arguments: argparse.Namespace) -> dict[str, Any]:
    """Chains for a wide target; trees of the same acceptance gain more, on what has free rows."""
    config = SIZES[arguments.wide]
    batches = [int(n) for n in arguments.batches.split(",")]
    runner = ModelRunner(
        config,
        RandomWeights(config),
        RunnerOptions(
            weight_format="auto",
            backend="native",
            num_threads=arguments.threads,
            num_blocks=(max(batches) + 2) * CONTEXT_LEN // 16,
            max_context=CONTEXT_LEN,
            kv_dtype="bfloat16",
        ),
        name=f"random {arguments.wide}",
    )
    head = _random_head(config, runner)
    acceptance = [float(x) for x in arguments.acceptance.split(",")]
    drafter = KnowingDrafter(
        head,
        acceptance,
        num_blocks=runner.num_blocks,
        block_size=runner.block_size,
        max_sequences=max(batches),
    )
    costs, draft_costs = measure_forward_ns(runner), measure_draft_ns(drafter, runner)
    result: dict[str, Any] = {
        "row_cost_ms": {n: round(ns / 1e6, 2) for n, ns in costs.items()},
        "draft_cost_ms": {n: round(ns / 1e6, 2) for n, ns in draft_costs.items()},
    }
    arguments.say(f"step by rows, ms: {result['row_cost_ms']}")
    arguments.say(f"drafts by depth, ms: {result['draft_cost_ms']}")
    byte_tokens = [chr(256 + n) for n in range(config.vocab_size)]
    tokenizer = Tokenizer(
        tokens=byte_tokens,
        token_types=[1] * len(byte_tokens),
        merges=[],
        pre="smollm",
        bos_id=None,
        eos_ids=[0],
    )
    template = ChatTemplate("{{ messages[0]['content'] }}", control_tokens={})
    engine = Engine(
        runner, tokenizer, template, max_sequences=max(batches), clock=time.perf_counter_ns
    )
    params = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True)
    prompts: list[Conversation] = [
        [ChatMessage("user", chr(256 + n) * 8)] for n in range(max(batches))
    ]
    for batch in batches:
        group = prompts[:batch]
        plain = say(engine, Mode("plain"), group, params, 0)
        ids = [tokenizer.encode_pieces(template.render(messages)) for messages in group]
        drafter.texts = [a + b for a, b in zip(ids, plain.texts, strict=True)]
        modes = [Mode("plain")]
        modes += [
            Mode(name, drafter, FixedController(SHAPES[name]))
            for name in ("chain 1", "chain 2", "chain 3", "chain 4")
        ]
        auto = AutoController(AUTO, VerificationCost(costs), DraftCost(draft_costs))
        modes.append(Mode("auto", drafter, auto))
        left = (arguments.end - time.monotonic()) / (len(batches) - batches.index(batch))
        title = f"random {arguments.wide}, 4 bits, acceptance {acceptance}, {batch} at once"
        result[title] = compare(
            engine,
            modes,
            group * 2,
            batch=batch,
            params=params,
            until=time.monotonic() + left,
        )
        arguments.say(table(title, result[title]))
    return result


def _random_head(config: ModelConfig, runner: ModelRunner) -> NativeEagleHead:
    """An EAGLE-3 head of the target's width with 8,192 words."""
    model = runner.model
    assert isinstance(model, NativeDecoder)
    shape = HeadConfig(
        kind="eagle3",
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        draft_vocab_size=8192,
        feature_layers=(2, config.num_layers // 2, config.num_layers - 3),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
    )
    tensors = {
        name: torch.randn(size) / size[-1] ** 0.5 if len(size) == 2 else torch.ones(size)
        for name, size in head_shapes(shape).items()
    }
    tensors["d2t"] = torch.zeros(shape.draft_vocab_size, dtype=torch.int64)
    return NativeEagleHead(shape, tensors, model, max_context=CONTEXT_LEN)
