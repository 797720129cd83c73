"""`parley bench gate`: compare a new engine with an old one, in speed and in answers.

Both engines are measured in interleaved rounds; speed is the median of the ratios of the rounds.
Answers are greedy, to short spoken requests. Where the weights differ, the perplexity of a text is
compared, by default of the answers of the old engine. With voice, whole turns are compared too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

from app.config import Settings
from app.engine_options import engine_config, setting_of
from app.errors import ConfigError, ParleyError
from app.models.store import ModelStore
from bench.harness import machine
from bench.harness.rounds import Rounds, run_rounds
from bench.llm.engines import ParleyEngine
from bench.llm.workloads import cached_prefix, decode, prefill, streams
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
_SIDES = ("old", "new")
_SPEED = ("decode_tok_s", "prefill_tok_s", "ttft_cached_ms", "streams4_tok_s")


@dataclass(frozen=True, slots=True)
class Limits:
    """By how much the new engine may be worse.

    ``min_speed``: least ratio of each speed figure. ``min_agreement``: least mean share of the
    words of an answer before the first that differs. ``max_perplexity_rise``: relative.
    ``max_wer_rise``: absolute. ``max_v2v_ratio``: of the median voice-to-voice latencies.
    """

    min_speed: float = 0.95
    min_agreement: float = 0.9
    max_perplexity_rise: float = 0.01
    max_wer_rise: float = 0.02
    max_v2v_ratio: float = 1.1


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two engines: the name of its model, and options on top of the settings."""

    model: str
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison. ``value`` is computed from both and compared with ``limit``."""

    name: str
    old: float
    new: float
    value: float
    limit: float
    passed: bool

    def reason(self) -> str:
        """The check as a sentence."""
        sign = "within" if self.passed else "beyond"
        return (
            f"{self.name}: {self.old:.4g} -> {self.new:.4g} ({self.value:.4g}, {sign} the limit "
            f"of {self.limit:g})"
        )


@dataclass(frozen=True, slots=True)
class GateResult:
    """All checks; ``models`` identifies both engines by the content of their models."""

    machine: dict[str, Any]
    models: dict[str, dict[str, Any]]
    checks: list[Check]

    @property
    def passed(self) -> bool:
        """Whether all checks passed."""
        return all(check.passed for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """The result, for JSON."""
        return {
            "passed": self.passed,
            "machine": self.machine,
            "models": self.models,
            "checks": [asdict(check) for check in self.checks],
            "reasons": [check.reason() for check in self.checks if not check.passed],
        }


def speed_checks(rounds: Rounds, limits: Limits) -> list[Check]:
    """One check for each figure of ``_SPEED``; its ratio is above 1 where ``new`` is faster."""
    old, new = rounds.medians("old"), rounds.medians("new")
    faster, slower = rounds.ratios("new", "old"), rounds.ratios("old", "new")
    checks = []
    for name in _SPEED:
        ratio = (slower if name.endswith("_ms") else faster)[name]
        limit = limits.min_speed
        checks.append(Check(f"speed, {name}", old[name], new[name], ratio, limit, ratio >= limit))
    return checks


def agreement(old: Sequence[str], new: Sequence[str]) -> float:
    """Mean over the answers: words before the first difference / words of the longer one.

    Two empty answers agree.
    """
    shares = []
    for one, other in zip(old, new, strict=True):
        words, others = one.split(), other.split()
        longest = max(len(words), len(others))
        pairs = zip(words, others, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        shares.append(same / longest if longest else 1.0)
    return fmean(shares)


def agreement_check(old: Sequence[str], new: Sequence[str], limits: Limits) -> Check:
    """Of the answers of both engines to the same requests."""
    share, least = agreement(old, new), limits.min_agreement
    return Check("agreement of answers", 1.0, share, share, least, share >= least)


def perplexity_check(old: float, new: float, limits: Limits) -> Check:
    """Of perplexities of the same text."""
    rise, most = new / old - 1, limits.max_perplexity_rise
    return Check("perplexity, relative rise", old, new, rise, most, rise <= most)


def voice_checks(old: Mapping[str, Any], new: Mapping[str, Any], limits: Limits) -> list[Check]:
    """Of the figures of `parley bench voice`. Raises ParleyError when a side answered no turn."""
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
    """Greedy answers to the requests in the script of the voice benchmark."""
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
    """Run all checks. ``voice_turns`` 0: without voice. Raises ModelLoadError, ParleyError."""
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
        progress("answers of both engines")
        said = [await answers(client) for client in clients]
        rounds = await run_rounds(
            [ParleyEngine(client, name) for client, name in zip(clients, _SIDES, strict=True)],
            [decode, prefill, cached_prefix, streams(4)],
            num_rounds,
            seed="gate",
            on_round=lambda label, figures: progress(label),
        )
    finally:
        for client in clients:
            await client.close()
    checks = [
        *speed_checks(rounds, limits),
        agreement_check(said[0], said[1], limits),
    ]
    if infos[0].content_hash == infos[1].content_hash:
        # Perplexity is measured on the weights alone; other options show in the answers.
        progress("perplexity is not compared: the weights are the same")
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
        for name, server in zip(_SIDES, servers, strict=True):
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
        for name, info, side in zip(_SIDES, infos, sides, strict=True)
    }
    return GateResult(facts.as_dict(), models, checks)


def server_settings(side: Side) -> dict[str, str]:
    """Environment of a server with this engine. Raises ConfigError for an option that is no
    setting of a server."""
    found = {"PARLEY_LLM_MODEL": side.model}
    for option, value in side.options.items():
        setting = setting_of(option)
        if setting is None:
            raise ConfigError(
                f"{option!r} is no setting of a whole server: leave --voice out, or it"
            )
        found[f"PARLEY_{setting.upper()}"] = value
    return found


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
