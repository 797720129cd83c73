"""What drafts gain: drafter x shape x prompts x temperature, batches, and the automatic choice.

    python -m bench.speculation.speedup MODEL [--tables spoken,general] [--temperatures 0,0.7]
        [--modes head,ngram] [--batches 1] [--seconds 240] [--json OUT] [--markdown OUT]
    python -m bench.speculation.speedup --wide 1b --acceptance 0.5,0.5,0.45 [--batches 1,4]

One process and one engine; every batch of prompts is said in all modes, one after another, so that
what else the machine does meets all of them alike. A table for each set of prompts, temperature
and batch size; each gets its share of ``--seconds``, and says how many batches it had time for.
Figures: tokens a second after the first, tokens that a step brings (the target's own among them),
the share of time that drafting takes, and the ratio to plain decoding of the same batch (median and
quartiles). What a step costs by its rows, and drafts by their depth, is measured once.

Prompts: "spoken" and "general" are those of ``bench.speculation.acceptance``, "open" are questions
with long answers, all with Parley's instructions but the general ones. ``--modes`` are parts of
names: "head chain 1", "auto", "ngram" ...; plain decoding is always there. ``--wide``: see
``wide_target``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from app.config import DEFAULT_INSTRUCTIONS as INSTRUCTIONS
from bench.speculation.acceptance import general_prompts, spoken_prompts
from bench.speculation.draft_modes import AUTO, SHAPES, Conversation, Mode, compare, table
from bench.speculation.wide_target import SIZES, bench_wide
from llm_core.engine.engine import Engine
from llm_core.loading.model_files import open_model
from llm_core.messages import ChatMessage, EngineConfig, SamplingParams
from llm_core.model.runner import ModelRunner
from llm_core.speculative.control.auto import AutoController
from llm_core.speculative.control.base import FixedController
from llm_core.speculative.control.costs import (
    DraftCost,
    VerificationCost,
    measure_draft_ns,
    measure_forward_ns,
)
from llm_core.speculative.drafters.base import Drafter
from llm_core.speculative.drafters.eagle import EagleDrafter
from llm_core.speculative.drafters.ngram import NgramDrafter
from llm_core.speculative.factory import make_drafter

OPEN = (
    "What should I cook tonight with eggs and rice?",
    "Can you explain how rainbows appear?",
    "Tell me something about the history of tea.",
    "How do I get better at remembering names?",
    "Why do cats purr?",
    "What is a good way to start running?",
    "Please tell me a short story about a lighthouse.",
    "How does a bicycle stay upright?",
)
MAX_CONTEXT = 512


def conversations(name: str, directory: Path, count: int) -> list[Conversation]:
    """A set of prompts. Raises ValueError for an unknown one."""
    if name == "general":
        return [[ChatMessage("user", text)] for text in general_prompts(directory, count)]
    if name not in ("spoken", "open"):
        raise ValueError(f"prompts are spoken, general or open, not {name!r}")
    texts = spoken_prompts(directory, count) if name == "spoken" else OPEN[:count]
    return [[ChatMessage("system", INSTRUCTIONS), ChatMessage("user", t)] for t in texts]


def modes_of(
    drafters: Mapping[str, Drafter],
    costs: Mapping[int, float],
    draft_costs: Mapping[str, Mapping[int, float]],
    wanted: Sequence[str],
) -> list[Mode]:
    """All that ``wanted`` names parts of, after plain decoding; automatic ones know nothing yet."""
    modes = [Mode("plain")]
    for name, drafter in drafters.items():
        modes += [
            Mode(f"{name} {shape}", drafter, FixedController(SHAPES[shape]))
            for shape in shapes_of(drafter)
        ]
        auto = AutoController(AUTO, VerificationCost(costs), DraftCost(draft_costs[name]))
        modes.append(Mode(f"{name} auto", drafter, auto))
    return [m for m in modes if m.drafter is None or any(part in m.name for part in wanted)]


def shapes_of(drafter: Drafter) -> list[str]:
    """Those that it can draft: a text's own words make chains only, siblings are a head's."""
    if isinstance(drafter, NgramDrafter):
        return [name for name in SHAPES if name.startswith("chain") and not SHAPES[name].siblings]
    if isinstance(drafter, EagleDrafter):
        return list(SHAPES)
    return [name for name in SHAPES if not SHAPES[name].siblings]


def bench_model(arguments: argparse.Namespace) -> dict[str, Any]:
    """The tables for a real model."""
    batches = [int(n) for n in arguments.batches.split(",")]
    config = EngineConfig(
        model_path=arguments.model,
        num_threads=arguments.threads,
        max_sequences=max(batches),
        max_context=MAX_CONTEXT,
        kv_cache_tokens=(max(batches) + 4) * MAX_CONTEXT,
    )
    wanted = {"head": arguments.head or "auto", "ngram": "ngram"}
    wanted |= dict(pair.split("=", 1) for pair in arguments.drafter)
    drafters: dict[str, Drafter] = {}
    with open_model(arguments.model) as opened:
        runner = ModelRunner.of(opened.model, config)
        for name, speculation in wanted.items():
            if any(part in f"{name} chain auto" or name in part for part in arguments.modes):
                own = structs.replace(config, speculation=speculation)
                drafter = make_drafter(own, runner, opened)
                if drafter is not None:
                    drafters[name] = drafter
    costs = measure_forward_ns(runner)
    draft_costs = {name: measure_draft_ns(d, runner) for name, d in drafters.items()}
    engine = Engine(
        runner,
        opened.tokenizer,
        opened.template,
        max_sequences=max(batches),
        max_waiting=1000,
        clock=time.perf_counter_ns,
    )
    result: dict[str, Any] = {
        "row_cost_ms": {n: round(ns / 1e6, 2) for n, ns in costs.items()},
        "draft_cost_ms": {
            name: {depth: round(ns / 1e6, 2) for depth, ns in found.items()}
            for name, found in draft_costs.items()
        },
    }
    arguments.say(f"step by rows, ms: {result['row_cost_ms']}")
    arguments.say(f"drafts by depth, ms: {result['draft_cost_ms']}")
    tables = [
        (name, float(temperature), batch)
        for batch in batches
        for name in arguments.tables.split(",")
        for temperature in arguments.temperatures.split(",")
    ]
    for number, (name, temperature, batch) in enumerate(tables):
        prompts = conversations(name, arguments.prompts, max(arguments.count, batch))
        left = arguments.end - time.monotonic()
        figures = compare(
            engine,
            modes_of(drafters, costs, draft_costs, arguments.modes),
            prompts,
            batch=batch,
            params=SamplingParams(max_tokens=arguments.tokens, temperature=temperature, seed=1),
            until=time.monotonic() + left / (len(tables) - number),
        )
        title = f"{name}, temperature {temperature:g}, {batch} at once"
        result[title] = with_choice(figures)
        arguments.say(table(title, figures))
    return result


def with_choice(figures: dict[str, dict[str, float]]) -> dict[str, Any]:
    """And how the automatic choice of each drafter compares with its best fixed one, plain decoding
    among them."""
    found: dict[str, Any] = dict(figures)
    for name in [mode for mode in figures if mode.endswith(" auto")]:
        family = name.removesuffix("auto")
        fixed = {m: row for m, row in figures.items() if m.startswith(family) and m != name}
        best = max(1.0, *(row["ratio"] for row in fixed.values())) if fixed else 1.0
        found[f"{name} by the best fixed"] = round(figures[name]["ratio"] / best, 3)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", help="model file or directory")
    parser.add_argument("--head", help="a draft head; else the one that comes with the model")
    parser.add_argument("--drafter", action="append", default=[], metavar="NAME=WHAT")
    root = Path(__file__).resolve().parents[2]
    parser.add_argument("--prompts", type=Path, default=root.parent / "shared/data/prompts")
    parser.add_argument("--count", type=int, default=24, help="prompts of each set")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=60, help="of an answer, at most")
    parser.add_argument("--tables", default="spoken,general", help="sets of prompts")
    parser.add_argument("--temperatures", default="0,0.7")
    parser.add_argument("--modes", default="head,ngram", help="parts of names")
    parser.add_argument("--batches", default="1")
    parser.add_argument("--seconds", type=float, default=240.0, help="for all tables together")
    parser.add_argument("--wide", choices=sorted(SIZES))
    parser.add_argument("--acceptance", default="0.5,0.5,0.45", help="by depth, for --wide")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    if (arguments.model is None) == (arguments.wide is None):
        parser.error("give a model, or --wide")
    arguments.end = time.monotonic() + arguments.seconds
    arguments.modes = arguments.modes.split(",")
    lines: list[str] = []

    def say(text: str) -> None:
        lines.append(text)
        print(text, flush=True)

    arguments.say = say
    result = bench_wide(arguments) if arguments.wide else bench_model(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
