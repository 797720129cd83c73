"""Playout by the clock: positions, pacing, gaps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.conversation.response.playout_clock import PlayoutClock

MS = 1_000_000


def test_audio_sounds_at_once_then_back_to_back() -> None:
    clock = PlayoutClock(rate=24_000, lead_ms=200)
    assert clock.sent(2_400, now_ns=0) == 0
    assert clock.sent(2_400, now_ns=10 * MS) == 100 * MS
    assert clock.played_samples(50 * MS) == 1_200
    assert clock.played_samples(500 * MS) == 4_800
    assert clock.gap_ns == 0


def test_the_lead_bounds_what_is_sent_ahead() -> None:
    clock = PlayoutClock(rate=8_000, lead_ms=200)
    clock.sent(4_000, now_ns=0)  # half a second
    assert clock.wait_s(0) == 0.3
    assert clock.wait_s(300 * MS) == 0


def test_a_late_chunk_is_a_gap() -> None:
    clock = PlayoutClock(rate=8_000, lead_ms=200)
    clock.sent(800, now_ns=0)
    assert clock.sent(800, now_ns=150 * MS) == 150 * MS
    assert clock.gap_ns == 50 * MS
    assert clock.played_samples(200 * MS) == 1_200


def test_nothing_sent_nothing_played() -> None:
    clock = PlayoutClock(rate=8_000, lead_ms=200)
    assert clock.played_samples(10**12) == 0
    assert not clock.is_playing(10**12)
    assert clock.wait_s(10**12) == 0


@given(st.lists(st.tuples(st.integers(1, 5_000), st.integers(0, 400)), max_size=30))
def test_played_never_exceeds_sent_and_never_goes_back(chunks: list[tuple[int, int]]) -> None:
    clock = PlayoutClock(rate=24_000, lead_ms=100)
    now, before = 0, 0
    for num_samples, pause_ms in chunks:
        clock.sent(num_samples, now)
        now += pause_ms * MS
        played = clock.played_samples(now)
        assert before <= played <= clock.sent_samples
        before = played
    assert clock.played_samples(now + 10**12) == clock.sent_samples
