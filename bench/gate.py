"""`parley bench gate`: may this engine replace that one? Speed against what it says.

Both engines run in this very run, interleaved, so that what else the machine does meets both. Speed
is the median of the rounds' own ratios; what is said is compared greedily on short spoken requests;
perplexity reads a text where weights differ (by default what the old engine has answered, so it
asks: does the new one mind the old one's words?); with voice, whole turns are compared too.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from app.config import Settings
from app.engine_options import engine_config, setting_of
from app.errors import ConfigError, ParleyError
from app.models.store import ModelStore
from bench.harness import machine
from bench.llm.engines import MeasuredEngine, ParleyEngine
from bench.llm.workloads import Figures, cached_prefix, decode, prefill, streams
from bench.voice import callers
from bench.voice.script import SCRIPT
from llm_core import (
    ChatMessage,
    EngineClient,
    PerplexityOptions,
    SamplingParams,
    TextDelta,
    measure_perplexity,
)

_ANSWER_LEN = 40
_WINDOW_LEN = 128
_MAX_TEXT_TOKENS = 1 << 14
_SPEED = ("decode_tok_s", "prefill_tok_s", "ttft_cached_ms", "streams4_tok_s")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the new engine may be worse by.

    ``min_speed``: of each speed figure, the ratio to the old one's. ``min_agreement``: the mean
    share of an answer's words before the first that differs. ``max_perplexity_rise``: relative.
    ``max_wer_rise``: absolute. ``max_v2v_ratio``: of the median voice to voice.
    """

    min_speed: float = 0.95
    min_agreement: float = 0.9
    max_perplexity_rise: float = 0.01
    max_wer_rise: float = 0.02
    max_v2v_ratio: float = 1.1


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two engines: its model's name and the options beside the server's settings."""

    model: str
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison. ``limit`` is for ``value``, which is what the two make together."""

    name: str
    old: float
    new: float
    value: float
    limit: float
    passed: bool

    def reason(self) -> str:
        """In words."""
        sign = "within" if self.passed else "beyond"
        return (
            f"{self.name}: {self.old:.4g} -> {self.new:.4g} ({self.value:.4g}, {sign} the limit "
            f"of {self.limit:g})"
        )


@dataclass(frozen=True, slots=True)
class GateResult:
    """``models`` are the two, by content."""

    machine: dict[str, Any]
    models: dict[str, dict[str, Any]]
    checks: list[Check]

    @property
    def passed(self) -> bool:
        """All checks did."""
        return all(check.passed for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "passed": self.passed,
            "machine": self.machine,
            "models": self.models,
            "checks": [asdict(check) for check in self.checks],
            "reasons": [check.reason() for check in self.checks if not check.passed],
        }


def speed_checks(old: Sequence[Figures], new: Sequence[Figures], limits: Limits) -> list[Check]:
    """From the rounds' figures, the n-th of both taken in the same round."""
    checks = []
    for name in _SPEED:
        ratios = [
            before[name] / after[name] if name.endswith("_ms") else after[name] / before[name]
            for before, after in zip(old, new, strict=True)
        ]
        ratio = statistics.median(ratios)
        checks.append(
            Check(
                name=f"speed, {name}",
                old=statistics.median(figures[name] for figures in old),
                new=statistics.median(figures[name] for figures in new),
                value=ratio,
                limit=limits.min_speed,
                passed=ratio >= limits.min_speed,
            )
        )
    return checks


def agreement(old: Sequence[str], new: Sequence[str]) -> float:
    """Mean share of the words of the longer of two answers that come before the first difference.

    Two empty answers agree.
    """
    shares = []
    for one, other in zip(old, new, strict=True):
        words, others = one.split(), other.split()
        longest = max(len(words), len(others))
        pairs = zip(words, others, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        shares.append(same / longest if longest else 1.0)
    return statistics.fmean(shares)


def agreement_check(old: Sequence[str], new: Sequence[str], limits: Limits) -> Check:
    """The answers of both to the same requests."""
    share, least = agreement(old, new), limits.min_agreement
    return Check("agreement of answers", 1.0, share, share, least, share >= least)


def perplexity_check(old: float, new: float, limits: Limits) -> Check:
    """Of the same text."""
    rise, most = new / old - 1, limits.max_perplexity_rise
    return Check("perplexity, relative rise", old, new, rise, most, rise <= most)


def voice_checks(old: Mapping[str, Any], new: Mapping[str, Any], limits: Limits) -> list[Check]:
    """From the figures of `parley bench voice`. Raises ParleyError when a side answered nothing."""
    if not old["v2v_ms"]["n"] or not new["v2v_ms"]["n"]:
        raise ParleyError("no turn was answered: there is nothing to compare")
    compared = (
        ("word error rate, rise", old["wer"], new["wer"], limits.max_wer_rise, False),
        (
            "voice to voice p50 ms, ratio",
            old["v2v_ms"]["p50"],
            new["v2v_ms"]["p50"],
            limits.max_v2v_ratio,
            True,
        ),
        ("turns not answered, rise", _unanswered(old), _unanswered(new), 0.0, False),
    )
    checks = []
    for name, before, after, most, is_ratio in compared:
        value = after / before if is_ratio else after - before
        checks.append(Check(name, before, after, value, most, value <= most))
    return checks


def _unanswered(figures: Mapping[str, Any]) -> int:
    return int(figures["missed_turns"] + figures["failed_replies"])


async def answers(client: EngineClient) -> list[str]:
    """Greedy answers to the requests of the voice benchmark's script."""
    params = SamplingParams(max_tokens=_ANSWER_LEN)
    found = []
    for line in SCRIPT:
        messages = [ChatMessage("user", f"{line.before} {line.text}".strip())]
        events = client.generate(messages, params)
        found.append("".join([e.text async for e in events if isinstance(e, TextDelta)]))
    return found


async def run(
    old: Side,
    new: Side,
    settings: Settings,
    limits: Limits,
    *,
    num_rounds: int = 3,
    text: str | None = None,
    voice_turns: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> GateResult:
    """Compare; ``voice_turns`` 0: without voice. Raises ModelLoadError, ParleyError."""
    store = ModelStore(settings.home)
    sides = (old, new)
    paths = [store.resolve(side.model) for side in sides]
    configs = [
        engine_config(settings, path, {"standby": "false", **side.options})
        for side, path in zip(sides, paths, strict=True)
    ]
    servers = [server_settings(side) for side in sides] if voice_turns else []
    facts = await asyncio.to_thread(machine.describe, configs[0].num_threads)
    clients: list[EngineClient] = []
    try:
        for config in configs:
            clients.append(await EngineClient.start(config))
        infos = [client.info for client in clients]
        progress("answers of both")
        said = [await answers(client) for client in clients]
        engines = [ParleyEngine(client) for client in clients]
        rounds = await _speed_rounds(engines, num_rounds, progress)
    finally:
        for client in clients:
            await client.close()
    checks = [
        *speed_checks(rounds[0], rounds[1], limits),
        agreement_check(said[0], said[1], limits),
    ]
    if infos[0].content_hash == infos[1].content_hash:
        # It is a property of the weights: how keys and values are kept shows in the answers alone.
        progress("the weights are the same, so perplexity is not compared")
    else:
        progress("perplexity")
        read = text or "\n".join(said[0])
        values = [
            await asyncio.to_thread(_perplexity, path, read, config.num_threads)
            for path, config in zip(paths, configs, strict=True)
        ]
        checks.append(perplexity_check(values[0], values[1], limits))
    if voice_turns:
        figures = []
        for name, server in zip(("old", "new"), servers, strict=True):
            progress(f"voice, the {name} engine")
            figures.append(
                await callers.run_async(
                    callers.VoiceOptions(turns=voice_turns, home=settings.home, server=server)
                )
            )
        checks += voice_checks(figures[0], figures[1], limits)
    models = {
        name: {
            "model": info.name,
            "content": info.content_hash,
            "weight_format": info.weight_format,
            "options": dict(side.options),
        }
        for name, info, side in zip(("old", "new"), infos, sides, strict=True)
    }
    return GateResult(facts.as_dict(), models, checks)


def server_settings(side: Side) -> dict[str, str]:
    """The environment of a server with this engine. Raises ConfigError for what it cannot take."""
    found = {"PARLEY_LLM_MODEL": side.model}
    for option, value in side.options.items():
        setting = setting_of(option)
        if setting is None:
            raise ConfigError(
                f"{option!r} is no setting of a whole server: leave --voice out, or it"
            )
        found[f"PARLEY_{setting.upper()}"] = value
    return found


async def _speed_rounds(
    engines: Sequence[MeasuredEngine], num_rounds: int, progress: Callable[[str], None]
) -> tuple[list[Figures], list[Figures]]:
    rounds: tuple[list[Figures], list[Figures]] = ([], [])
    for index in range(-1, num_rounds):  # the first is a warm-up, and not counted
        figures: list[Figures] = [{}, {}]
        for workload in (decode, prefill, cached_prefix, streams(4)):
            for side in (0, 1) if index % 2 else (1, 0):
                figures[side] |= await workload(engines[side], f"gate {index}")
        if index >= 0:
            for side in (0, 1):
                rounds[side].append(figures[side])
        progress("warm-up" if index < 0 else f"round {index + 1} of {num_rounds}")
    return rounds


def _perplexity(path: Path, text: str, num_threads: int) -> float:
    options = PerplexityOptions(
        model_path=path,
        text=text,
        window_len=_WINDOW_LEN,
        max_tokens=_MAX_TEXT_TOKENS,
        weight_format="auto",
        num_threads=num_threads,
    )
    return measure_perplexity(options, lambda stage, done, total: None).perplexity
