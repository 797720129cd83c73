"""Prometheus metrics: what happened as counters and histograms, what is now as gauges.

Every label has a fixed set of values, so the number of series does not grow with callers, turns or
errors. Times are seconds, as Prometheus wants them. docs/operations has alert rules and a
dashboard made of these names; a test keeps them in step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from app.observe.canary_statistics import LANES, VERDICTS, lane_of, verdict_of
from app.observe.store import Turn
from app.observe.trace import OUTCOMES, STAGE_NAMES

# Errors that have a label of their own; what else may come, or a newer engine may say, is "other".
ERROR_CODES = frozenset(
    {
        "context_length_exceeded",
        "engine_busy",
        "engine_died",
        "internal_error",
        "generation_failed",
        "invalid_request",
        "llm_error",
        "model_load_error",
        "recognizer_busy",
        "request_timeout",
        "server_error",
        "synthesis_failed",
        "timed_out",
        "transcription_failed",
    }
)
OTHER = "other"

_TURN_BUCKETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.25, 1.5, 2, 3, 5, 10)
_STAGE_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5)


class _KeptElsewhere(Collector):
    def __init__(self, name: str, about: str, value: Callable[[], float]) -> None:
        self._name, self._about, self._value = name, about, value

    def describe(self) -> list[Metric]:
        return [CounterMetricFamily(self._name, self._about)]

    def collect(self) -> Iterator[Metric]:
        value = self._value()
        if not math.isnan(value):
            yield CounterMetricFamily(self._name, self._about, value=value)


class Metrics:
    """The metrics of one server. ``observe`` takes finished turns, from any one thread."""

    def __init__(self) -> None:
        # Else every series has a second one, with the instant of its creation.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._turns = self._counter("turns", "Turns by how they ended.", "outcome", "origin")
        self._errors = self._counter("turn_errors", "Turns that failed, by error code.", "code")
        self._voice_to_voice = self._histogram(
            "voice_to_voice_seconds",
            "From the caller's last voiced sample to the first audible sample of the answer.",
            _TURN_BUCKETS,
        )
        self._stages = self._histogram(
            "stage_seconds",
            "What each stage added to the voice-to-voice time.",
            _STAGE_BUCKETS,
            "stage",
        )
        self._ttft = self._histogram(
            "llm_time_to_first_token_seconds",
            "From the submission of a request to its first token.",
            _STAGE_BUCKETS,
        )
        self._tpot = self._histogram(
            "llm_time_per_output_token_seconds", "Per token after the first.", _TOKEN_BUCKETS
        )
        self._engine_wait = self._histogram(
            "llm_queue_wait_seconds", "In the engine, before its first work.", _STAGE_BUCKETS
        )
        self._asr = self._histogram(
            "asr_seconds", "The recogniser's work on a turn.", _STAGE_BUCKETS
        )
        self._tts_first = self._histogram(
            "tts_first_clause_seconds", "The voice's work on the first clause.", _STAGE_BUCKETS
        )
        self._generated = self._counter("llm_generated_tokens", "Tokens generated for answers.")
        self._prompt = self._counter(
            "llm_prompt_tokens", "Tokens of prompts, by where their KV came from.", "source"
        )
        self._wasted = self._counter("wasted_tokens", "Tokens of early answers nobody heard.")
        self._wasted_answers = self._counter("wasted_answers", "Early answers nobody heard.")
        self._reply_audio = self._counter("reply_audio_seconds", "Speech sent to callers.")
        self._gaps = self._counter("playout_gap_seconds", "Silence inside answers, audio was late.")
        self._misses = self._counter("budget_misses", "Turns over budget.", "stage")
        self._actions = self._counter("budget_actions", "What was done about it.", "policy")
        self._engine_turns = self._counter(
            "engine_turns", "Turns of a roll-out, by engine and how it did.", "engine", "verdict"
        )
        # All series exist from the start: a rate over a series that appears is wrong at first.
        for outcome in OUTCOMES:
            for origin in ("spoken", "typed"):
                self._turns.labels(outcome, origin)
        for stage in STAGE_NAMES:
            self._stages.labels(stage)
        for stage in (*STAGE_NAMES, "total"):
            self._misses.labels(stage)
        for code in (*ERROR_CODES, OTHER):
            self._errors.labels(code)
        for lane in LANES:
            for verdict in VERDICTS:
                self._engine_turns.labels(lane, verdict)
        for source in ("cached", "computed"):
            self._prompt.labels(source)

    def gauge(self, name: str, about: str, value: Callable[[], float]) -> None:
        """A figure that is asked for at each scrape; ``name`` without the prefix."""
        Gauge(f"parley_{name}", about, registry=self.registry).set_function(value)

    def counter(self, name: str, about: str, value: Callable[[], float]) -> None:
        """A sum that somebody else keeps, asked for at each scrape; missing while not a number."""
        self.registry.register(_KeptElsewhere(f"parley_{name}", about, value))

    def observe(self, turn: Turn) -> None:
        """Count a finished turn (``TurnTrace.to_dict``)."""
        outcome = turn["outcome"] if turn["outcome"] in OUTCOMES else OTHER
        self._turns.labels(outcome, "spoken" if turn["spoken"] else "typed").inc()
        if outcome in ("failed", "timed_out"):
            code = turn["reason"]
            self._errors.labels(code if code in ERROR_CODES else OTHER).inc()
        if turn["voice_to_voice_ms"] is not None:
            self._voice_to_voice.observe(turn["voice_to_voice_ms"] / 1000)
            for stage in STAGE_NAMES:
                self._stages.labels(stage).observe(turn["stages_ms"][stage] / 1000)
        self._observe_facts(turn["facts"])
        lane, verdict = lane_of(turn), verdict_of(turn)
        if lane is not None and verdict is not None:
            self._engine_turns.labels(lane, verdict).inc()
        budget = turn.get("budget") or {}
        for stage in budget.get("misses_ms", ()):
            self._misses.labels(stage if stage in STAGE_NAMES else "total").inc()
        for action in budget.get("actions", ()):
            self._actions.labels(action["policy"]).inc()

    def _observe_facts(self, facts: dict[str, Any]) -> None:
        for name, histogram in (
            ("ttft_ms", self._ttft),
            ("tpot_ms", self._tpot),
            ("queue_wait_ms", self._engine_wait),
            ("asr_ms", self._asr),
            ("tts_first_ms", self._tts_first),
        ):
            if facts.get(name) is not None:
                histogram.observe(facts[name] / 1000)
        for name, counter, unit in (
            ("completion_tokens", self._generated, 1.0),
            ("cached_tokens", self._prompt.labels("cached"), 1.0),
            ("computed_tokens", self._prompt.labels("computed"), 1.0),
            ("wasted_tokens", self._wasted, 1.0),
            ("wasted_answers", self._wasted_answers, 1.0),
            ("reply_audio_s", self._reply_audio, 1.0),
            ("playout_gap_ms", self._gaps, 0.001),
        ):
            if facts.get(name):
                counter.inc(facts[name] * unit)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """All metrics in the text format that ``accept`` asks for, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"parley_{name}", about, labels, registry=self.registry)

    def _histogram(
        self, name: str, about: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(f"parley_{name}", about, labels, buckets=buckets, registry=self.registry)
