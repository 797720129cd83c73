"""OpenTelemetry: a span for each turn, and within it one for each model's work.

Made from the finished record, off the event loop, with the instants that were measured; so tracing
adds nothing to a turn. The LLM span follows the semantic conventions for generative AI
(https://opentelemetry.io/docs/specs/semconv/gen-ai/); what was said is never exported.

The packages are the extra ``otel`` and are loaded only when an endpoint is set.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import app
from app.config import Settings
from app.errors import ConfigError
from app.extras import how_to_install
from app.observe.store import Turn

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span, Tracer

_EXPORT_TIMEOUT_S = 5.0
# What the record knows that the conventions have no name for gets the prefix `parley.`.
_TURN_FACTS = ("wasted_tokens", "playout_gap_ms", "reply_audio_s", "loop_lag_p99_ms")
_FAILED = ("failed", "timed_out")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the spans of one turn belong: under its root, at ``origin_ns`` of wall time."""

    tracer: Tracer
    context: Context
    origin_ns: int

    def at(self, since_origin_ms: float) -> int:
        return self.origin_ns + round(since_origin_ms * 1e6)

    def start(self, name: str, start_ms: float, attributes: dict[str, Any], **kind: Any) -> Span:
        return self.tracer.start_span(
            name,
            context=self.context,
            start_time=self.at(start_ms),
            attributes=attributes,
            **kind,
        )


class TurnSpans:
    """A sink for ``TraceWriter``."""

    def __init__(self, settings: Settings, processor: SpanProcessor) -> None:
        """Spans go to ``processor``. Needs the extra ``otel``."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        resource = Resource.create(
            {"service.name": settings.otel_service_name, "service.version": app.__version__}
        )
        # We end it ourselves; by itself it would do so when the interpreter exits.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("parley", app.__version__)
        self._request: dict[str, Any] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "parley",
            "gen_ai.request.model": settings.llm_model,
            "gen_ai.request.temperature": settings.temperature,
            "gen_ai.request.top_p": settings.top_p,
            "gen_ai.request.stream": True,
        }
        self._models = {"asr": settings.asr_model, "tts": settings.tts_model}

    def __call__(self, turn: Turn) -> None:
        """Export a finished turn (``TurnTrace.to_dict``)."""
        from opentelemetry.trace import set_span_in_context

        instants: dict[str, float] = turn["instants_ms"]
        origin_ns = turn["ended_at_ms"] * 1_000_000 - round(instants["ended"] * 1e6)
        root = self._tracer.start_span(
            "turn", start_time=origin_ns, attributes=_turn_attributes(turn)
        )
        place = _Place(self._tracer, set_span_in_context(root), origin_ns)
        self._add_recognition(place, turn)
        self._add_generation(place, turn)
        self._add_synthesis(place, turn)
        for name in ("endpoint", "first_audio_sent", "first_audio_played"):
            if name in instants:
                root.add_event(name, timestamp=origin_ns + round(instants[name] * 1e6))
        if turn["outcome"] in _FAILED:
            _mark_failed(root, turn)
        root.end(origin_ns + round(instants["ended"] * 1e6))

    def close(self) -> None:
        """Export what waits; gives up after a few seconds."""
        self._provider.shutdown()

    def _add_recognition(self, place: _Place, turn: Turn) -> None:
        end_ms, took_ms = turn["instants_ms"].get("asr_final"), turn["facts"].get("asr_ms")
        if not turn["spoken"] or end_ms is None or took_ms is None:
            return
        span = place.start("transcribe", end_ms - took_ms, {"parley.model": self._models["asr"]})
        span.end(place.at(end_ms))

    def _add_generation(self, place: _Place, turn: Turn) -> None:
        from opentelemetry.trace import SpanKind

        instants, facts = turn["instants_ms"], turn["facts"]
        if "llm_submit" not in instants:
            return
        start_ms = instants["llm_submit"]
        end_ms = instants["ended"]
        if "llm_first_token" in instants and "finish_reason" in facts:
            tokens_after_first = max(0, facts.get("completion_tokens", 0) - 1)
            end_ms = instants["llm_first_token"] + facts.get("tpot_ms", 0.0) * tokens_after_first
        named = {
            "gen_ai.conversation.id": turn["session_id"],
            "gen_ai.response.id": turn["response_id"],
            "gen_ai.output.type": "speech" if "tts_first_audio" in instants else "text",
            "gen_ai.usage.input_tokens": facts.get("prompt_tokens"),
            "gen_ai.usage.output_tokens": facts.get("completion_tokens"),
            "gen_ai.usage.cache_read.input_tokens": facts.get("cached_tokens"),
            "parley.queue_wait_ms": facts.get("queue_wait_ms"),
            "parley.llm_steps": facts.get("llm_steps"),
            "parley.drafted_tokens": facts.get("drafted_tokens"),
            "parley.accepted_tokens": facts.get("accepted_tokens"),
            "parley.engine": facts.get("engine"),
            "parley.engine_fallback": facts.get("engine_fallback"),
            "gen_ai.response.model": facts.get("model"),
        }
        if "ttft_ms" in facts:
            named["gen_ai.response.time_to_first_chunk"] = facts["ttft_ms"] / 1000
        if "finish_reason" in facts:
            named["gen_ai.response.finish_reasons"] = (facts["finish_reason"],)
        span = place.start(
            f"chat {self._request['gen_ai.request.model']}",
            start_ms,
            {**self._request, **_known(named)},
            kind=SpanKind.CLIENT,
        )
        if turn["outcome"] in _FAILED and "finish_reason" not in facts:
            _mark_failed(span, turn)
        span.end(place.at(max(start_ms, end_ms)))

    def _add_synthesis(self, place: _Place, turn: Turn) -> None:
        end_ms, took_ms = (
            turn["instants_ms"].get("tts_first_audio"),
            turn["facts"].get("tts_first_ms"),
        )
        if end_ms is None or took_ms is None:
            return
        span = place.start(
            "synthesize first clause", end_ms - took_ms, {"parley.model": self._models["tts"]}
        )
        span.end(place.at(end_ms))


def otlp_spans(settings: Settings) -> TurnSpans:
    """Spans to the OTLP/HTTP collector that the settings name, in batches.

    The exporter also reads the standard variables (``OTEL_EXPORTER_OTLP_HEADERS`` and others).
    Raises ConfigError when the extra ``otel`` is not installed.
    """
    try:
        importlib.import_module("opentelemetry.sdk.trace")
        exporter = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        export = importlib.import_module("opentelemetry.sdk.trace.export")
    except ImportError as error:
        raise ConfigError(
            f"PARLEY_OTEL_ENDPOINT needs the OpenTelemetry packages ({error}); "
            f"{how_to_install('otel')}"
        ) from error
    otlp = exporter.OTLPSpanExporter(settings.otel_endpoint, timeout=_EXPORT_TIMEOUT_S)
    # Overflow rule: 2,048 spans wait at most, newer ones are dropped, and the SDK logs it.
    return TurnSpans(settings, export.BatchSpanProcessor(otlp, schedule_delay_millis=2000))


def _turn_attributes(turn: Turn) -> dict[str, Any]:
    named = {
        "gen_ai.conversation.id": turn["session_id"],
        "parley.turn.id": turn["turn_id"],
        "parley.outcome": turn["outcome"],
        "parley.spoken": turn["spoken"],
        "parley.voice_to_voice_ms": turn["voice_to_voice_ms"],
        **{f"parley.stage.{stage}_ms": ms for stage, ms in turn["stages_ms"].items()},
        **{f"parley.{name}": turn["facts"].get(name) for name in _TURN_FACTS},
    }
    if misses := (turn.get("budget") or {}).get("misses_ms"):
        named["parley.budget.misses"] = tuple(misses)
    return _known(named)


def _known(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


def _mark_failed(span: Span, turn: Turn) -> None:
    from opentelemetry.trace import StatusCode

    span.set_attribute("error.type", turn["reason"])
    span.set_status(StatusCode.ERROR, turn["reason"])
