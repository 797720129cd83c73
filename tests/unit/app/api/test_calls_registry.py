"""A second client on a running call: it sees everything, and may do everything."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from app.api.realtime.call_registry import CallsRegistry
from app.api.realtime.connection import RealtimeConnection
from app.conversation import events as e
from app.conversation.session import Session
from app.errors import ClientError
from tests.support.fake_realtime import FakeChannel, FakeSession
from tests.support.fakes import ScriptedEngine, fake_services


class Speaker:
    """An audio track that notes what it is given."""

    def __init__(self) -> None:
        self.played: list[bytes] = []
        self.num_cleared = 0

    async def play(self, audio: e.OutputAudio) -> None:
        self.played.append(audio.audio)

    async def clear(self) -> None:
        self.num_cleared += 1


class CallUnderTest:
    def __init__(self, session_class: type[FakeSession] = FakeSession) -> None:
        self.channel, self.speaker = FakeChannel(), Speaker()
        self._session_class = session_class
        self.sessions: list[FakeSession] = []
        self.connection = RealtimeConnection(
            self.channel,
            fake_services(ScriptedEngine(), idle_timeout_s=1.0),
            "parley",
            make_session=self._make,
            opening={"instructions": "Sing."},
            audio_out=self.speaker,
        )

    def _make(self, *args: object) -> Session:
        self.sessions.append(self._session_class(*args))  # type: ignore[arg-type]
        return cast(Session, self.sessions[-1])


@asynccontextmanager
async def call(registry: CallsRegistry) -> AsyncIterator[CallUnderTest]:
    under_test = CallUnderTest()
    with registry.entered("rtc_1", "alice", under_test.connection):
        running = asyncio.create_task(under_test.connection.run())
        await under_test.channel.until("session.created")
        yield under_test
        await under_test.channel.close(1000, "bye")
        await running


async def test_both_clients_see_and_drive_the_same_session() -> None:
    registry = CallsRegistry()
    async with call(registry) as first:
        second = FakeChannel()
        connection = registry.find("rtc_1", "alice")
        attached = asyncio.create_task(connection.attach(second))
        created = await second.until("session.created")
        assert created["session"]["instructions"] == "Sing."
        second.say("session.update", session={"instructions": "Hum."})
        for channel in (first.channel, second):
            updated = await channel.until("session.updated")
            assert updated["session"]["instructions"] == "Hum."
        # An error is for the client whose event caused it.
        await second.refused("conversation.item.delete")
        first.channel.say("conversation.item.retrieve", item_id="i")
        assert (await first.channel.next())["type"] == "conversation.item.retrieved"
        await second.close(1000, "")
        await attached
        await first.sessions[0].sink(e.InputCleared())
        await first.channel.until("input_audio_buffer.cleared")
        assert not first.sessions[0].is_closed


async def test_the_end_of_the_call_ends_the_attached_client() -> None:
    registry = CallsRegistry()
    async with call(registry):
        second = FakeChannel()
        attached = asyncio.create_task(registry.find("rtc_1", "alice").attach(second))
        await second.until("session.created")
    await attached
    assert (await second.when_closed()).code == 1000
    assert len(registry) == 0


class SlowSession(FakeSession):
    """Its last moments, and its answers, take until the test says so."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.is_closing, self.may_close = asyncio.Event(), asyncio.Event()
        self.is_asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def close(self) -> None:
        self.is_closing.set()
        await self.may_close.wait()
        await super().close()

    async def create_response(self, *args: Any) -> None:
        self._note("create_response", *args)
        self.is_asked.set()
        await self.may_answer.wait()


async def two_clients() -> tuple[
    CallUnderTest, FakeChannel, asyncio.Task[None], asyncio.Task[None]
]:
    """A call, the channel of a client that has attached to it, and what runs for either."""
    first, second = CallUnderTest(SlowSession), FakeChannel()
    running = asyncio.create_task(first.connection.run())
    await first.channel.until("session.created")
    attached = asyncio.create_task(first.connection.attach(second))
    await second.until("session.created")
    return first, second, running, attached


async def test_an_attached_client_starts_nothing_in_a_session_that_is_being_closed() -> None:
    first, second, running, attached = await two_clients()
    session = cast(SlowSession, first.sessions[0])
    await first.channel.close(1000, "bye")
    await session.is_closing.wait()
    second.say("response.create")
    await attached  # it is served no longer, and what it said is not heard
    session.may_close.set()
    await running
    assert session.calls == []


async def test_what_an_attached_client_has_begun_is_there_to_be_closed() -> None:
    first, second, running, attached = await two_clients()
    session = cast(SlowSession, first.sessions[0])
    second.say("response.create")
    await session.is_asked.wait()
    await first.channel.close(1000, "bye")
    session.may_close.set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not session.is_closing.is_set()
    session.may_answer.set()
    await running
    await attached
    assert session.is_closed


async def test_calls_of_others_and_calls_that_are_over_cannot_be_found() -> None:
    registry = CallsRegistry()
    async with call(registry) as first:
        for call_id, owner in (("rtc_1", "mallory"), ("rtc_2", "alice"), ("", "")):
            with pytest.raises(ClientError) as caught:
                registry.find(call_id, owner)
            assert caught.value.code == "call_not_found"
    with pytest.raises(ClientError) as caught:
        await first.connection.attach(FakeChannel())
    assert caught.value.code == "call_not_available"


async def test_the_number_of_attached_clients_is_bounded() -> None:
    async with call(CallsRegistry()) as first:
        channels = [FakeChannel() for _ in range(4)]
        tasks = [asyncio.create_task(first.connection.attach(c)) for c in channels]
        for channel in channels:
            await channel.until("session.created")
        with pytest.raises(ClientError) as caught:
            await first.connection.attach(FakeChannel())
        assert caught.value.code == "call_not_available"
    await asyncio.gather(*tasks)


async def test_audio_runs_over_the_track_and_nowhere_else() -> None:
    async with call(CallsRegistry()) as first:
        session = first.sessions[0]
        await session.sink(e.ResponseStarted(e.Response("r", "audio")))
        await session.sink(e.OutputAudio("r", "i", b"\1\2"))
        assert first.speaker.played == [b"\1\2"]
        assert [event["type"] for event in first.channel.sent] == [
            "session.created",
            "response.created",
        ]
        await first.channel.until("response.created")
        audio = base64.b64encode(bytes(960)).decode()
        error = await first.channel.refused("input_audio_buffer.append", audio=audio)
        assert (error["code"], error["param"]) == ("unsupported_value", "type")
        await first.connection.append_audio(b"\0\0", 7)
        assert session.calls == [("append_audio", b"\0\0", 7)]
        first.channel.say("output_audio_buffer.clear")
        first.channel.say("conversation.item.retrieve", item_id="i")
        await first.channel.until("conversation.item.retrieved")
        assert first.speaker.num_cleared == 1
    await first.connection.append_audio(b"\0\0", 8)
    assert session.calls[-1] != ("append_audio", b"\0\0", 8)
