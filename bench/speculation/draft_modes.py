"""Says the same texts with and without drafts, in turns, and compares: for ``speculation.py``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llm_core.engine.engine import Engine
from llm_core.engine.speculation import Speculator
from llm_core.messages import ChatMessage, GenerationDone, RequestOptions, SamplingParams
from llm_core.speculative.control.base import Controller
from llm_core.speculative.drafters.base import Drafter, DraftShape

SHAPES = {
    "chain 1": DraftShape(1, 1),
    "chain 2": DraftShape(2, 2),
    "chain 3": DraftShape(3, 3),
    "chain 4": DraftShape(4, 4),
    "siblings 2": DraftShape(2, 1, 2),
    "chain 2 and 1": DraftShape(4, 2, siblings=1),
    "chain 3 and 1": DraftShape(6, 3, siblings=1),
    "chain 3 and 2": DraftShape(7, 3, siblings=2),
    "tree 8": DraftShape(8, 4, 3),
    "tree 16": DraftShape(16, 5, 4),
}
AUTO = DraftShape(16, 5, 4, siblings=2)

Conversation = list[ChatMessage]


@dataclass(frozen=True, slots=True)
class Mode:
    """One row of the comparison; ``drafter`` None is plain decoding."""

    name: str
    drafter: Drafter | None = None
    controller: Controller | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """One batch of texts, said once; times are after the first token of each."""

    texts: list[list[int]]
    tokens: int
    steps: int
    spent_s: float
    draft_s: float
    verify_s: float


@dataclass(slots=True)
class Sums:
    """A mode's runs."""

    runs: list[Run] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)  # plain time by this one's, a batch each

    def figures(self) -> dict[str, float]:
        """The row of the table. ``ratio`` is that of all times, with its quartiles by batches."""
        spent = sum(run.spent_s for run in self.runs)
        tokens = sum(run.tokens for run in self.runs)
        low, middle, high = (
            statistics.quantiles(self.ratios, n=4) if len(self.ratios) > 1 else self.ratios * 3
        )
        return {
            "tok_s": round(tokens / spent, 1),
            "tokens_a_step": round(tokens / max(1, sum(run.steps for run in self.runs)), 3),
            "draft_share": round(sum(run.draft_s for run in self.runs) / spent, 3),
            "ratio": round(middle, 3),
            "ratio_low": round(low, 3),
            "ratio_high": round(high, 3),
            "num_batches": len(self.ratios),
        }


def say(
    engine: Engine, mode: Mode, prompts: Sequence[Conversation], params: SamplingParams, salt: int
) -> Run:
    """All prompts at once, to their ends; the clock starts when all have their first token."""
    engine._speculator = None
    if mode.drafter is not None and mode.controller is not None:
        context_len = engine.info.context_len
        if mode.drafter.feature_layers:  # each head reads its own
            engine._runner.set_feature_layers(mode.drafter.feature_layers)
        engine._speculator = Speculator(
            mode.drafter,
            mode.controller,
            max_context=context_len,
            clock=time.perf_counter_ns,
            progress=engine.progress,
        )
    # A prefix that a mode without a head has cached is one that a head has not read; and a reply
    # that was said before is no new one.
    options = RequestOptions(cache_salt=str(salt))
    sequences = []
    for number, messages in enumerate(prompts):
        engine.submit(number, messages, params, received_ns=0, options=options)
        sequences.append(engine._requests[number].sequence)
    draft_ns = verify_ns = 0

    def step() -> None:
        nonlocal draft_ns, verify_ns
        for _, event in engine.step():
            if isinstance(event, Exception):
                raise event
            if isinstance(event, GenerationDone):
                draft_ns = max(draft_ns, event.speculation.draft_ns)
                verify_ns = max(verify_ns, event.speculation.verify_ns)

    while engine.has_work and not all(s.num_generated for s in sequences):
        step()
    start = time.perf_counter()
    before = sum(s.num_generated for s in sequences)
    steps_before = sum(s.num_steps for s in sequences)
    while engine.has_work:
        step()
    return Run(
        [s.token_ids[s.prompt_len :] for s in sequences],
        sum(s.num_generated for s in sequences) - before,
        sum(s.num_steps for s in sequences) - steps_before,
        time.perf_counter() - start,
        draft_ns / 1e9,
        verify_ns / 1e9,
    )


def compare(
    engine: Engine,
    modes: Sequence[Mode],
    prompts: Sequence[Conversation],
    *,
    batch: int,
    params: SamplingParams,
    until: float,
) -> dict[str, dict[str, float]]:
    """Each mode's figures; the first is plain decoding. Batches of ``batch`` prompts, each said in
    all modes before the next, until all were said twice or ``time.monotonic()`` is ``until``; the
    first is said once more, before anything counts. Raises RuntimeError where modes differ in what
    they say."""
    found = {mode.name: Sums() for mode in modes}
    batches = [prompts[at : at + batch] for at in range(0, len(prompts), batch)]
    salt = 0
    for number, group in enumerate([batches[0], *batches, *batches]):
        if number > 1 and time.monotonic() > until:
            break
        shift = number % len(modes)
        runs: dict[str, Run] = {}
        for mode in (*modes[shift:], *modes[:shift]):
            salt += 1
            runs[mode.name] = say(engine, mode, group, params, salt)
        plain = runs[modes[0].name]
        for name, run in runs.items():
            if run.texts != plain.texts:
                raise RuntimeError(f"{name} says something else than {modes[0].name}")
            if number > 0 and run.tokens > 0:
                found[name].runs.append(run)
                found[name].ratios.append(plain.spent_s / run.spent_s)
    return {name: sums.figures() for name, sums in found.items() if sums.runs}


def table(title: str, figures: Mapping[str, Mapping[str, float]]) -> str:
    """Markdown."""
    lines = [
        f"\n{title}\n",
        "| drafts | tokens/s | tokens a step | drafting | by plain (quartiles) | batches |",
        "|---|---|---|---|---|---|",
    ]
    for mode, row in figures.items():
        lines.append(
            f"| {mode} | {row['tok_s']:.1f} | {row['tokens_a_step']:.2f} | "
            f"{row['draft_share']:.0%} | {row['ratio']:.2f} "
            f"({row['ratio_low']:.2f} to {row['ratio_high']:.2f}) | {row['num_batches']} |"
        )
    return "\n".join(lines)
