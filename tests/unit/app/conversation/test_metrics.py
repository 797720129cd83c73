"""Metrics: what they say, that their number is bounded, and what is built on their names."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

from app.config import load_settings
from app.errors import ConfigError, ServiceError, UnavailableError
from app.observe.metrics import ERROR_CODES, Metrics
from app.observe.trace import FACTS, OUTCOMES, TurnTrace
from app.server.lifecycle import create_app, listening
from llm_core import EngineDiedError, LlmError, Speculation
from tests.support.fake_turns import a_turn
from tests.support.fakes import ScriptedEngine, fake_services
from tests.support.paths import ROOT
from tests.support.server_env import download_dir

OPERATIONS = ROOT / "docs" / "operations"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples_of(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse_text(text)
        for sample in family.samples
    }


def samples(metrics: Metrics) -> Samples:
    return samples_of(metrics.exposition("text/plain")[0].decode())


def value(found: Samples, name: str, **labels: str) -> float:
    return found[name, tuple(sorted(labels.items()))]


def test_every_error_that_can_end_a_turn_has_a_label() -> None:
    def codes(kind: type[Any]) -> set[str]:
        return {kind.code}.union(*(codes(sub) for sub in kind.__subclasses__()))

    turns_end_with = codes(LlmError) | codes(ServiceError) - {UnavailableError.code}
    assert {code for code in turns_end_with if code not in ERROR_CODES} == set()


def test_a_turn_is_counted_in_every_metric_it_belongs_to() -> None:
    metrics = Metrics()
    metrics.observe(
        a_turn(
            budget={
                "misses_ms": {"asr": 5.0, "total": 9.0},
                "actions": [{"policy": "filler", "saved_ms": 5.0}],
            }
        )
    )
    found = samples(metrics)
    for name, labels, expected in (
        ("parley_turns_total", {"outcome": "answered", "origin": "spoken"}, 1),
        ("parley_turns_total", {"outcome": "failed", "origin": "spoken"}, 0),
        ("parley_voice_to_voice_seconds_sum", {}, 0.6),
        ("parley_voice_to_voice_seconds_bucket", {"le": "0.5"}, 0),
        ("parley_voice_to_voice_seconds_bucket", {"le": "0.6"}, 1),
        ("parley_stage_seconds_sum", {"stage": "asr"}, 0.095),
        ("parley_stage_seconds_count", {"stage": "send"}, 1),
        ("parley_llm_time_to_first_token_seconds_sum", {}, 0.0395),
        ("parley_llm_time_per_output_token_seconds_sum", {}, 0.008),
        ("parley_llm_queue_wait_seconds_sum", {}, 0.001),
        ("parley_asr_seconds_sum", {}, 0.08),
        ("parley_tts_first_clause_seconds_sum", {}, 0.06),
        ("parley_llm_generated_tokens_total", {}, 12),
        ("parley_llm_prompt_tokens_total", {"source": "cached"}, 40),
        ("parley_llm_prompt_tokens_total", {"source": "computed"}, 20),
        ("parley_wasted_tokens_total", {}, 5),
        ("parley_reply_audio_seconds_total", {}, 2),
        ("parley_budget_misses_total", {"stage": "asr"}, 1),
        ("parley_budget_misses_total", {"stage": "total"}, 1),
        ("parley_budget_misses_total", {"stage": "tts"}, 0),
        ("parley_budget_actions_total", {"policy": "filler"}, 1),
    ):
        assert value(found, name, **labels) == pytest.approx(expected), name


def test_turns_of_a_second_engine_are_counted() -> None:
    metrics = Metrics()
    metrics.observe(a_turn(facts={"engine": "canary"}))
    metrics.observe(a_turn(facts={"engine": "canary", "engine_fallback": "engine_died"}))
    metrics.observe(a_turn())
    found = samples(metrics)
    assert value(found, "parley_engine_turns_total", engine="canary", verdict="ok") == 1
    assert value(found, "parley_engine_turns_total", engine="canary", verdict="failed") == 1
    assert value(found, "parley_engine_turns_total", engine="stable", verdict="ok") == 0


def test_what_drafts_did_is_in_the_trace() -> None:
    trace = TurnTrace("turn_1", "sess_1")
    generated: dict[str, Any] = {"num_tokens": 9, "num_steps": 5, "finished_ns": 1}
    trace.note_generated(**generated, finish_reason="stop", speculation=Speculation())
    assert "drafted_tokens" not in trace.facts, "an engine without drafts says nothing of them"
    drafts = Speculation(
        num_drafted=8, num_accepted=4, accepted_by_depth=(3, 1), draft_ns=2_000_000
    )
    trace.note_generated(**generated, finish_reason="stop", speculation=drafts)
    assert (trace.facts["drafted_tokens"], trace.facts["accepted_tokens"]) == (8, 4)
    assert (trace.facts["accepted_by_depth"], trace.facts["draft_ms"]) == ([3, 1], 2.0)
    assert trace.facts.keys() <= FACTS.keys()


def test_failures_are_counted_by_code_and_strange_ones_together() -> None:
    metrics = Metrics()
    nothing = {"voice_to_voice_ms": None, "stages_ms": {}, "facts": {}}
    for outcome, reason in (
        ("failed", "engine_died"),
        ("failed", "made_up_just_now"),
        ("timed_out", "timed_out"),
        ("cancelled", "client_cancelled"),
    ):
        metrics.observe(a_turn(outcome=outcome, reason=reason, **nothing))
    found = samples(metrics)
    assert value(found, "parley_turn_errors_total", code="engine_died") == 1
    assert value(found, "parley_turn_errors_total", code="other") == 1
    assert value(found, "parley_turn_errors_total", code="timed_out") == 1
    assert value(found, "parley_voice_to_voice_seconds_count") == 0


def test_the_number_of_series_does_not_grow() -> None:
    metrics = Metrics()
    before = len(samples(metrics))
    for number in range(300):
        metrics.observe(
            a_turn(
                number,
                session_id=f"sess_{number}",
                outcome=(*OUTCOMES, f"new_{number}")[number % 8],
                reason=f"reason_{number}",
                budget={"misses_ms": {f"stage_{number}": 1.0}, "actions": []},
            )
        )
    # One more: the outcome "other", which no Parley writes.
    assert len(samples(metrics)) <= before + 2


async def test_the_endpoint_speaks_both_formats_and_knows_the_server(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<!doctype html>")
    services = fake_services(ScriptedEngine(), port=0, api_keys=("k1",), max_sessions=7)
    engine = cast(Any, services.engine)
    engine.is_alive = True
    app = create_app(services.settings, services, web_root=tmp_path)
    services.traces.add(a_turn())
    services.recognition.num_refused, services.load.num_skipped = 3, 5
    async with listening(app, services.settings) as url, httpx.AsyncClient(base_url=url) as http:
        assert (await http.get("/metrics")).status_code == 401
        http.headers["authorization"] = "Bearer k1"
        plain = await http.get("/metrics")
        assert plain.headers["content-type"].startswith("text/plain; version=")
        found = samples_of(plain.text)
        assert value(found, "parley_active_calls") == 0
        assert value(found, "parley_max_calls") == 7
        assert value(found, "parley_llm_up") == 1
        assert value(found, "parley_llm_running_requests") == 0
        assert value(found, "parley_llm_cache_lookup_tokens_total") == 20
        assert value(found, "parley_llm_cache_hit_tokens_total") == 8
        assert value(found, "parley_llm_preemptions_total") == 0
        assert value(found, "parley_asr_refused_total") == 3
        assert value(found, "parley_early_answers_skipped_total") == 5
        assert value(found, "parley_llm_kv_free_blocks") == 64
        assert value(found, "parley_turns_total", outcome="answered", origin="spoken") == 1
        assert value(found, "process_cpu_seconds_total") > 0
        open_metrics = await http.get(
            "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"}
        )
        assert "openmetrics-text" in open_metrics.headers["content-type"]
        assert any(f.name == "parley_turns" for f in parse_openmetrics(open_metrics.text))

        async def died() -> None:
            raise EngineDiedError("it is gone")

        engine.stats = died
        silent = samples_of((await http.get("/metrics")).text)
        assert value(silent, "parley_llm_running_requests") != 0  # not a number
        engine.is_alive = False
        assert value(samples_of((await http.get("/metrics")).text), "parley_llm_up") == 0


@pytest.mark.parametrize(("mode", "status"), [("key", 401), ("open", 200), ("off", 404)])
async def test_who_may_read_them(tmp_path: Path, mode: str, status: int) -> None:
    (tmp_path / "index.html").write_text("<!doctype html>")
    services = fake_services(ScriptedEngine(), port=0, api_keys=("k1",), metrics=mode)
    cast(Any, services.engine).is_alive = True
    app = create_app(services.settings, services, web_root=tmp_path)
    async with listening(app, services.settings) as url, httpx.AsyncClient(base_url=url) as http:
        assert (await http.get("/metrics")).status_code == status
        assert (await http.get("/v1/traces")).status_code == 401


def test_the_setting_is_checked() -> None:
    with pytest.raises(ConfigError, match="PARLEY_METRICS"):
        load_settings(metrics="sometimes")


# --- what is built on them ---


async def served_names(tmp_path: Path) -> set[str]:
    (tmp_path / "index.html").write_text("<!doctype html>")
    services = fake_services(ScriptedEngine(), port=0)
    cast(Any, services.engine).is_alive = True
    create_app(services.settings, services, web_root=tmp_path)
    services.metrics.observe(a_turn(budget={"misses_ms": {}, "actions": [{"policy": "filler"}]}))
    # Figures of an engine that has not been asked yet have a name and no sample.
    described = set(services.metrics.registry._names_to_collectors)
    return described | {name for name, _ in samples(services.metrics)}


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\b(?:parley|process)_[a-z0-9_]+", text))


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((OPERATIONS / "grafana-dashboard.json").read_text())
    return found


def queries() -> list[str]:
    """Of the dashboard, with Grafana's variable filled in."""
    targets = (t for panel in dashboard()["panels"] for t in panel.get("targets", ()))
    return [target["expr"].replace("$__rate_interval", "5m") for target in targets]


async def test_the_alerts_and_the_dashboard_name_metrics_that_exist(tmp_path: Path) -> None:
    served = await served_names(tmp_path)
    rules = (OPERATIONS / "alerts.yml").read_text()
    in_rules, in_queries = names_in(rules), names_in("\n".join(queries()))
    assert len(in_rules) >= 8 and len(in_queries) >= 15
    assert in_rules - served == set()
    assert in_queries - served == set()
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(ids) == len(set(ids))


@pytest.fixture
def promtool() -> str:
    # tests/support/install_system.sh puts it there when it is not installed
    found = shutil.which("promtool") or shutil.which(download_dir() / "promtool")
    if found is None:
        pytest.skip("there is no promtool on this machine; tests/support/install_system.sh gets it")
    return found


def test_every_alert_fires_when_it_should_and_not_before(promtool: str) -> None:
    rules, tests = ((OPERATIONS / f"alerts{n}.yml").read_text() for n in ("", "_test"))
    fired = set(re.findall(r"alertname: (\w+)\n +exp_alerts:\n", tests))
    assert fired == set(re.findall(r"alert: (\w+)", rules))
    checked = subprocess.run(
        [promtool, "test", "rules", str(OPERATIONS / "alerts_test.yml")],
        capture_output=True,
        check=False,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_promtool_accepts_the_alerts_the_queries_and_the_exposition(
    promtool: str, tmp_path: Path
) -> None:
    recorded = [{"record": f"q{n}", "expr": query} for n, query in enumerate(queries())]
    (tmp_path / "queries.yml").write_text(  # JSON is YAML
        json.dumps({"groups": [{"name": "dashboard", "rules": recorded}]})
    )
    for rules in (OPERATIONS / "alerts.yml", tmp_path / "queries.yml"):
        checked = subprocess.run(
            [promtool, "check", "rules", str(rules)], capture_output=True, check=False
        )
        assert checked.returncode == 0, checked.stderr
    metrics = Metrics()
    metrics.observe(a_turn())
    text = metrics.exposition("text/plain")[0]
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, b"")
