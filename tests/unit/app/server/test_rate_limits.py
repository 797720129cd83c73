"""How fast one key may go."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest

from app.access import rate_limits
from app.access.rate_limits import RateLimitedError, RateLimits, RateState, TokenBucket
from app.api.realtime.connection import RealtimeConnection
from app.config import Settings
from app.conversation.session import Session
from tests.support.fake_realtime import FakeChannel, FakeSession
from tests.support.fakes import ScriptedEngine, fake_services


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_bucket_gives_what_it_saved_and_refills() -> None:
    bucket = TokenBucket(2.0, 3.0, 0.0)
    assert [bucket.try_take(0.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert bucket.try_take(0.5) == 0.0
    assert bucket.try_take(0.5) == 0.5
    assert [bucket.try_take(100.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]


def test_a_bucket_in_debt_says_when_it_is_paid() -> None:
    bucket = TokenBucket(10.0, 5.0, 0.0)
    assert bucket.take(5.0, 0.0) == 0.0
    assert bucket.take(10.0, 0.0) == 1.0
    assert bucket.take(1.0, 1.0) == pytest.approx(0.1)


def test_sessions_of_one_owner_do_not_count_for_another() -> None:
    clock = Clock()
    limits = RateLimits(Settings(max_sessions_per_minute=2), clock)
    limits.check_session("a")
    limits.check_session("a")
    with pytest.raises(RateLimitedError) as caught:
        limits.check_session("a")
    assert caught.value.retry_after_s == pytest.approx(30.0)
    limits.check_session("b")
    clock.now_s += 30.0
    limits.check_session("a")


async def test_what_is_left_of_a_limit_can_be_asked() -> None:
    clock = Clock()
    pace = RateLimits(Settings(max_messages_per_s=50), clock).pacer("a")
    assert pace.state() == RateState(100, 100, 0.0)
    for _ in range(25):
        await pace(100)
    assert pace.state() == RateState(100, 75, pytest.approx(0.5))
    clock.now_s += 0.25
    assert pace.state() == RateState(100, 87, pytest.approx(0.25))


async def test_messages_above_the_limit_are_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    limits = RateLimits(Settings(max_messages_per_s=50), Clock())
    pace, other = limits.pacer("a"), limits.pacer("a")
    for _ in range(50):
        await pace(100)
        await other(100)
    assert waited == []
    await pace(100)
    assert waited == [pytest.approx(1 / 50)]
    await pace(15 * 1024 * 1024)  # a long one costs as many short ones
    assert waited[-1] == pytest.approx((1 + 961) / 50)
    await limits.pacer("b")(100)
    assert len(waited) == 2


async def test_answers_that_are_longer_than_their_events_count_as_well() -> None:
    channel, clock = FakeChannel(), Clock()
    pace = RateLimits(Settings(max_messages_per_s=1000), clock).pacer("a")
    connection = RealtimeConnection(
        channel,
        fake_services(ScriptedEngine()),
        "parley",
        make_session=lambda *args: cast(Session, FakeSession(*args)),
        pace=pace,
    )
    running = asyncio.create_task(connection.run())
    await channel.until("session.created")

    async def cost(kind: str, **fields: Any) -> int:
        before = pace.state().remaining
        channel.say(kind, **fields)
        await channel.next()
        return before - pace.state().remaining

    large = [{"type": "function", "name": f"f{n}", "description": "d" * 8000} for n in range(100)]
    assert await cost("session.update", session={"tools": large}) == 1 + 49 + 49  # of 16 KiB
    assert await cost("session.update", session={}) == 1 + 49
    assert await cost("conversation.item.retrieve", item_id="i") == 1
    attached = FakeChannel()
    before = pace.state().remaining
    attaching = asyncio.create_task(connection.attach(attached))
    created = await attached.until("session.created")
    assert before - pace.state().remaining == 49
    assert len(json.dumps(created)) > 800_000
    assert await cost("session.update", session={}) == 1 + 2 * 49, "both clients hear of it"
    for closing in (attached, channel):
        await closing.close(1000, "bye")
    await asyncio.gather(running, attaching)


def test_the_number_of_owners_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(rate_limits, "MAX_OWNERS", 3)
    limits = RateLimits(Settings(max_sessions_per_minute=1))
    for owner in "abcabcd":
        try:
            limits.check_session(owner)
        except RateLimitedError:
            assert owner in "abc"
    assert len(limits) == 3


async def test_owners_who_owe_nothing_any_more_are_forgotten() -> None:
    clock = Clock()
    limits = RateLimits(Settings(max_sessions_per_minute=2, max_messages_per_s=50), clock)
    for number in range(500):  # a call every 30 s
        limits.check_session("account")
        await limits.pacer(f"phone twilio CA{number}")(100)
        clock.now_s += 30.0
    assert len(limits) <= 3
    limits.check_session("account")
    limits.check_session("account")
    limits.check_session("other")
    with pytest.raises(RateLimitedError):  # what is owed is remembered
        limits.check_session("account")
