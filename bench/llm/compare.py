"""`parley bench llm`: our engine, and a peer on the same file and threads, in one interleaved run.

A round runs every workload once on each engine, in an order that alternates, so that what else the
machine does meets all of them alike. Figures are medians over rounds; a ratio is the median of the
rounds' own ratios.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from app.errors import ParleyError
from app.extras import how_to_install
from bench.harness import machine
from bench.llm.engines import MeasuredEngine, ParleyEngine
from bench.llm.workloads import Figures, all_workloads, decode, streams
from llm_core import EngineConfig

_MAX_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class LlmBenchOptions:
    """What to run. ``peer`` needs the extra `bench`; ``speculation`` (as in ``EngineConfig``) adds
    our engine with drafts, beside ours without. ``is_streams_only``: one stream and many, and
    nothing else, for slow peers and many streams."""

    model_path: Path
    num_threads: int = 2
    num_rounds: int = 5
    stream_counts: tuple[int, ...] = (8, 32)
    peer: bool = False
    speculation: str | None = None
    is_streams_only: bool = False


@dataclass(slots=True)
class LlmBenchResult:
    """``rounds[engine]`` holds one dict of figures a round."""

    machine: dict[str, Any]
    options: LlmBenchOptions
    model: dict[str, Any]
    rounds: dict[str, list[Figures]] = field(default_factory=dict)

    def medians(self, engine: str) -> Figures:
        """Each figure's median over the rounds."""
        rounds = self.rounds[engine]
        return {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}

    def ratios(self, engine: str, peer: str) -> Figures:
        """Median over rounds of ``engine``'s figure by ``peer``'s of the same round."""
        pairs = list(zip(self.rounds[engine], self.rounds[peer], strict=True))
        return {
            name: statistics.median(ours[name] / theirs[name] for ours, theirs in pairs)
            for name in pairs[0][0]
            if all(theirs[name] for _, theirs in pairs)
        }

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        engines = list(self.rounds)
        result = {
            "machine": self.machine,
            "model": self.model,
            "threads": self.options.num_threads,
            "rounds": self.options.num_rounds,
            "engines": {name: self.medians(name) for name in engines},
        }
        if len(engines) > 1:
            result["ratios"] = self.ratios(engines[0], engines[-1])
        if len(engines) > 2:
            result["ratios_to_plain"] = self.ratios(engines[0], engines[1])
        return result


async def run(options: LlmBenchOptions, progress: Callable[[str], None]) -> LlmBenchResult:
    """Raises ModelLoadError, and ParleyError when the peer cannot be started."""
    async with AsyncExitStack() as stack:
        num_streams = max((4, *options.stream_counts)) + 1  # the long prompt comes on top
        config = _engine_config(options, num_streams)
        ours = await ParleyEngine.start(config)
        stack.push_async_callback(ours.close)
        engines: list[MeasuredEngine] = [ours]
        if options.speculation is not None:
            config = msgspec.structs.replace(config, speculation=options.speculation)
            drafting = await ParleyEngine.start(config, name="parley+drafts")
            stack.push_async_callback(drafting.close)
            engines.insert(0, drafting)
        if options.peer:
            theirs = await _start_peer(options, num_streams)
            stack.push_async_callback(theirs.close)
            engines.append(theirs)
        info = ours.client.info
        result = LlmBenchResult(
            machine=machine.describe(options.num_threads).as_dict(),
            options=options,
            model={"name": info.name, "weight_format": info.weight_format},
        )
        await _run_rounds(options, engines, result, progress)
        return result


async def _start_peer(options: LlmBenchOptions, num_streams: int) -> MeasuredEngine:
    try:
        from bench.llm.peer import LlamaCppEngine  # httpx is of the extra `bench`
    except ImportError as error:
        raise ParleyError(f"{error}; {how_to_install('bench')}") from error
    return await LlamaCppEngine.start(
        options.model_path,
        num_threads=options.num_threads,
        num_streams=num_streams,
        max_context=_MAX_CONTEXT,
    )


def _engine_config(options: LlmBenchOptions, num_streams: int) -> EngineConfig:
    return EngineConfig(
        model_path=str(options.model_path),
        num_threads=options.num_threads,
        max_sequences=num_streams,
        max_context=_MAX_CONTEXT,
    )


async def _run_rounds(
    options: LlmBenchOptions,
    engines: Sequence[MeasuredEngine],
    result: LlmBenchResult,
    progress: Callable[[str], None],
) -> None:
    workloads = all_workloads(options.stream_counts)
    if options.is_streams_only:
        workloads = [decode, *map(streams, options.stream_counts)]
    for index in range(-1, options.num_rounds):  # the first is a warm-up, and not counted
        figures: dict[str, Figures] = {engine.name: {} for engine in engines}
        for workload in workloads:
            for engine in engines if index % 2 else reversed(engines):
                figures[engine.name] |= await workload(engine, f"round {index}")
        if index >= 0:
            for name, row in figures.items():
                result.rounds.setdefault(name, []).append(row)
        label = "warm-up" if index < 0 else f"round {index + 1} of {options.num_rounds}"
        speeds = ", ".join(f"{n} {f['decode_tok_s']:.0f} tok/s" for n, f in figures.items())
        progress(f"{label}: {speeds}")
