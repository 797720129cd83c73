"""What is asked of the traces: filters, pages, statistics, causes."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.observe.query import (
    PERCENTILES,
    TraceFilter,
    TraceQuery,
    percentile,
    period_before,
)
from app.observe.retention import Retention
from app.observe.store import TraceStore
from app.observe.trace import OUTCOMES
from tests.support.fake_turns import a_turn

START_MS = 1_796_000_000_000


def turn_at(number: int, **changes: Any) -> dict[str, Any]:
    return a_turn(number, **changes)


def spoken(number: int, **stages_ms: float) -> dict[str, Any]:
    """A turn of the plain one's stages but for those given."""
    stages = a_turn()["stages_ms"] | stages_ms
    return a_turn(number, stages_ms=stages, voice_to_voice_ms=sum(stages.values()))


def query_of(*turns: dict[str, Any]) -> TraceQuery:
    store = TraceStore(None, Retention())
    store.write(turns)
    return TraceQuery(store)


def ids(query: TraceQuery, **fields: Any) -> list[int]:
    turns = query.page(TraceFilter(**fields), 1000).turns
    return [int(turn["turn_id"].removeprefix("turn_")) for turn in turns]


def test_filters_choose_and_combine() -> None:
    unheard: dict[str, Any] = {"voice_to_voice_ms": None, "stages_ms": {}}
    query = query_of(
        spoken(1),
        spoken(2, asr=900.0),
        a_turn(3, outcome="failed", **unheard),
        a_turn(11, outcome="timed_out", **unheard),
        spoken(12, tts=2000.0) | {"budget": {"misses_ms": {"tts": 1800.0}, "actions": []}},
    )
    assert ids(query) == [12, 11, 3, 2, 1]
    assert ids(query, session_id="sess_1") == [12, 11]
    assert ids(query, outcomes=("failed", "timed_out")) == [11, 3]
    assert ids(query, min_voice_to_voice_ms=700) == [12, 2]
    assert ids(query, since_ms=START_MS + 2000, until_ms=START_MS + 11_000) == [3, 2]
    assert ids(query, over_budget=True) == [12]
    assert ids(query, session_id="sess_0", min_voice_to_voice_ms=700) == [2]
    assert ids(query, session_id="' OR 1=1 --") == []


def test_turns_of_one_engine_are_chosen() -> None:
    turns = [turn_at(n, facts={"engine": lane}) for n, lane in enumerate(("stable", "canary"))]
    query = query_of(*turns, turn_at(2))
    assert (ids(query, engine="canary"), ids(query, engine="stable"), len(ids(query))) == (
        [1],
        [0],
        3,
    )
    assert query.stats(TraceFilter(engine="canary"))["summary"]["turns"] == 1


def test_pages_lead_through_all_turns_once_even_while_more_arrive() -> None:
    store = TraceStore(None, Retention())
    query = TraceQuery(store)
    store.write([a_turn(number) for number in range(10)])
    seen, cursor = [], None
    for _ in range(4):
        page = query.page(TraceFilter(), 3, cursor)
        seen += [turn["turn_id"] for turn in page.turns]
        cursor = page.next_cursor
        store.write([a_turn(100 + len(seen))])
    assert seen == [f"turn_{number}" for number in range(9, -1, -1)]
    assert cursor is None
    assert query.page(TraceFilter(session_id="nobody"), 3).next_cursor is None


def test_one_turn_or_none() -> None:
    query = query_of(a_turn(1))
    assert query.get("turn_1") == a_turn(1)
    assert query.get("turn_2") is None


def test_conversations_are_counted_the_latest_first() -> None:
    query = query_of(spoken(1), spoken(11), spoken(2, asr=295.0), a_turn(3, outcome="failed"))
    first, second = query.conversations(TraceFilter(), 10)
    assert first == {
        "session_id": "sess_0",
        "turns": 3,
        "first_ended_at_ms": START_MS + 1000,
        "last_ended_at_ms": START_MS + 3000,
        "mean_voice_to_voice_ms": pytest.approx((600 + 800 + 600) / 3),
        "max_voice_to_voice_ms": 800.0,
        "failed": 1,
        "over_budget": 0,
    }
    assert (second["session_id"], second["turns"]) == ("sess_1", 1)
    assert len(query.conversations(TraceFilter(), 1)) == 1


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values: list[float], percent: float) -> None:
    values.sort()
    expected = np.percentile(values, percent)
    assert percentile(values, percent) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_the_summary_is_what_the_turns_say() -> None:
    rng = random.Random(1)
    turns = [spoken(n, asr=rng.uniform(50, 500)) for n in range(200)]
    turns += [a_turn(n, outcome="failed", voice_to_voice_ms=None, stages_ms={}) for n in (300, 301)]
    summary = query_of(*turns).stats(TraceFilter())["summary"]
    waits = [t["voice_to_voice_ms"] for t in turns if t["voice_to_voice_ms"] is not None]
    asr = [t["stages_ms"]["asr"] for t in turns if t["stages_ms"]]
    assert summary["turns"] == 202
    assert summary["outcomes"] == {"answered": 200, "failed": 2}
    for percent in PERCENTILES:
        name = f"p{percent}"
        assert summary["voice_to_voice_ms"][name] == pytest.approx(np.percentile(waits, percent))
        assert summary["stages_ms"]["asr"][name] == pytest.approx(np.percentile(asr, percent))
    assert summary["stages_ms"]["tts"]["max"] == 66.0


def test_the_trend_has_every_turn_in_its_bucket() -> None:
    turns = [spoken(n) | {"ended_at_ms": START_MS + n * 1_800_000} for n in range(100)]
    stats = query_of(*turns).stats(TraceFilter())
    assert stats["bucket_s"] == 3600, "50 hours in at most 60 parts"
    assert sum(bucket["turns"] for bucket in stats["buckets"]) == 100
    starts = [bucket["start_ms"] for bucket in stats["buckets"]]
    assert starts == sorted(starts) and all(start % 3_600_000 == 0 for start in starts)
    hourly = query_of(*turns).stats(TraceFilter(), bucket_s=86_400)
    assert [bucket["turns"] for bucket in hourly["buckets"]] and len(hourly["buckets"]) <= 4


def test_the_cause_of_a_slow_turn_is_what_was_unusual_not_what_is_long() -> None:
    usual = [spoken(n) for n in range(20)]
    stats = query_of(*usual, spoken(50, tts=266.0), spoken(51, queue=902.0)).stats(TraceFilter())
    slowest = stats["slowest"]
    assert [(turn["turn_id"], turn["cause"]) for turn in slowest[:2]] == [
        ("turn_51", "queue"),
        ("turn_50", "tts"),
    ]
    assert slowest[1]["stages_ms"]["endpoint"] > slowest[1]["stages_ms"]["tts"]
    assert slowest[0]["cause_above_median_ms"] == pytest.approx(900.0)
    assert len(slowest) == 20


def test_two_periods_can_be_compared() -> None:
    before = [spoken(n, decode=84.0) for n in range(10)]
    after = [spoken(n, decode=184.0) for n in range(20, 30)]
    query = query_of(*before, *after)
    now_ms = START_MS + 30_000
    chosen = TraceFilter(since_ms=START_MS + 15_000)
    earlier = period_before(chosen, now_ms)
    assert (earlier.since_ms, earlier.until_ms) == (START_MS, START_MS + 15_000)
    stats = query.stats(chosen, compare_with=earlier)
    assert stats["summary"]["stages_ms"]["decode"]["p50"] == 184.0
    assert stats["compared_with"]["stages_ms"]["decode"]["p50"] == 84.0
    with pytest.raises(ValueError, match="without a beginning"):
        period_before(TraceFilter(), now_ms)


def test_nothing_at_all_is_not_an_error() -> None:
    stats = query_of().stats(TraceFilter())
    assert stats["summary"]["turns"] == 0 and stats["summary"]["voice_to_voice_ms"] is None
    assert stats["buckets"] == [] and stats["slowest"] == []


def test_ten_thousand_turns_are_summed_up_in_a_moment() -> None:
    rng = random.Random(2)
    query = query_of(
        *(
            spoken(n, asr=rng.uniform(50, 500)) | {"outcome": rng.choice(OUTCOMES)}
            for n in range(10_000)
        )
    )
    started_s = time.process_time()
    query.stats(TraceFilter())
    query.page(TraceFilter(), 100)
    query.conversations(TraceFilter(), 100)
    assert time.process_time() - started_s < 1.0  # about 0.15 s


def test_statistics_are_made_once_while_nothing_changes() -> None:
    store = TraceStore.in_memory(100)
    store.write([a_turn(n) for n in range(5)])
    query = TraceQuery(store)
    first = query.stats(TraceFilter())
    assert query.stats(TraceFilter()) is first
    assert query.stats(TraceFilter(over_budget=True)) is not first
    store.write([a_turn(7)])
    assert query.stats(TraceFilter())["summary"]["turns"] == 6
    for number in range(40):  # old answers are not kept for good
        query.stats(TraceFilter(min_voice_to_voice_ms=float(number)))
    assert len(query._known) == 16


def test_the_latest_conversations_are_counted_with_all_their_turns() -> None:
    store = TraceStore.in_memory(1000)
    turns = [a_turn(n) for n in range(300)]
    for number, turn in enumerate(turns):
        turn["session_id"] = f"sess_{number % 7}"
    store.write(turns)
    found = TraceQuery(store).conversations(TraceFilter(), 3)
    assert [one["session_id"] for one in found] == ["sess_5", "sess_4", "sess_3"]
    assert [one["turns"] for one in found] == [43, 43, 43]
    assert TraceQuery(store).conversations(TraceFilter(session_id="none"), 3) == []
