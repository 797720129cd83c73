"""How many callers an engine serves in time: deadline scheduling against first come, first served.

    python -m bench.load.simulate_callers ../shared/data/traces/azure_llm_2023_conv.csv \
        [--model MODEL] [--json OUT] [--svg OUT]

Simulated callers drive the real engine (scheduler, prefix cache, block tables). Only the model is
replaced, by a virtual clock that advances by the cost of a step with that many rows. The cost is
measured on MODEL in this run, or given as --fixed-ms and --row-ms.

A caller joins at an instant of the trace (its inter-arrival times, compressed into the first
minute) with the context of the trace as history, and takes turns: a question of 20 tokens, an
answer as long as that of the trace (at most 120 tokens, half a minute of speech), and so on.
Requests are those of a session (``app.conversation``): a prefill of the history when the caller
starts to speak, a prefill with the partial transcript after every further three words unless the
one before still runs, then the request itself, which waits for a running prefill of its caller.

Playout of an answer starts at its sixth token, at 3.5 tokens a second. A turn is on budget if its
first token arrives within the budget, and whole if its playout never underruns. A number of callers
is served if 95% of the turns are on budget and 95% are whole.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from bench.harness.plot import Chart, Line, to_svg
from bench.harness.results import Result, add_json_option, report
from bench.load.trace import Arrival, read_arrivals
from llm_core.batch import ForwardBatch, ForwardResult, Segment
from llm_core.chat.template import ChatTemplate
from llm_core.engine.engine import Engine
from llm_core.messages import (
    ChatMessage,
    EngineConfig,
    FirstToken,
    GenerationDone,
    PolicyName,
    PrefillResult,
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
QUESTION_S = (1.0, 5.0)  # from the end of an answer to the end of the next question
PARTIAL_S = 1.0  # three words
NEEDED_SHARE = 0.95
POLICIES: tuple[PolicyName, ...] = ("fcfs", "deadline")

CONTROL = ("<|end|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{{ '<|assistant|>' }}"
)


def letters_tokenizer() -> Tokenizer:
    """One token per character, so that lengths are exact."""
    printable = [chr(c) for c in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))]
    tokens = [*CONTROL, *printable, *(chr(256 + n) for n in range(256 - len(printable)))]
    types = [3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL))
    return Tokenizer(
        tokens=tokens, token_types=types, merges=[], pre="smollm", bos_id=0, eos_ids=[0]
    )


class TimedModel:
    """The interface of ModelRunner with constant logits, on a virtual clock."""

    num_blocks, block_size, max_context = 16_384, 16, 8_192
    samples_on_device = False
    sampler_backend = None

    def __init__(self, fixed_ms: float, row_ms: float, vocab_size: int) -> None:
        self.now_ns = 0
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
        self.now_ns += int(self._fixed_ns + self._row_ns * len(batch.token_ids))
        return ForwardResult(self._logits.expand(len(batch.logit_rows), -1))

    def copy_block_rows(self, src_block: int, dst_block: int, num_rows: int) -> None:
        """Its cost is negligible."""


@dataclass
class Caller:
    """One call: its history, its requests to the engine, and the answer that is played to it."""

    history: list[ChatMessage]
    answer_lens: Iterator[int]
    rng: random.Random
    prefill: int | None = None
    """The prefill that runs, if any."""
    is_waiting: bool = False
    """The question is over, and its request waits for that prefill."""
    asked_ns: int = 0
    answer: str = ""
    play_start_ns: int | None = None
    has_gap: bool = False

    def played_until_ns(self, num_tokens: int) -> int:
        """When the playout of ``num_tokens`` tokens ends."""
        assert self.play_start_ns is not None
        return self.play_start_ns + int(num_tokens / SPEECH_TOKENS_PER_S * 1e9)


@dataclass
class Outcome:
    """Figures of one run."""

    first_token_ms: list[float] = field(default_factory=list)
    num_whole: int = 0
    num_turns: int = 0

    def row(self, budget_ms: float) -> tuple[int, float, float, int, int]:
        """(turns, share on budget, share whole, median and 95th percentile to the first token)."""
        times = sorted(self.first_token_ms)
        return (
            self.num_turns,
            round(sum(t <= budget_ms for t in times) / len(times), 4),
            round(self.num_whole / max(1, self.num_turns), 4),
            round(times[len(times) // 2]),
            round(times[int(0.95 * (len(times) - 1))]),
        )


class Simulation:
    """Callers, engine and one virtual clock."""

    def __init__(
        self,
        trace: Sequence[Arrival],
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
        self.requests: dict[int, Caller] = {}
        self.actions: list[tuple[int, int, Callable[[], None]]] = []  # (instant, tie-break, action)
        # Each caller takes the length of its history and its answers from its own place in the
        # trace.
        span_s = trace[num_callers - 1].at_s or 1.0
        for number, arrival in enumerate(trace[:num_callers]):
            lens = itertools.cycle(
                min(max(a.generated_tokens, 8), MAX_ANSWER_TOKENS)
                for a in trace[number::num_callers]
            )
            text = f"{number:05d}" + "h" * min(arrival.context_tokens, MAX_CONTEXT_TOKENS)
            caller = Caller([ChatMessage("user", text)], lens, random.Random(number))
            caller.history.append(ChatMessage("assistant", "Hello."))
            self._at(int(arrival.at_s / span_s * JOIN_WITHIN_S * 1e9), self._join, number, caller)

    def run(self, duration_s: float) -> Outcome:
        while self.model.now_ns < duration_s * 1e9:
            if not self.engine.has_work:
                self.model.now_ns = max(self.model.now_ns, self.actions[0][0])
            while self.actions and self.actions[0][0] <= self.model.now_ns:
                heapq.heappop(self.actions)[2]()
            for number, event in self.engine.step():
                self._on_event(number, self.requests[number], event)
        return self.outcome

    def _at(self, instant_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        bound = (instant_ns, next(self.ids), lambda: action(instant_ns, *arguments))
        heapq.heappush(self.actions, bound)

    def _join(self, instant_ns: int, number: int, caller: Caller) -> None:
        self._speak(instant_ns, number, caller, FIRST_QUESTION_S)

    def _speak(
        self, start_ns: int, number: int, caller: Caller, length_s: tuple[float, float]
    ) -> None:
        """A question from ``start_ns`` on: its partial transcripts, and its end."""
        spoken_s = caller.rng.uniform(*length_s)
        question = f"{number:06d}".ljust(QUESTION_TOKENS, "q")
        num_partials = int(spoken_s / PARTIAL_S)
        for count in range(num_partials + 1):
            words = question[: int(QUESTION_TOKENS * count * PARTIAL_S / spoken_s)]
            at_ns = start_ns + int(count * PARTIAL_S * 1e9)
            self._at(at_ns, self._prefill, caller, words)
        self._at(start_ns + int(spoken_s * 1e9), self._ask, caller, question)

    def _prefill(self, instant_ns: int, caller: Caller, words: str) -> None:
        if caller.prefill is not None:
            return
        messages = [*caller.history, *([ChatMessage("user", words)] if words else [])]
        caller.prefill = next(self.ids)
        self.requests[caller.prefill] = caller
        options = RequestOptions(overflow="drop_oldest")
        self.engine.submit_prefill(
            caller.prefill, messages, received_ns=instant_ns, options=options
        )

    def _ask(self, instant_ns: int, caller: Caller, question: str) -> None:
        caller.asked_ns, caller.play_start_ns, caller.has_gap = instant_ns, None, False
        caller.answer = ""
        caller.history.append(ChatMessage("user", question))
        caller.is_waiting = caller.prefill is not None
        if not caller.is_waiting:
            self._submit(caller)

    def _submit(self, caller: Caller) -> None:
        number = next(self.ids)
        self.requests[number] = caller
        params = SamplingParams(max_tokens=next(caller.answer_lens), ignore_eos=True)
        deadline_ns = caller.asked_ns + self.budget_ns
        options = RequestOptions(deadline_ns=deadline_ns, overflow="drop_oldest")
        self.engine.submit(
            number, caller.history, params, received_ns=self.model.now_ns, options=options
        )

    def _on_event(self, number: int, caller: Caller, event: object) -> None:
        now_ns = self.model.now_ns
        if isinstance(event, Exception):
            raise event
        if isinstance(event, PrefillResult):
            del self.requests[number]
            caller.prefill = None
            if caller.is_waiting:
                caller.is_waiting = False
                self._submit(caller)
        elif isinstance(event, FirstToken):
            self.outcome.first_token_ms.append((now_ns - caller.asked_ns) / 1e6)
        elif isinstance(event, TextDelta):
            caller.answer += event.text
            if caller.play_start_ns is None and event.num_tokens >= FIRST_CLAUSE_TOKENS:
                caller.play_start_ns = now_ns
            if caller.play_start_ns is None:
                self.engine.set_deadline(number, now_ns)  # nothing to play yet: it is urgent
                return
            if now_ns > caller.played_until_ns(event.num_tokens - 1):
                caller.has_gap = True
                caller.play_start_ns += now_ns - caller.played_until_ns(event.num_tokens - 1)
            self.engine.set_deadline(number, caller.played_until_ns(event.num_tokens))
        elif isinstance(event, GenerationDone):
            del self.requests[number]
            self.outcome.num_turns += 1
            self.outcome.num_whole += not caller.has_gap
            caller.history.append(ChatMessage("assistant", caller.answer))
            end_ns = max(now_ns, caller.played_until_ns(event.usage.completion_tokens))
            self._at(end_ns, self._speak, number, caller, QUESTION_S)


def measured_cost_ms(model_path: str) -> tuple[float, float]:
    """(fixed, per row) from steps of 1 to 96 rows, 16 rows of context, the median of five each."""
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


def serve(trace: Sequence[Arrival], arguments: argparse.Namespace) -> Result:
    """Raise the number of callers under each policy until fewer than half of them are served."""
    cost_ms = (arguments.fixed_ms, arguments.row_ms)
    if arguments.model:
        cost_ms = measured_cost_ms(arguments.model)
    budget_ms = arguments.budget_ms
    result = Result(
        ("policy", "callers", "turns", "on budget", "whole", "first token p50, ms", "p95, ms")
    )
    served = dict.fromkeys(POLICIES, 0)
    for policy in POLICIES:
        for num_callers in range(arguments.step, arguments.most + 1, arguments.step):
            simulation = Simulation(trace, num_callers, policy, budget_ms, cost_ms)
            row = simulation.run(arguments.duration_s).row(budget_ms)
            result.add(policy, num_callers, *row)
            print(policy, num_callers, *row, file=sys.stderr, flush=True)
            if min(row[1:3]) >= NEEDED_SHARE:
                served[policy] = num_callers
            elif min(row[1:3]) < 0.5:
                break
    counts = ", ".join(f"{count} by {policy}" for policy, count in served.items())
    result.notes = (
        f"Callers served: {counts}. {cost_ms[0]:.1f} ms a step and {cost_ms[1]:.2f} ms a row, "
        f"budget {budget_ms:g} ms, {arguments.duration_s:g} s of virtual time."
    )
    return result


def svg(result: Result) -> str:
    """Share of turns on budget and whole, over the number of callers."""
    charts = []
    for column, name in ((3, "first token on budget"), (4, "no gap in the playout")):
        lines = []
        for policy in POLICIES:
            rows = [cast(Sequence[float], row) for row in result.rows if row[0] == policy]
            lines.append(Line(policy, [(row[1], 100 * row[column]) for row in rows]))
        limit = (f"needed {NEEDED_SHARE:.0%}", 100 * NEEDED_SHARE)
        charts.append(Chart(f"Turns: {name}", "callers", "% of turns", lines, limit))
    return to_svg(charts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--model", help="measure the cost of a step on this model")
    parser.add_argument("--fixed-ms", type=float, default=18.5)
    parser.add_argument("--row-ms", type=float, default=2.5)
    parser.add_argument("--budget-ms", type=float, default=600.0)
    parser.add_argument("--duration-s", type=float, default=180.0, help="virtual time")
    parser.add_argument("--step", type=int, default=4)
    parser.add_argument("--most", type=int, default=80)
    parser.add_argument("--svg", type=Path)
    add_json_option(parser)
    arguments = parser.parse_args()
    result = serve(read_arrivals(arguments.trace), arguments)
    if arguments.svg is not None:
        arguments.svg.write_text(svg(result), encoding="utf-8")
    report(result, arguments)


if __name__ == "__main__":
    main()
