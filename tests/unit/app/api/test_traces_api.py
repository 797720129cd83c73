"""``/v1/traces`` over HTTP: shapes, filters, errors, and what clients report."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.observe import query
from app.server.lifecycle import create_app, listening
from tests.support.fake_turns import a_turn
from tests.support.fakes import ScriptedEngine, fake_services


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server with 25 turns, the last of them slow."""
    (tmp_path / "index.html").write_text("<!doctype html>")
    services = fake_services(ScriptedEngine(), port=0)
    for number in range(24):
        services.traces.add(a_turn(number))
    services.traces.add(a_turn(24, voice_to_voice_ms=900.0, outcome="interrupted"))
    app = create_app(services.settings, services, web_root=tmp_path)
    async with listening(app, services.settings) as url, httpx.AsyncClient(base_url=url) as client:
        yield client


async def test_a_list_keeps_its_old_shape_and_has_a_cursor(http: httpx.AsyncClient) -> None:
    seen: list[dict[str, Any]] = []
    cursor = ""
    while True:
        body = (await http.get(f"/v1/traces?limit=10{cursor}")).json()
        assert body["object"] == "list"
        seen += body["data"]
        if not body["has_more"]:
            break
        cursor = f"&cursor={body['next_cursor']}"
    assert [turn["turn_id"] for turn in seen] == [f"turn_{n}" for n in range(24, -1, -1)]
    assert seen[-1] == a_turn(0)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("conversation=sess_1", 10),
        ("outcome=interrupted", 1),
        ("outcome=interrupted,failed", 1),
        ("min_voice_to_voice_ms=700", 1),
        ("since=1796000020", 5),
        ("since=2026-11-30T00:53:40Z", 5),
        ("until=2026-11-30T00:53:30", 10),
        ("since=1796000005&until=1796000007", 2),
        ("over_budget=true", 0),
        ("conversation=sess_9", 0),
    ],
)
async def test_filters(http: httpx.AsyncClient, query: str, expected: int) -> None:
    response = await http.get(f"/v1/traces?{query}")
    assert response.status_code == 200, response.text
    assert len(response.json()["data"]) == expected


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("?limit=0", "limit"),
        ("?limit=1001", "limit"),
        ("?cursor=x", "cursor"),
        ("?cursor=-1", "cursor"),
        (f"?cursor={2**70}", "cursor"),
        ("?outcome=happy", "outcome"),
        ("?engine=new", "engine"),
        ("?since=yesterday", "since"),
        ("?since=nan", "since"),
        ("?until=1e99", "until"),
        ("?min_voice_to_voice_ms=-1", "min_voice_to_voice_ms"),
        ("?min_voice_to_voice_ms=nan", "min_voice_to_voice_ms"),
        (f"?conversation={'x' * 101}", "conversation"),
        ("/stats?bucket_s=0", "bucket_s"),
        ("/stats?compare_since=soon", "compare_since"),
        ("?since=1h&until=2h", "until"),
        ("?min_ms=500", "min_ms"),
        ("?bucket_s=60", "bucket_s"),
        ("/stats?limit=3", "limit"),
        ("/conversations?cursor=3", "cursor"),
        ("/stats?compare_since=1h&compare_until=2h", "compare_until"),
    ],
)
async def test_what_cannot_be_asked(http: httpx.AsyncClient, path: str, param: str) -> None:
    response = await http.get(f"/v1/traces{path}")
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


async def test_one_turn_conversations_and_statistics(http: httpx.AsyncClient) -> None:
    assert (await http.get("/v1/traces/turn_3")).json() == a_turn(3)
    missing = await http.get("/v1/traces/turn_99")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "trace_not_found"
    conversations = (await http.get("/v1/traces/conversations?limit=2")).json()["data"]
    assert [(c["session_id"], c["turns"]) for c in conversations] == [("sess_2", 5), ("sess_1", 10)]
    stats = (await http.get("/v1/traces/stats?since=1796000010&compare_until=1796000010")).json()
    assert stats["summary"]["turns"] == 15 and stats["compared_with"]["turns"] == 10
    assert stats["summary"]["voice_to_voice_ms"]["max"] == 900.0
    assert stats["slowest"][0]["turn_id"] == "turn_24"
    assert sum(bucket["turns"] for bucket in stats["buckets"]) == 15


async def test_statistics_have_few_buckets(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query, "MAX_CHOSEN_BUCKETS", 24)
    refused = await http.get("/v1/traces/stats?bucket_s=1")  # there is a turn each second
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "bucket_s")
    assert "1 s make 25 buckets" in error["message"] and "at most 24" in error["message"]
    for asked in ("bucket_s=2", "bucket_s=1&since=1796000001", ""):
        answer = await http.get(f"/v1/traces/stats?{asked}")
        assert answer.status_code == 200
        assert sum(bucket["turns"] for bucket in answer.json()["buckets"]) >= 24


async def test_a_client_reports_what_was_heard(http: httpx.AsyncClient) -> None:
    report = {"first_audio_delay_ms": 85.5, "gap_ms": 0, "num_gaps": 0, "played_ms": 2000}
    answer = await http.post("/v1/traces/turn_3/playout", json=report)
    assert answer.json() == {"object": "trace.playout", "turn_id": "turn_3"}
    turn = (await http.get("/v1/traces/turn_3")).json()
    assert turn["client"] == report
    assert turn["instants_ms"]["first_audio_played"] == 685.5
    assert (await http.post("/v1/traces/turn_99/playout", json=report)).status_code == 404
    too_long = await http.post("/v1/traces/turn_3/playout", json={"gap_ms": "x" * 10_000})
    assert too_long.status_code == 413


@pytest.mark.parametrize(
    ("report", "code", "param"),
    [
        ({"gap_ms": -1}, "integer_below_min_value", "gap_ms"),
        ({"gap_ms": 1e12}, "decimal_above_max_value", "gap_ms"),
        ({"gap_ms": "85"}, "invalid_type", "gap_ms"),
        ({"note": "x"}, "unknown_parameter", "note"),
        ({"num_gaps": 1.5}, "invalid_type", "num_gaps"),
        ([], "invalid_json", None),
    ],
)
async def test_reports_are_checked(
    http: httpx.AsyncClient, report: Any, code: str, param: str | None
) -> None:
    refused = await http.post("/v1/traces/turn_3/playout", json=report)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert "client" not in (await http.get("/v1/traces/turn_3")).json()
