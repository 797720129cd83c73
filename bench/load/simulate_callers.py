"""How many callers an engine serves in time: deadline scheduling against first come, first served.

    python -m bench.load.simulate_callers ../shared/data/traces/azure_llm_2023_conv.csv \
        [--model MODEL] [--json OUT] [--svg OUT]

Simulated callers drive the real engine (scheduler, prefix cache, block tables); only the model is
replaced, by a clock that moves on by what a step of that many rows takes. That cost is measured on
MODEL in this run, or given as --fixed-ms and --row-ms.

A caller joins at an instant of the trace (its inter-arrival times, squeezed into the first minute)
with the trace's context as the history of the call, which is read at once, and takes turns:
silence, a question of 20 tokens, an answer as long as the trace's (up to 120 tokens, half a minute
of speech). An answer is spoken from its sixth token on, at 3.5 tokens a second. A turn is on budget
if its first token comes within the budget, and whole if its playout never runs dry. A number of
callers is served if 95% of the turns are on budget and 95% are whole.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from llm_core.batch import ForwardBatch, ForwardResult, Segment
from llm_core.chat.template import ChatTemplate
from llm_core.engine.engine import Engine
from llm_core.messages import (
    ChatMessage,
    EngineConfig,
    FirstToken,
    GenerationDone,
    PolicyName,
    RequestOptions,
    SamplingParams,
    TextDelta,
)
from llm_core.model.runner import ModelRunner
from llm_core.tokenizer.tokenizer import Tokenizer

SPEECH_TOKENS_PER_S = 3.5
FIRST_CLAUSE_TOKENS = 6
QUESTION_TOKENS = 20
MAX_CONTEXT_TOKENS = 1500
MAX_ANSWER_TOKENS = 120
JOIN_WITHIN_S = 60.0
FIRST_QUESTION_S = (4.0, 10.0)  # from joining to the end of the first question
SILENCE_S = (1.0, 5.0)  # from the end of an answer to the end of the next question
NEEDED_SHARE = 0.95

CONTROL = ("<|end|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{{ '<|assistant|>' }}"
)


def letters_tokenizer() -> Tokenizer:
    """One token a character, so that lengths are exact."""
    printable = [chr(c) for c in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))]
    tokens = [*CONTROL, *printable, *(chr(256 + n) for n in range(256 - len(printable)))]
    types = [3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL))
    return Tokenizer(
        tokens=tokens, token_types=types, merges=[], pre="smollm", bos_id=0, eos_ids=[0]
    )


class TimedModel:
    """The interface of ModelRunner; says always the same and takes its time."""

    num_blocks, block_size, max_context = 16_384, 16, 8_192
    samples_on_device = False
    sampler_backend = None

    def __init__(self, fixed_ms: float, row_ms: float, vocab_size: int) -> None:
        self.now_ns = 0
        self.num_steps = 0
        self._fixed_ns, self._row_ns = fixed_ms * 1e6, row_ms * 1e6
        self._logits = torch.zeros(1, vocab_size)
        self._logits[0, 40] = 1.0

    @property
    def info_fields(self) -> dict[str, Any]:
        return {
            "name": "simulated",
            "context_len": self.max_context,
            "vocab_size": self._logits.shape[1],
            "num_layers": 1,
            "weight_format": "none",
            "num_threads": 1,
        }

    def forward(self, batch: ForwardBatch) -> ForwardResult:
        self.num_steps += 1
        self.now_ns += int(self._fixed_ns + self._row_ns * len(batch.token_ids))
        return ForwardResult(self._logits.expand(len(batch.logit_rows), -1))

    def copy_block_rows(self, src_block: int, dst_block: int, num_rows: int) -> None:
        """Takes no time worth counting."""


@dataclass
class Caller:
    """One call: its history, and the answer that it hears now."""

    history: list[ChatMessage]
    answer_lens: Iterator[int]
    rng: random.Random
    draft: int | None = None
    asked_ns: int = 0
    answer: str = ""
    play_start_ns: int | None = None
    has_gap: bool = False

    def heard_until_ns(self, num_tokens: int) -> int:
        """When the playout of so many tokens is over."""
        assert self.play_start_ns is not None
        return self.play_start_ns + int(num_tokens / SPEECH_TOKENS_PER_S * 1e9)


@dataclass
class Outcome:
    """Of one run."""

    first_token_ms: list[float] = field(default_factory=list)
    num_whole: int = 0
    num_turns: int = 0


class Simulation:
    """Callers, engine and one clock."""

    def __init__(
        self,
        trace: list[tuple[float, int, int]],
        num_callers: int,
        policy: PolicyName,
        budget_ms: float,
        cost_ms: tuple[float, float],
    ) -> None:
        tokenizer = letters_tokenizer()
        self.model = TimedModel(*cost_ms, tokenizer.vocab_size)
        template = ChatTemplate(TEMPLATE, control_tokens=CONTROL)
        self.engine = Engine(
            cast(ModelRunner, self.model),
            tokenizer,
            template,
            max_sequences=num_callers,
            policy=policy,
            clock=lambda: self.model.now_ns,
        )
        self.budget_ns = int(budget_ms * 1e6)
        self.outcome = Outcome()
        self.ids = itertools.count(1)
        self.speaking: dict[int, Caller] = {}
        self.asks: list[tuple[int, int, Caller]] = []  # (instant, tie-break, who asks)
        self.joins: list[tuple[int, int, Caller]] = []
        # Each caller takes its call's length and answers from its own place in the trace.
        span_s = trace[num_callers - 1][0] or 1.0
        for number in range(num_callers):
            start_s, context_len, _ = trace[number]
            lens = itertools.cycle(
                [min(max(n, 8), MAX_ANSWER_TOKENS) for _, _, n in trace[number::num_callers]]
            )
            text = f"{number:05d}" + "h" * min(context_len, MAX_CONTEXT_TOKENS)
            caller = Caller([ChatMessage("user", text)], lens, random.Random(number))
            caller.history.append(ChatMessage("assistant", "Hello."))
            join_ns = int(start_s / span_s * JOIN_WITHIN_S * 1e9)
            heapq.heappush(self.joins, (join_ns, number, caller))

    def ask_at(self, instant_ns: int, caller: Caller) -> None:
        heapq.heappush(self.asks, (instant_ns, next(self.ids), caller))

    def run(self, duration_s: float) -> Outcome:
        while self.model.now_ns < duration_s * 1e9:
            if not self.engine.has_work:
                instants = [queue[0][0] for queue in (self.asks, self.joins) if queue]
                self.model.now_ns = max(self.model.now_ns, min(instants))
            while self.joins and self.joins[0][0] <= self.model.now_ns:
                self.join(*heapq.heappop(self.joins))
            while self.asks and self.asks[0][0] <= self.model.now_ns:
                instant_ns, number, caller = heapq.heappop(self.asks)
                self.ask(number, caller, instant_ns)
            for number, event in self.engine.step():
                if number in self.speaking:
                    self.hear(number, self.speaking[number], event)
        return self.outcome

    def join(self, instant_ns: int, number: int, caller: Caller) -> None:
        """The history is read while the caller begins to talk."""
        first_ns = instant_ns + int(caller.rng.uniform(*FIRST_QUESTION_S) * 1e9)
        self.ask_at(first_ns, caller)
        caller.draft = next(self.ids)
        options = RequestOptions(deadline_ns=first_ns)
        self.engine.open_draft(
            caller.draft, caller.history, received_ns=instant_ns, options=options
        )

    def ask(self, number: int, caller: Caller, instant_ns: int) -> None:
        caller.asked_ns, caller.play_start_ns, caller.has_gap = instant_ns, None, False
        caller.answer = ""
        caller.history.append(ChatMessage("user", f"{number:06d}".ljust(QUESTION_TOKENS, "q")))
        params = SamplingParams(max_tokens=next(caller.answer_lens), ignore_eos=True)
        options = RequestOptions(deadline_ns=instant_ns + self.budget_ns, overflow="drop_oldest")
        if caller.draft is None:
            self.speaking[number] = caller
            self.engine.submit(
                number, caller.history, params, received_ns=instant_ns, options=options
            )
        else:
            self.speaking[caller.draft] = caller
            self.engine.update_draft(caller.draft, caller.history)
            self.engine.commit_draft(caller.draft, params, received_ns=instant_ns, options=options)
            caller.draft = None

    def hear(self, number: int, caller: Caller, event: object) -> None:
        now_ns = self.model.now_ns
        if isinstance(event, FirstToken):
            self.outcome.first_token_ms.append((now_ns - caller.asked_ns) / 1e6)
        elif isinstance(event, TextDelta):
            caller.answer += event.text
            if caller.play_start_ns is None and event.num_tokens >= FIRST_CLAUSE_TOKENS:
                caller.play_start_ns = now_ns
            if caller.play_start_ns is None:
                self.engine.set_deadline(number, now_ns)  # the first clause is waited for
                return
            if now_ns > caller.heard_until_ns(event.num_tokens - 1):
                caller.has_gap = True
                caller.play_start_ns += now_ns - caller.heard_until_ns(event.num_tokens - 1)
            self.engine.set_deadline(number, caller.heard_until_ns(event.num_tokens))
        elif isinstance(event, GenerationDone):
            self.outcome.num_turns += 1
            self.outcome.num_whole += not caller.has_gap
            del self.speaking[number]
            caller.history.append(ChatMessage("assistant", caller.answer))
            assert caller.play_start_ns is not None, "an answer has a first clause"
            end_ns = max(now_ns, caller.heard_until_ns(event.usage.completion_tokens))
            self.ask_at(end_ns + int(caller.rng.uniform(*SILENCE_S) * 1e9), caller)


def measured_cost_ms(model_path: str) -> tuple[float, float]:
    """(fixed, per row) of steps of 1 to 96 rows, 16 rows of context; the median of five each."""
    # The threads of a server on two cores.
    config = EngineConfig(model_path=model_path, max_context=512, num_threads=2)
    runner = ModelRunner.load(config)
    points = []
    for num_rows in (1, 2, 4, 8, 16, 32, 96):
        segments = tuple(Segment((2 * n, 2 * n + 1), 16, 1) for n in range(min(num_rows, 32)))
        if num_rows > len(segments):
            segments = (Segment(tuple(range(8)), 0, num_rows),)
        batch = ForwardBatch(torch.full((num_rows,), 300), segments, torch.arange(len(segments)))
        times = []
        for _ in range(6):
            start = time.perf_counter()
            runner.forward(batch)
            times.append((time.perf_counter() - start) * 1e3)
        points.append((num_rows, statistics.median(times[1:])))
    slope, intercept = statistics.linear_regression(*zip(*points, strict=True))
    return max(0.1, intercept), slope


def serve(trace: list[tuple[float, int, int]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Raises the number of callers until neither policy serves them."""
    cost_ms = (arguments.fixed_ms, arguments.row_ms)
    if arguments.model:
        cost_ms = measured_cost_ms(arguments.model)
    result: dict[str, Any] = {
        "fixed_ms": cost_ms[0],
        "row_ms": cost_ms[1],
        "budget_ms": arguments.budget_ms,
        "duration_s": arguments.duration_s,
        "runs": [],
    }
    policies: tuple[PolicyName, ...] = ("fcfs", "deadline")
    for policy in policies:
        served = 0
        for num_callers in range(arguments.step, arguments.most + 1, arguments.step):
            simulation = Simulation(trace, num_callers, policy, arguments.budget_ms, cost_ms)
            run = summary(simulation.run(arguments.duration_s), arguments.budget_ms)
            result["runs"].append({"policy": policy, "num_callers": num_callers, **run})
            print(json.dumps(result["runs"][-1]), file=sys.stderr)
            if min(run["on_budget"], run["whole"]) >= NEEDED_SHARE:
                served = num_callers
            elif min(run["on_budget"], run["whole"]) < 0.5:
                break
        result[f"served_{policy}"] = served
    return result


def summary(outcome: Outcome, budget_ms: float) -> dict[str, float]:
    times = sorted(outcome.first_token_ms)
    return {
        "turns": outcome.num_turns,
        "on_budget": round(sum(t <= budget_ms for t in times) / len(times), 4),
        "whole": round(outcome.num_whole / max(1, outcome.num_turns), 4),
        "first_token_p50_ms": round(times[len(times) // 2]),
        "first_token_p95_ms": round(times[int(0.95 * (len(times) - 1))]),
    }


def svg(result: dict[str, Any]) -> str:
    """Share of turns on budget and whole, over the number of callers."""
    width, height, left, top = 640, 320, 60, 30
    most = max(run["num_callers"] for run in result["runs"])

    def point(run: dict[str, Any], key: str) -> str:
        x = left + run["num_callers"] / most * (width - left - 20)
        return f"{x:.0f},{top + (1 - run[key]) * (height - top - 50):.0f}"

    colours = {"fcfs": "#c0392b", "deadline": "#1f6fb2"}
    names = {"on_budget": "first token in time", "whole": "no gap in the playout"}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for share in (0, 0.25, 0.5, 0.75, 0.95, 1):
        y = top + (1 - share) * (height - top - 50)
        dash = ' stroke-dasharray="4"' if share == NEEDED_SHARE else ""
        parts.append(
            f'<path d="M{left} {y:.0f}H{width - 20}" stroke="#bbb"{dash}/>'
            f'<text x="{left - 8}" y="{y + 4:.0f}" text-anchor="end">{share:.0%}</text>'
        )
    for callers in range(0, most + 1, max(1, most // 8)):
        x = left + callers / most * (width - left - 20)
        parts.append(f'<text x="{x:.0f}" y="{height - 32}" text-anchor="middle">{callers}</text>')
    for row, (policy, colour) in enumerate(colours.items()):
        for column, (key, name) in enumerate(names.items()):
            runs = [run for run in result["runs"] if run["policy"] == policy]
            dash = ' stroke-dasharray="6 3"' if key == "whole" else ""
            points = " ".join(point(run, key) for run in runs)
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" '
                f'stroke-width="2"{dash}/>'
            )
            x, y = left + 10 + 260 * column, height - 68 - 18 * row
            parts.append(
                f'<path d="M{x} {y - 4}h24" stroke="{colour}" stroke-width="2"{dash}/>'
                f'<text x="{x + 30}" y="{y}">{policy}: {name}</text>'
            )
    parts.append(
        f'<text x="{width / 2}" y="{height - 12}" text-anchor="middle">callers</text>'
        f'<text x="{left}" y="18">Share of turns, {result["fixed_ms"]:.1f} ms a step and '
        f"{result['row_ms']:.2f} ms a row, budget {result['budget_ms']:g} ms</text></svg>"
    )
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--model", help="measure the cost of a step on this model")
    parser.add_argument("--fixed-ms", type=float, default=18.5)
    parser.add_argument("--row-ms", type=float, default=2.5)
    parser.add_argument("--budget-ms", type=float, default=600.0)
    parser.add_argument("--duration-s", type=float, default=180.0)
    parser.add_argument("--step", type=int, default=4)
    parser.add_argument("--most", type=int, default=80)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    arguments = parser.parse_args()
    with arguments.trace.open(encoding="utf-8") as file:
        rows = [
            (float(row["t_s"]), int(row["context_tokens"]), int(row["generated_tokens"]))
            for row in csv.DictReader(file)
        ]
    result = serve(rows, arguments)
    output = json.dumps(result, indent=1)
    print(output)
    if arguments.json is not None:
        arguments.json.write_text(output + "\n", encoding="utf-8")
    if arguments.svg is not None:
        arguments.svg.write_text(svg(result), encoding="utf-8")


if __name__ == "__main__":
    main()
