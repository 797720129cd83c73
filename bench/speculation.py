"""What drafts gain: drafter x shape x prompts x temperature, batches, and the automatic choice.

    python bench/speculation.py MODEL [--head DIR] [--prompts DIR] [--draft-model MODEL]
                                [--batches 1,4,8,16] [--rounds 3] [--json OUT]
    python bench/speculation.py --wide 1b --acceptance 0.6,0.5,0.4

One process and one engine; in each round every mode says the same texts one after another, so that
what else the machine does meets all of them alike. Figures are medians over the rounds: tokens that
a step brings (the target's own among them), tokens a second after the first, their ratio to plain
decoding in the same round, the share of time that drafting takes; and once for all what a step
costs by its rows. ``--prompts`` holds a file for each set, a prompt a line.

``--wide``: a target of random weights at 4 bits in the shape of a model of that size. What it says
means nothing, so a drafter who knows it is right as often as ``--acceptance`` says for each depth,
and takes the time of a real head of the target's width.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from app.config import DEFAULT_INSTRUCTIONS as INSTRUCTIONS
from llm_core.chat_template import ChatTemplate
from llm_core.config import ModelConfig
from llm_core.engine import Engine
from llm_core.loading.weights import weight_shapes
from llm_core.messages import (
    ChatMessage,
    EngineConfig,
    GenerationDone,
    RequestOptions,
    SamplingParams,
)
from llm_core.model_files import open_model
from llm_core.native_decoder import NativeDecoder
from llm_core.quant.codes import GroupedCodes
from llm_core.quant.formats import Weight
from llm_core.runner import ModelRunner
from llm_core.speculative.calibration import measure_row_costs
from llm_core.speculative.choice import make_drafter
from llm_core.speculative.control import Controller, FixedController
from llm_core.speculative.controller import AutoController
from llm_core.speculative.drafter import Drafter, DraftRequest, DraftShape
from llm_core.speculative.eagle import head_shapes
from llm_core.speculative.eagle_drafter import EagleDrafter
from llm_core.speculative.head_config import HeadConfig
from llm_core.speculative.native_head import NativeHead
from llm_core.speculative.row_cost import RowCost
from llm_core.speculative.tree import DraftTree
from llm_core.speculator import Speculator
from llm_core.tokenizer import Tokenizer

SPOKEN = (
    "What should I cook tonight with eggs and rice?",
    "Can you explain how rainbows appear?",
    "Tell me something about the history of tea.",
    "How do I get better at remembering names?",
    "Why do cats purr?",
    "What is a good way to start running?",
    "Please tell me a short story about a lighthouse.",
    "How does a bicycle stay upright?",
)
SHAPES = {
    "chain 1": DraftShape(1, 1),
    "chain 2": DraftShape(2, 2),
    "chain 3": DraftShape(3, 3),
    "chain 4": DraftShape(4, 4),
    "tree 8": DraftShape(8, 4, 3),
    "tree 16": DraftShape(16, 5, 4),
}
AUTO = DraftShape(16, 5, 4)
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


@dataclass(frozen=True, slots=True)
class Mode:
    """One column of the comparison; ``drafter`` None is plain decoding."""

    name: str
    drafter: Drafter | None = None
    controller: Controller | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """One batch of texts, said once."""

    texts: list[list[int]]
    tok_s: float
    tokens_a_step: float
    draft_share: float


def say(
    engine: Engine, mode: Mode, prompts: Sequence[str], params: SamplingParams, first_id: int
) -> Run:
    """All prompts at once, to their ends; the clock starts when all have their first token."""
    engine._speculator = None
    if mode.drafter is not None and mode.controller is not None:
        context_len = engine.info.context_len
        engine._speculator = Speculator(
            mode.drafter, mode.controller, max_context=context_len, clock=time.perf_counter_ns
        )
    sequences = []
    # A prefix that a mode without a head has cached is one that a head has not read; and a reply
    # that was said before is no new one.
    options = RequestOptions(cache_salt=str(first_id))
    for number, prompt in enumerate(prompts, first_id):
        messages = [ChatMessage("system", INSTRUCTIONS), ChatMessage("user", prompt)]
        engine.submit(number, messages, params, received_ns=0, options=options)
        sequences.append(engine._requests[number].sequence)
    while engine.has_work and not all(s.num_generated for s in sequences):
        engine.step()
    start = time.perf_counter()
    before = sum(s.num_generated for s in sequences)
    steps_before = sum(s.num_steps for s in sequences)
    draft_ns = 0
    while engine.has_work:
        for _, event in engine.step():
            if isinstance(event, GenerationDone):
                draft_ns = max(draft_ns, event.speculation.draft_ns)
    spent = time.perf_counter() - start
    tokens = sum(s.num_generated for s in sequences) - before
    steps = sum(s.num_steps for s in sequences) - steps_before
    return Run(
        [s.token_ids[s.prompt_len :] for s in sequences],
        tokens / spent,
        tokens / max(1, steps),
        draft_ns / 1e9 / spent,
    )


def compare(
    engine: Engine,
    modes: Sequence[Mode],
    prompts: Sequence[str],
    *,
    batch: int,
    params: SamplingParams,
    rounds: int,
) -> dict[str, Any]:
    """Each mode's figures; asserts that all said the same."""
    found: dict[str, list[tuple[float, float, float, float]]] = {mode.name: [] for mode in modes}
    number = 0
    for index in range(-1, rounds):  # the first is a warm-up
        sums = {mode.name: [0.0] * 4 for mode in modes}
        batches = [prompts[at : at + batch] for at in range(0, len(prompts), batch)]
        for group in batches:
            texts = None
            plain_tok_s = 1.0
            for mode in modes if index % 2 else (modes[0], *reversed(modes[1:])):
                run = say(engine, mode, group, params, number)
                number += len(group)
                assert texts in (None, run.texts), f"{mode.name} says something else"
                texts = run.texts
                if mode.drafter is None:
                    plain_tok_s = run.tok_s
                figures = (run.tok_s, run.tokens_a_step, run.draft_share, run.tok_s / plain_tok_s)
                for at, value in enumerate(figures):
                    sums[mode.name][at] += value / len(batches)
        if index >= 0:
            for name, values in sums.items():
                found[name].append(tuple(values))  # type: ignore[arg-type]
    names = ("tok_s", "tokens_a_step", "draft_share", "ratio")
    return {
        mode: {
            name: round(statistics.median(row[at] for row in rows), 3)
            for at, name in enumerate(names)
        }
        for mode, rows in found.items()
    }


def show(title: str, figures: Mapping[str, Mapping[str, float]]) -> None:
    """One table."""
    print(f"\n{title}\n{'':24}{'tok/s':>9}{'a step':>9}{'drafting':>10}{'ratio':>8}")
    for mode, row in figures.items():
        print(
            f"{mode:24}{row['tok_s']:9.1f}{row['tokens_a_step']:9.2f}"
            f"{row['draft_share']:10.1%}{row['ratio']:8.2f}",
            flush=True,
        )


def bench_model(arguments: argparse.Namespace) -> dict[str, Any]:
    """The table for a real model."""
    batches = [int(n) for n in arguments.batches.split(",")]
    config = EngineConfig(
        model_path=arguments.model,
        num_threads=arguments.threads,
        max_sequences=max(batches),
        max_context=1024,
        max_waiting=1000,
    )
    drafters: dict[str, Drafter] = {}
    wanted = {"head": arguments.head or "auto", "ngram": "ngram"}
    if arguments.draft_model:
        wanted["draft model"] = arguments.draft_model
    with open_model(arguments.model) as opened:
        runner = ModelRunner.of(opened.model, config)
        for name, speculation in wanted.items():
            own = EngineConfig(
                model_path=arguments.model,
                num_threads=arguments.threads,
                max_sequences=max(batches),
                max_context=1024,
                speculation=speculation,
            )
            drafter = make_drafter(own, runner, opened)
            if drafter is not None:
                drafters[name] = drafter
    engine = Engine(
        runner,
        opened.tokenizer,
        opened.template,
        max_sequences=max(batches),
        max_waiting=1000,
        clock=time.perf_counter_ns,
    )
    for drafter in drafters.values():
        if drafter.feature_layers:
            runner.set_feature_layers(drafter.feature_layers)
    costs = measure_row_costs(runner)
    sets = {"spoken": list(SPOKEN)}
    for path in sorted(Path(arguments.prompts).glob("*.txt")) if arguments.prompts else []:
        sets[path.stem] = path.read_text(encoding="utf-8").splitlines()[: arguments.num_prompts]
    result: dict[str, Any] = {"row_cost_ms": {n: round(ns / 1e6, 2) for n, ns in costs.items()}}
    print("step by rows, ms:", result["row_cost_ms"], flush=True)
    for set_name, prompts in sets.items():
        for temperature in (0.0, 0.7):
            params = SamplingParams(max_tokens=arguments.tokens, temperature=temperature, seed=1)
            modes = [Mode("plain")]
            for name, drafter in drafters.items():
                shapes = SHAPES if drafter.feature_layers else {"chain 3": SHAPES["chain 3"]}
                modes += [
                    Mode(f"{name} {shape_name}", drafter, FixedController(shape))
                    for shape_name, shape in shapes.items()
                ]
                modes.append(Mode(f"{name} auto", drafter, AutoController(AUTO, RowCost(costs))))
            title = f"{set_name}, temperature {temperature}"
            result[title] = compare(
                engine, modes, prompts, batch=1, params=params, rounds=arguments.rounds
            )
            show(title, result[title])
    head = drafters.get("head")
    if head is None:
        return result
    prompts = (list(SPOKEN) * 4)[: max(batches)]
    for batch in batches:
        modes = [Mode("plain")]
        modes += [
            Mode(name, head, FixedController(SHAPES[name]))
            for name in ("chain 1", "chain 2", "chain 3")
        ]
        modes.append(Mode("auto", head, AutoController(AUTO, RowCost(costs))))
        params = SamplingParams(max_tokens=arguments.tokens)
        title = f"{batch} streams"
        result[title] = compare(
            engine, modes, prompts[:batch], batch=batch, params=params, rounds=arguments.rounds
        )
        show(title, result[title])
    return result


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
    """Takes a real head's time, and is right as often as it is told to be, for each depth."""

    def __init__(self, head: NativeHead, acceptance: Sequence[float], **options: Any) -> None:
        super().__init__(head, **options)
        self.texts: list[list[int]] = []
        self._acceptance = acceptance
        self._random = random.Random(0)

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return [
            self._with_truth(request, tree)
            for request, tree in zip(requests, super().propose(requests), strict=True)
        ]

    def _with_truth(self, request: DraftRequest, tree: DraftTree) -> DraftTree:
        known = request.sequence.token_ids
        text = next((t for t in self.texts if t[: len(known)] == known), known)
        tokens, odds = [], []
        for depth in range(len(tree)):
            chance = self._acceptance[min(depth, len(self._acceptance) - 1)]
            at = len(known) + depth
            right = text[at] if at < len(text) else 5
            tokens.append(right if self._random.random() < chance else (right + 1) % 1000)
            odds.append(chance)
        return DraftTree.chain(tokens, odds)


def bench_wide(arguments: argparse.Namespace) -> dict[str, Any]:
    """Chains for a wide target; trees of the same acceptance gain more, on what has free rows."""
    config = SIZES[arguments.wide]
    runner = ModelRunner(
        config,
        RandomWeights(config),
        weight_format="auto",
        model_backend="native",
        num_threads=arguments.threads,
        max_context=512,
        kv_dtype="bfloat16",
        name=f"random {arguments.wide}",
    )
    model = runner.model
    assert isinstance(model, NativeDecoder)
    width = config.hidden_size
    shape = HeadConfig(
        kind="eagle3",
        hidden_size=width,
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
    head = NativeHead(shape, tensors, model, max_context=512)
    acceptance = [float(x) for x in arguments.acceptance.split(",")]
    drafter = KnowingDrafter(
        head,
        acceptance,
        num_blocks=runner.num_blocks,
        block_size=runner.block_size,
        max_sequences=1,
    )
    runner.set_feature_layers(drafter.feature_layers)
    costs = measure_row_costs(runner)
    result: dict[str, Any] = {"row_cost_ms": {n: round(ns / 1e6, 2) for n, ns in costs.items()}}
    print("step by rows, ms:", result["row_cost_ms"], flush=True)
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
    engine = Engine(runner, tokenizer, template, max_sequences=1, clock=time.perf_counter_ns)
    prompt = "Ā" * 8
    params = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True)
    plain = say(engine, Mode("plain"), [prompt], params, 0)
    prompt_ids = tokenizer.encode_pieces(template.render([ChatMessage("user", prompt)]))
    drafter.texts = [prompt_ids + plain.texts[0]]
    modes = [Mode("plain")]
    modes += [
        Mode(name, drafter, FixedController(SHAPES[name]))
        for name in ("chain 1", "chain 2", "chain 3", "chain 4")
    ]
    modes.append(Mode("auto", drafter, AutoController(AUTO, RowCost(costs))))
    result["wide"] = compare(
        engine, modes, [prompt], batch=1, params=params, rounds=arguments.rounds
    )
    show(f"random {arguments.wide}, 4 bits, acceptance {acceptance}", result["wide"])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", help="model file or directory")
    parser.add_argument("--head", help="a draft head; else the one that comes with the model")
    parser.add_argument("--draft-model", help="a smaller model with the same tokens")
    parser.add_argument("--prompts", help="directory of .txt files, a prompt a line")
    parser.add_argument("--num-prompts", type=int, default=8, help="of each file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", default="1,4,8,16")
    parser.add_argument("--wide", choices=sorted(SIZES))
    parser.add_argument("--acceptance", default="0.6,0.5,0.4", help="by depth, for --wide")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if (arguments.model is None) == (arguments.wide is None):
        parser.error("give a model, or --wide")
    result = bench_wide(arguments) if arguments.wide else bench_model(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
