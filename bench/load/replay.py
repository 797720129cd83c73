"""`parley bench replay`: a real trace of arrivals against our engine, or against whole voice turns.

The same arrivals are played at growing rates until the targets are missed; the point of saturation
is the highest rate at which they were still held.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app.clients.server_process import own_server
from app.clients.talk import TalkError, open_talk
from app.clock import Clock, MonotonicClock
from app.config import Settings
from app.engine_options import engine_config
from app.errors import ParleyError
from app.models.store import ModelStore
from audio.tts.synthesizer import Synthesizer
from audio.vad import VadModel
from bench.harness import machine
from bench.harness.plot import Chart, Line, to_svg
from bench.llm.workloads import conversation
from bench.load.open_loop import OpenLoop, Saturation, Serve, Served, Step, Targets, find_saturation
from bench.load.trace import Arrival, piece, read_arrivals, scaled
from bench.voice.script import Utterance, plain_script
from llm_core import (
    EngineClient,
    FirstToken,
    GenerationDone,
    LlmError,
    SamplingParams,
)

_VOICE_TIMEOUT_S = 20.0
_SERVED_BEFORE = 4  # requests that measure how long one takes when it is alone
_MAX_CALLS = 256
# What a prompt has beside its words, in tokens of some template.
_TEMPLATE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What to play. ``rates_per_s`` empty: the point of saturation is sought.

    ``scale`` shortens prompts and answers alike (a small machine serves the trace of a large one).
    ``limit_s``: no step of the search is begun that would not be over by then.
    """

    trace: Path
    split: str = "dev"
    skip: int = 0
    num_requests: int = 20
    num_warm_up: int = 4
    scale: float = 0.1
    rates_per_s: tuple[float, ...] = ()
    num_halvings: int = 2
    limit_s: float = 240.0
    goal_share: float = 0.9
    targets: Targets = Targets()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """``kind``: llm or voice. ``saturation`` None: it was not sought."""

    kind: str
    machine: dict[str, Any]
    subject: dict[str, Any]
    options: ReplayOptions
    arrivals: list[Arrival]
    steps: list[Step]
    saturation: Saturation | None

    def to_dict(self) -> dict[str, Any]:
        """For JSON. ``goodput_by_calibration``: the best goodput by what the memory of the machine
        reads in a second, which is what decoding is bound by: for comparing machines."""
        count = len(self.arrivals)
        best = max(step.goodput_per_s for step in self.steps)
        return {
            "kind": self.kind,
            "machine": self.machine,
            "subject": self.subject,
            "trace": {
                "name": self.options.trace.name,
                "split": self.options.split,
                "skip": self.options.skip,
                "requests": count,
                "warm_up": self.options.num_warm_up,
                "scale": self.options.scale,
                "mean_context_tokens": round(sum(a.context_tokens for a in self.arrivals) / count),
                "mean_generated_tokens": round(
                    sum(a.generated_tokens for a in self.arrivals) / count
                ),
            },
            "targets_ms": {k: v for k, v in asdict(self.options.targets).items() if v is not None},
            "goal_share": self.options.goal_share,
            "steps": [step.to_dict() for step in self.steps],
            "saturation": None if self.saturation is None else asdict(self.saturation),
            "best_goodput_per_s": round(best, 3),
            "goodput_by_calibration": round(best / self.machine["read_gb_s"], 4),
        }

    def to_svg(self) -> str:
        """Goodput, and the latency that was measured, over the rate."""
        name, limit_ms = (
            ("v2v_ms", self.options.targets.v2v_ms)
            if self.kind == "voice"
            else ("ttft_ms", self.options.targets.ttft_ms)
        )
        what = "voice to voice" if self.kind == "voice" else "time to first token"
        latency = [
            Line(at, [(s.rate_per_s, getattr(s, name)[at]) for s in self.steps if _has(s, name)])
            for at in ("p50", "p95", "p99")
        ]
        subject = f"{self.subject['name']}, {self.machine['processor']}"
        return to_svg(
            [
                Chart(
                    f"Goodput: {subject}"[:96],
                    "requests offered, 1/s",
                    "within the targets, 1/s",
                    [
                        Line("goodput", [(s.rate_per_s, s.goodput_per_s) for s in self.steps]),
                        Line("offered", [(s.rate_per_s, s.rate_per_s) for s in self.steps]),
                    ],
                ),
                Chart(
                    f"Latency: {what}",
                    "requests offered, 1/s",
                    "ms",
                    latency,
                    None if limit_ms is None else (f"target {limit_ms:g} ms", limit_ms),
                ),
            ]
        )


def _has(step: Step, name: str) -> bool:
    return bool(getattr(step, name)["n"])


async def run_llm(
    options: ReplayOptions,
    settings: Settings,
    engine_options: dict[str, str],
    progress: Callable[[str], None],
) -> ReplayResult:
    """Against an engine of our own. Raises ModelLoadError, ParleyError."""
    chosen = piece(read_arrivals(options.trace, options.split), options.skip, options.num_requests)
    path = ModelStore(settings.home).resolve(settings.llm_model)
    config = engine_config(settings, path, {"standby": "false", **engine_options})
    engine = await EngineClient.start(config)
    try:
        info = engine.info
        room = min(info.context_len, config.max_context or info.context_len) - _TEMPLATE_TOKENS
        arrivals = scaled(chosen, options.scale, room)
        serve = llm_serve(engine, options, MonotonicClock())
        alone_s = await _mean_service_s(serve, arrivals)
        progress(f"one request alone takes {alone_s * 1e3:.0f} ms")
        subject = {
            "name": info.name,
            "weight_format": info.weight_format,
            "threads": info.num_threads,
            "options": engine_options,
            "alone_ms": round(alone_s * 1e3, 1),
        }
        # Bursts of the trace make what is held less than one after another.
        return await _play("llm", options, arrivals, serve, 0.5 / alone_s, subject, progress)
    finally:
        await engine.close()


async def _mean_service_s(serve: Serve, arrivals: Sequence[Arrival]) -> float:
    """How long a request takes that is alone; the first one is not counted."""
    clock = MonotonicClock()
    took_ns = []
    for number, arrival in enumerate(arrivals[: _SERVED_BEFORE + 1]):
        begun_ns = clock.now_ns()
        served = await serve(-1 - number, arrival, begun_ns)
        if served.error:
            raise ParleyError(f"the first requests failed: {served.error}")
        took_ns.append(clock.now_ns() - begun_ns)
    return sum(took_ns[1:]) / len(took_ns[1:]) / 1e9


def llm_serve(engine: EngineClient, options: ReplayOptions, clock: Clock) -> Serve:
    """Requests to an engine: prompts of their own, answers of just the trace's length."""
    num_passes: dict[int, int] = {}

    async def serve(number: int, arrival: Arrival, due_ns: int) -> Served:
        # The words differ in each pass, so that no pass finds the last one's in the cache.
        num_passes[number] = num_passes.get(number, 0) + 1
        seed = f"{options.seed} {number} {num_passes[number]}"
        messages = conversation(seed, system_len=1, user_len=arrival.context_tokens)
        params = SamplingParams(max_tokens=arrival.generated_tokens, ignore_eos=True)
        ttft_ms = options.targets.ttft_ms
        deadline_ns = None if ttft_ms is None else due_ns + int(ttft_ms * 1e6)
        first_ns = None
        try:
            events = engine.generate(messages, params, deadline_ns=deadline_ns)
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, FirstToken):
                        first_ns = clock.now_ns()
                    elif isinstance(event, GenerationDone):
                        done = event
        except LlmError as error:
            return Served(error=error.code)
        assert first_ns is not None, "a generation has a first token"
        num_tokens = done.usage.completion_tokens
        took_ms = (clock.now_ns() - first_ns) / 1e6
        return Served(
            ttft_ms=(first_ns - due_ns) / 1e6,
            tpot_ms=took_ms / (num_tokens - 1) if num_tokens > 1 else None,
            num_tokens=num_tokens,
        )

    return serve


async def run_voice(
    options: ReplayOptions, settings: Settings, progress: Callable[[str], None]
) -> ReplayResult:
    """Whole calls: each arrival is a caller who connects, asks one question and hears the answer.

    The trace gives the instants; questions are the voice benchmark's. Raises ParleyError.
    """
    arrivals = piece(
        read_arrivals(options.trace, options.split), options.skip, options.num_requests
    )
    voice = Synthesizer(ModelStore(settings.home).resolve(settings.tts_model))
    script = plain_script(voice, VadModel())
    changes = {"PARLEY_MAX_SESSIONS": str(_MAX_CALLS)}
    async with own_server(home=settings.home, settings=changes) as server:
        serve = _voice_serve(server.url, script)
        alone_s = max(said.audio.duration_s for said in script)
        subject = {"name": settings.llm_model, "threads": settings.llm_threads}
        return await _play("voice", options, arrivals, serve, 1 / alone_s, subject, progress)


def _voice_serve(url: str, script: Sequence[Utterance]) -> Serve:
    async def serve(number: int, arrival: Arrival, due_ns: int) -> Served:
        said = script[number % len(script)]
        try:
            async with open_talk(url) as client:
                result = await client.speak(said.audio, timeout_s=_VOICE_TIMEOUT_S)
        except TalkError as error:
            return Served(error=error.code)
        trace = result.turns[-1].trace or {}
        facts = trace.get("facts") or {}
        return Served(
            ttft_ms=facts.get("ttft_ms"),
            tpot_ms=facts.get("tpot_ms"),
            # The silence in the recording: what the server says of itself is not asked.
            v2v_ms=result.gaps_ms[-1],
            num_tokens=facts.get("completion_tokens") or 0,
        )

    return serve


async def _play(
    kind: str,
    options: ReplayOptions,
    arrivals: list[Arrival],
    serve: Serve,
    start_per_s: float,
    subject: dict[str, Any],
    progress: Callable[[str], None],
) -> ReplayResult:
    facts = await asyncio.to_thread(machine.describe, subject["threads"])
    clock = MonotonicClock()
    loop = OpenLoop(arrivals, serve, options.targets, clock, num_warm_up=options.num_warm_up)
    end_ns = clock.now_ns() + int(options.limit_s * 1e9)
    behind_s = 0.0  # how long the requests of a step went on when all had come, at most so far

    def fits(rate_per_s: float) -> bool:
        takes_s = len(arrivals) / rate_per_s + behind_s
        return clock.now_ns() + int(takes_s * 1e9) <= end_ns

    def tell(step: Step) -> None:
        nonlocal behind_s
        behind_s = max(behind_s, step.took_s - len(arrivals) / step.rate_per_s)
        wait = step.v2v_ms if kind == "voice" else step.ttft_ms
        progress(
            f"{step.rate_per_s:.2f}/s: {step.good_share:.0%} within the targets, "
            f"p50 {wait.get('p50', 0):.0f} ms, p95 {wait.get('p95', 0):.0f} ms"
        )

    saturation = None
    if options.rates_per_s:
        steps = []
        for rate in sorted(options.rates_per_s):
            steps.append(await loop.step(rate))
            tell(steps[-1])
    else:
        saturation, steps = await find_saturation(
            loop.step,
            start_per_s=start_per_s,
            goal_share=options.goal_share,
            num_halvings=options.num_halvings,
            fits=fits,
            on_step=tell,
        )
    return ReplayResult(kind, facts.as_dict(), subject, options, arrivals, steps, saturation)
