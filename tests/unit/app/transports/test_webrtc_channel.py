"""What a call's channel and audio hold, and what they do when it becomes too much."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import numpy as np
import pytest
from pyee.asyncio import AsyncIOEventEmitter

from app.transports.base import ChannelClosed
from app.transports.webrtc.channel import (
    MAX_QUEUED_BYTES,
    MAX_RECEIVED_BYTES,
    MESSAGE_BYTES,
    CallAudio,
    CallChannel,
)
from app.transports.webrtc.ice import MAX_QUEUED_DATAGRAMS, IceConnection
from tests.support.fakes import ManualClock


class Line(AsyncIOEventEmitter):
    """A data channel whose peer does not read."""

    readyState = "open"

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[str] = []
        self.bufferedAmount = 0

    def send(self, text: str) -> None:
        self.sent.append(text)
        self.bufferedAmount += len(text)


def attach(channel: CallChannel) -> Line:
    line = Line()
    channel.attach(cast(Any, line))
    return line


async def test_events_wait_for_the_line() -> None:
    channel = CallChannel()
    await channel.send("one")
    await channel.send("two")
    line = attach(channel)
    await channel.send("three")
    assert line.sent == ["one", "two", "three"]
    line.emit("message", "hello")
    assert await channel.receive() == "hello"


async def test_a_second_line_begins_with_a_greeting_and_what_has_waited() -> None:
    channel = CallChannel()
    channel.greet = lambda: "greeting"
    first = attach(channel)
    channel.detach()
    await channel.send("meanwhile")
    second = attach(channel)
    assert (first.sent, second.sent) == ([], ["greeting", "meanwhile"])
    first.emit("message", "from the grave")
    second.emit("message", "alive")
    assert await channel.receive() == "alive"


async def test_a_client_without_a_channel_gets_no_events() -> None:
    channel = CallChannel()
    channel.expect(False)
    for _ in range(100):
        await channel.send("x" * 100_000)  # does not pile up


@pytest.mark.parametrize("has_line", [True, False])
async def test_a_client_that_does_not_read_is_let_go(has_line: bool) -> None:
    channel = CallChannel()
    if has_line:
        attach(channel)
    with pytest.raises(ChannelClosed) as caught:
        for _ in range(MAX_QUEUED_BYTES // 100_000 + 1):
            await channel.send("x" * 100_000)
    assert caught.value.code == 1013
    with pytest.raises(ChannelClosed):
        await channel.receive()


async def test_a_client_that_sends_too_much_is_let_go() -> None:
    channel = CallChannel()
    line = attach(channel)
    for _ in range(MAX_RECEIVED_BYTES // 100_000 + 1):
        line.emit("message", "x" * 100_000)
    with pytest.raises(ChannelClosed) as caught:
        await channel.receive()
    assert caught.value.code == 1013


async def test_messages_without_a_word_are_not_free() -> None:
    channel = CallChannel()
    line = attach(channel)
    for _ in range(MAX_RECEIVED_BYTES // MESSAGE_BYTES + 1):
        line.emit("message", "")
    with pytest.raises(ChannelClosed) as caught:
        await channel.receive()
    assert caught.value.code == 1013
    assert not channel._incoming


async def test_a_message_that_was_taken_makes_room_for_another() -> None:
    channel = CallChannel()
    line = attach(channel)
    for _ in range(3 * MAX_RECEIVED_BYTES // 1_000_000):
        line.emit("message", "x" * 1_000_000)
        assert len(await channel.receive()) == 1_000_000


async def test_closing_wakes_whoever_waits_and_happens_once() -> None:
    channel, audio = CallChannel(), CallAudio()
    ends: list[None] = []
    channel.on_close = lambda: ends.append(audio.close())
    waiting = [
        asyncio.create_task(cast(Any, wait))
        for wait in (
            channel.receive(),
            audio.receive(),
            audio.playback_changed(),
            audio.play("resp_1", "item_1", bytes(2)),
        )
    ]
    await asyncio.sleep(0)
    await channel.close(1000, "over")
    await channel.close(1001, "again")
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results[:3]] == [ChannelClosed] * 3
    assert results[3] is None
    assert len(ends) == 1
    assert channel.closed is not None
    assert channel.closed.code == 1000


async def test_audio_that_nobody_takes_is_dropped_from_the_front() -> None:
    audio = CallAudio()
    for n in range(150):
        audio.heard(np.full(960, n / 1_000, np.float32), n)
    assert audio.num_dropped == 50
    chunk = await audio.receive()
    # Five packets at once, the oldest that is left first.
    assert len(chunk.payload) == 5 * 960 * 2
    assert np.frombuffer(chunk.payload, "<i2")[0] == pytest.approx(50 / 1_000 * 32_768, abs=1)
    assert chunk.received_ns == 54


async def test_output_waits_without_a_line_and_for_a_full_queue() -> None:
    audio = CallAudio()
    second = bytes(48_000)
    playing = asyncio.create_task(audio.play("resp_1", "item_1", second))
    await asyncio.sleep(0.01)
    assert audio.output.waiting_ms == 0
    audio.attach()
    await playing
    for _ in range(3):
        await audio.play("resp_1", "item_1", second)
    playing = asyncio.create_task(audio.play("resp_1", "item_1", second))
    await asyncio.sleep(0.01)
    assert not playing.done()
    for _ in range(60):
        audio.next_frame()
    await playing


async def test_datagrams_are_bounded_and_never_empty() -> None:
    connection = IceConnection(ManualClock())
    connection.data_received(b"", 1)
    assert connection._queue.empty()
    for _ in range(2 * MAX_QUEUED_DATAGRAMS):
        connection.data_received(b"\x80", 1)
    assert connection._queue.qsize() == MAX_QUEUED_DATAGRAMS
    await connection.close()
