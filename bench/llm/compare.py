"""`parley bench llm`: our engine, with and without drafts, and a peer in one interleaved run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from app.errors import ParleyError
from app.extras import how_to_install
from bench.harness import machine
from bench.harness.rounds import Figures, Rounds, run_rounds
from bench.llm.engines import MeasuredEngine, ParleyEngine
from bench.llm.workloads import all_workloads, decode, streams
from llm_core import EngineConfig

_MAX_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class LlmBenchOptions:
    """Options of one run.

    ``peer`` adds llama.cpp, which needs the extra `bench`. ``speculation`` (as in ``EngineConfig``)
    adds our engine with drafts. ``is_streams_only`` runs one stream and many and no other workload:
    for slow peers and many streams.
    """

    model_path: Path
    num_threads: int = 2
    num_rounds: int = 5
    stream_counts: tuple[int, ...] = (8, 32)
    peer: bool = False
    speculation: str | None = None
    is_streams_only: bool = False


@dataclass(slots=True)
class LlmBenchResult:
    """Figures of all engines: ours with drafts first, the peer last."""

    machine: dict[str, Any]
    options: LlmBenchOptions
    model: dict[str, Any]
    rounds: Rounds = field(default_factory=Rounds)

    def as_dict(self) -> dict[str, Any]:
        """The medians and ratios, for JSON."""
        engines = self.rounds.sides
        result = {
            "machine": self.machine,
            "model": self.model,
            "threads": self.options.num_threads,
            "rounds": self.options.num_rounds,
            "engines": {name: self.rounds.medians(name) for name in engines},
        }
        if len(engines) > 1:
            result["ratios"] = self.rounds.ratios(engines[0], engines[-1])
        if len(engines) > 2:
            result["ratios_to_plain"] = self.rounds.ratios(engines[0], engines[1])
        return result


async def run(options: LlmBenchOptions, progress: Callable[[str], None]) -> LlmBenchResult:
    """Raises ModelLoadError, and ParleyError when the peer cannot be started."""
    num_streams = max((4, *options.stream_counts)) + 1  # the long prompt comes on top
    config = EngineConfig(
        model_path=str(options.model_path),
        num_threads=options.num_threads,
        max_sequences=num_streams,
        max_context=_MAX_CONTEXT,
    )
    workloads = all_workloads(options.stream_counts)
    if options.is_streams_only:
        workloads = [decode, *map(streams, options.stream_counts)]

    def on_round(label: str, figures: dict[str, Figures]) -> None:
        speeds = ", ".join(f"{n} {f['decode_tok_s']:.0f} tok/s" for n, f in figures.items())
        progress(f"{label}: {speeds}")

    async with AsyncExitStack() as stack:
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
        return LlmBenchResult(
            machine=machine.describe(options.num_threads).as_dict(),
            options=options,
            model={"name": info.name, "weight_format": info.weight_format},
            rounds=await run_rounds(engines, workloads, options.num_rounds, on_round=on_round),
        )


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
