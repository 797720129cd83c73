"""OpenTelemetry spans: what they say, and that a real OTLP receiver can read them."""

from __future__ import annotations

import gzip
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes
from opentelemetry.trace import SpanKind, StatusCode

from app.config import load_settings
from app.errors import ConfigError
from app.observe.spans import TurnSpans, otlp_spans
from tests.support.fake_turns import a_turn

KNOWN_ATTRIBUTES = {
    value
    for module in (gen_ai_attributes, error_attributes)
    for name, value in vars(module).items()
    if name.isupper() and isinstance(value, str)
}


def exported(turn: dict[str, Any]) -> dict[str, ReadableSpan]:
    exporter = InMemorySpanExporter()
    spans = TurnSpans(load_settings(llm_model="tiny"), SimpleSpanProcessor(exporter))
    spans(turn)
    finished = exporter.get_finished_spans()
    spans.close()
    assert len({span.context.trace_id for span in finished if span.context}) == 1
    return {span.name: span for span in finished}


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def length_ms(span: ReadableSpan) -> float:
    assert span.start_time is not None and span.end_time is not None
    return (span.end_time - span.start_time) / 1e6


def test_a_turn_is_a_span_with_a_child_for_each_model() -> None:
    turn = a_turn(7)
    spans = exported(turn)
    assert set(spans) == {"turn", "transcribe", "chat tiny", "synthesize first clause"}
    root = spans["turn"]
    assert root.context is not None and root.parent is None
    assert root.resource.attributes["service.name"] == "parley"
    assert root.end_time == turn["ended_at_ms"] * 1_000_000
    assert length_ms(root) == 2600
    assert attributes(root)["parley.voice_to_voice_ms"] == 600
    assert attributes(root)["parley.stage.asr_ms"] == 95
    assert [event.name for event in root.events] == ["endpoint", "first_audio_sent"]
    for name, took_ms, end_ms in (
        ("transcribe", 80.0, 405.0),
        ("chat tiny", 39.5 + 11 * 8, 445 + 11 * 8),
        ("synthesize first clause", 60.0, 595.0),
    ):
        span = spans[name]
        assert span.parent is not None and span.parent.span_id == root.context.span_id
        assert length_ms(span) == took_ms
        assert span.end_time is not None and root.start_time is not None
        assert (span.end_time - root.start_time) / 1e6 == end_ms


def test_the_llm_span_follows_the_conventions() -> None:
    span = exported(a_turn(7))["chat tiny"]
    assert span.kind is SpanKind.CLIENT
    found = attributes(span)
    assert (
        found
        | {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "parley",
            "gen_ai.request.model": "tiny",
            "gen_ai.conversation.id": "sess_0",
            "gen_ai.response.id": "resp_7",
            "gen_ai.response.finish_reasons": ("stop",),
            "gen_ai.usage.input_tokens": 60,
            "gen_ai.usage.output_tokens": 12,
            "gen_ai.usage.cache_read.input_tokens": 40,
            "gen_ai.output.type": "speech",
            "gen_ai.response.time_to_first_chunk": 0.0395,
        }
        == found
    )
    assert {name for name in found if name.startswith("gen_ai.")} <= KNOWN_ATTRIBUTES
    assert gen_ai_attributes.GenAiOperationNameValues.CHAT.value == "chat"


def test_what_was_said_is_never_exported() -> None:
    turn = a_turn(transcript="the secret question", reply="the secret answer")
    for span in exported(turn).values():
        assert "secret" not in span.to_json()


def test_a_turn_that_failed_says_why() -> None:
    instants = {"speech_end": 0.0, "endpoint": 310.0, "asr_final": 405.0, "llm_submit": 405.5}
    turn = a_turn(
        outcome="failed",
        reason="engine_died",
        voice_to_voice_ms=None,
        stages_ms={},
        instants_ms={**instants, "ended": 500.0},
        facts={},
    )
    spans = exported(turn)
    assert set(spans) == {"turn", "chat tiny"}
    for span in spans.values():
        assert span.status.status_code is StatusCode.ERROR
        assert attributes(span)["error.type"] == "engine_died"
    assert length_ms(spans["chat tiny"]) == 94.5
    assert "error.type" in KNOWN_ATTRIBUTES


def test_a_turn_that_nobody_answered_has_no_llm_span() -> None:
    instants = {"speech_end": 0.0, "endpoint": 3.0, "asr_final": 4.0, "ended": 4.0}
    turn = a_turn(
        outcome="failed", instants_ms=instants, facts={}, stages_ms={}, voice_to_voice_ms=None
    )
    assert set(exported(turn)) == {"turn"}


@contextmanager
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """A receiver of OTLP over HTTP with binary protobuf, as its specification has it."""
    requests: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.headers["content-type"] == "application/x-protobuf"
            assert self.path == "/v1/traces"
            request = ExportTraceServiceRequest()
            request.ParseFromString(body)
            requests.append(request)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_real_receiver_gets_them() -> None:
    with collector() as (url, requests):
        spans = otlp_spans(load_settings(otel_endpoint=url, otel_service_name="parley-test"))
        for number in range(20):
            spans(a_turn(number))
        spans.close()
    received = [
        span
        for request in requests
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert len(received) == 20 * 4
    names = [attribute for r in requests for attribute in r.resource_spans[0].resource.attributes]
    assert {a.value.string_value for a in names if a.key == "service.name"} == {"parley-test"}
    roots = [span for span in received if span.name == "turn"]
    assert len({span.trace_id for span in roots}) == 20
    chats = [span for span in received if span.name.startswith("chat ")]
    in_chats = [attribute for span in chats for attribute in span.attributes]
    tokens = {a.value.int_value for a in in_chats if a.key == "gen_ai.usage.output_tokens"}
    assert tokens == {12}


def test_without_the_extra_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"--editable '\.\[otel\]'"):
        otlp_spans(load_settings(otel_endpoint="http://127.0.0.1:1/v1/traces"))
