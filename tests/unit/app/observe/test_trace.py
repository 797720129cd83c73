"""Attribution: every microsecond has one cause, and the parts add up to the whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.observe.trace import (
    FACTS,
    INSTANTS,
    OUTCOMES,
    PATH_INSTANTS,
    STAGES,
    TurnOutcome,
    TurnTrace,
    attribute_us,
)

MS = 1_000_000


def test_stages_of_a_plain_turn() -> None:
    instants = dict(zip(PATH_INSTANTS, [0, 500, 560, 561, 565, 600, 700, 780, 790], strict=True))
    assert attribute_us(instants) == {
        "endpoint": 500,
        "asr": 60,
        "queue": 5,
        "prefill": 35,
        "decode": 100,
        "tts": 80,
        "send": 10,
    }


def test_a_stage_that_was_over_in_time_cost_nothing() -> None:
    instants = dict(zip(PATH_INSTANTS, [0, 500, 320, 501, 502, 510, 600, 660, 661], strict=True))
    parts = attribute_us(instants)
    assert parts["asr"] == 0
    assert sum(parts.values()) == 661


instants = st.fixed_dictionaries(
    {"speech_end": st.integers(0, 10**9)},
    optional={name: st.integers(0, 2 * 10**9) for name in PATH_INSTANTS[1:-1]},
)


@given(instants, st.integers(0, 10**9))
def test_parts_add_up_whatever_the_order_and_whatever_is_missing(
    marks: dict[str, int], length: int
) -> None:
    marks = {**marks, "first_audio_sent": marks["speech_end"] + length}
    parts = attribute_us(marks)
    assert list(parts) == [stage for stage, _ in STAGES]
    assert sum(parts.values()) == length
    assert min(parts.values()) >= 0


@given(st.lists(st.integers(0, 10**12), min_size=9, max_size=9), st.integers(0, 10**15))
def test_reported_milliseconds_add_up(offsets: list[int], origin: int) -> None:
    trace = TurnTrace("turn_1", "sess_1", spoken=True)
    for name, offset in zip(PATH_INSTANTS, sorted(offsets), strict=True):
        trace.mark(name, origin + offset)
    turn = trace.to_dict()
    assert sum(turn["stages_ms"].values()) == pytest.approx(turn["voice_to_voice_ms"], abs=1e-6)
    assert all(ms >= 0 for ms in turn["instants_ms"].values())


def test_the_first_mark_counts_and_unknown_ones_are_refused() -> None:
    trace = TurnTrace("turn_1", "sess_1")
    trace.mark("endpoint", 5)
    trace.mark("endpoint", 9)
    assert trace.instants == {"endpoint": 5}
    with pytest.raises(KeyError):
        trace.mark("tea_break", 1)


def test_an_unanswered_turn_has_no_voice_to_voice() -> None:
    trace = TurnTrace("turn_1", "sess_1", spoken=True, outcome="failed")
    trace.mark("speech_end", 3 * MS)
    trace.mark("endpoint", 503 * MS)
    turn = trace.to_dict()
    assert turn["voice_to_voice_ms"] is None
    assert turn["stages_ms"] == {}
    assert turn["instants_ms"] == {"speech_end": 0.0, "endpoint": 500.0}


def test_a_typed_turn_counts_from_its_request() -> None:
    trace = TurnTrace("turn_1", "sess_1")
    for name in ("speech_end", "endpoint", "asr_final"):
        trace.mark(name, 10 * MS)
    trace.mark("first_audio_sent", 250 * MS)
    turn = trace.to_dict()
    assert turn["voice_to_voice_ms"] is None
    assert turn["time_to_first_audio_ms"] == 240.0


@given(
    st.sampled_from(OUTCOMES),
    st.integers(1, len(PATH_INSTANTS)),
    st.lists(st.integers(-(10**9), 10**10), min_size=9, max_size=9),
    st.integers(0, 10**10),
)
def test_no_instant_is_negative_or_missing_whatever_the_outcome(
    outcome: TurnOutcome, num_known: int, offsets: list[int], end: int
) -> None:
    """A turn that ends anywhere, with instants in any order (work is done ahead of its turn)."""
    origin = 10**10
    trace = TurnTrace("turn_1", "sess_1", spoken=True)
    trace.mark("speech_end", origin)
    for name, offset in zip(PATH_INSTANTS[1:num_known], offsets, strict=False):
        trace.mark(name, origin + offset)
    trace.end(outcome, origin + end)
    turn = trace.to_dict()
    was_stopped = outcome in ("interrupted", "withdrawn", "cancelled")
    unheard = was_stopped and num_known == 9 and offsets[7] > end
    expected = [*PATH_INSTANTS[: num_known - unheard], "ended"]
    assert list(turn["instants_ms"]) == expected
    assert min(turn["instants_ms"].values()) >= 0
    assert turn["instants_ms"]["ended"] == max(turn["instants_ms"].values())
    if "first_audio_sent" in turn["instants_ms"]:
        assert sum(turn["stages_ms"].values()) == pytest.approx(turn["voice_to_voice_ms"])
    assert not trace.end_if_open(0), "a record is closed once"
    assert trace.to_dict() == turn


def test_what_the_engine_says_becomes_facts() -> None:
    trace = TurnTrace("turn_1", "sess_1")
    trace.mark("llm_submit", 10 * MS)
    trace.note_first_token(
        received_ns=11 * MS,
        scheduled_ns=14 * MS,
        first_token_ns=40 * MS,
        prompt_tokens=60,
        cached_tokens=50,
    )
    trace.note_generated(num_tokens=11, num_steps=12, finish_reason="stop", finished_ns=140 * MS)
    trace.note_clause_spoken(30 * MS)
    trace.note_clause_spoken(50 * MS)
    assert trace.facts == {
        "queue_wait_ms": 3.0,
        "prompt_tokens": 60,
        "cached_tokens": 50,
        "computed_tokens": 10,
        "ttft_ms": 30.0,
        "completion_tokens": 11,
        "llm_steps": 12,
        "finish_reason": "stop",
        "tpot_ms": 10.0,
        "tts_first_ms": 30.0,
        "tts_clauses": 2,
        "tts_ms": 80.0,
    }
    assert set(trace.facts) <= set(FACTS)
    assert set(PATH_INSTANTS) < set(INSTANTS)
