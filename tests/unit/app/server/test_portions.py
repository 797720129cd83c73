"""One connection's bytes in portions: a protocol that stands before another one. No server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import cast

import pytest

from app.server import read_throttle
from app.server.read_throttle import PORTION_BYTES, Portions
from tests.support.fakes import settle


class Inner(asyncio.Protocol):
    """Keeps what it gets, with the turn of the loop in which it came."""

    def __init__(self) -> None:
        self.turn = 0
        self.got: list[tuple[int, bytes]] = []
        self.answer = b""
        self.lost = False
        self.ended = asyncio.Event()
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)

    @property
    def data(self) -> bytes:
        return b"".join(part for _, part in self.got)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.got.append((self.turn, data))
        if self.answer:
            self.transport.write(self.answer)

    def eof_received(self) -> None:
        self.ended.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True

    async def until(self, length: int) -> None:
        await eventually(lambda: len(self.data) >= length)


async def eventually(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_true():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0)


@asynccontextmanager
async def connected(
    clock: Iterator[float] | None = None, make_inner: Callable[[], Inner] = Inner
) -> AsyncIterator[tuple[Inner, Portions, asyncio.StreamReader, asyncio.StreamWriter]]:
    made: list[Portions] = []
    inner = make_inner()

    def make() -> Portions:
        made.append(Portions(lambda: inner, *([] if clock is None else [clock.__next__])))
        return made[-1]

    async def count_turns() -> None:
        while True:
            await asyncio.sleep(0)
            inner.turn += 1

    loop = asyncio.get_running_loop()
    server = await loop.create_server(make, "127.0.0.1", 0)
    counting = asyncio.create_task(count_turns())
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        await eventually(lambda: bool(made))
        yield inner, made[0], reader, writer
    finally:
        counting.cancel()
        writer.close()
        inner.transport.abort()
        await eventually(lambda: inner.lost)
        server.close()
        await server.wait_closed()


DATA = bytes(range(256)) * 400  # 50 portions


async def test_one_portion_a_turn_and_nothing_lost() -> None:
    async with connected(iter(lambda: 0.0, None)) as (inner, _, _, writer):
        writer.write(DATA)
        await inner.until(len(DATA))
        assert inner.data == DATA
        turns = [turn for turn, _ in inner.got]
        assert max(len(part) for _, part in inner.got) <= PORTION_BYTES
        assert len(set(turns)) == len(turns)


async def test_a_costly_portion_is_followed_by_a_rest() -> None:
    # Each portion takes 10 ms by this clock; so the next one comes 30 ms later by the loop's.
    ticks = iter(number * 0.01 for number in range(10_000))
    async with connected(ticks) as (inner, _, _, writer):
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        writer.write(bytes(5 * PORTION_BYTES))
        await inner.until(5 * PORTION_BYTES)
        assert loop.time() - began_s > 4 * 0.03 - 0.01


async def test_a_portion_that_had_to_wait_for_the_cpu_was_not_costly() -> None:
    class Waits(Inner):
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            time.sleep(0.005)

    async with connected(make_inner=Waits) as (inner, outer, _, writer):
        writer.write(bytes(3 * PORTION_BYTES))
        await inner.until(PORTION_BYTES)
        assert not isinstance(outer._next, asyncio.TimerHandle)
        await inner.until(3 * PORTION_BYTES)


async def test_who_pauses_reading_gets_nothing_and_the_peer_is_held_up() -> None:
    async with connected() as (inner, outer, _, writer):
        inner.transport.pause_reading()
        writer.write(DATA)
        await settle(200)
        assert inner.got == []
        assert len(outer._waiting) <= 256 * 1024  # one read
        inner.transport.resume_reading()
        await inner.until(len(DATA))
        assert inner.data == DATA


async def test_pausing_in_the_middle_keeps_the_rest() -> None:
    class PausesOnce(Inner):
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if len(self.got) == 3:
                self.transport.pause_reading()

    async with connected(make_inner=PausesOnce) as (inner, _, _, writer):
        writer.write(DATA)
        await eventually(lambda: len(inner.got) == 3)
        await settle(200)
        assert len(inner.got) == 3
        inner.transport.resume_reading()
        await inner.until(len(DATA))
        assert inner.data == DATA


async def test_the_end_is_told_behind_the_last_byte() -> None:
    async with connected() as (inner, _, reader, writer):
        writer.write(DATA)
        writer.write_eof()
        async with asyncio.timeout(10):
            await inner.ended.wait()
            assert inner.data == DATA
            assert await reader.read() == b""  # an inner protocol that returns None ends it
        assert inner.lost


async def test_who_never_reads_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_throttle, "MAX_UNSENT_BYTES", 256 * 1024)
    async with connected() as (inner, _, reader, writer):
        inner.answer = bytes(100 * PORTION_BYTES)
        writer.write(DATA)
        await eventually(lambda: inner.transport.get_write_buffer_size() >= 256 * 1024)
        held = len(inner.data)
        await settle(200)
        assert len(inner.data) == held < len(DATA)
        total = (len(DATA) + PORTION_BYTES - 1) // PORTION_BYTES * len(inner.answer)
        async with asyncio.timeout(20):
            assert len(await reader.readexactly(total)) == total
        assert inner.data == DATA


async def test_another_protocol_takes_over_with_the_next_portion() -> None:
    second = Inner()

    class Upgrades(Inner):
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            second.connection_made(self.transport)
            self.transport.set_protocol(second)
            assert self.transport.get_protocol() is second

        @property
        def lost(self) -> bool:
            return second.lost

        @lost.setter
        def lost(self, value: bool) -> None:
            assert not value

    async with connected(make_inner=Upgrades) as (first, _, _, writer):
        writer.write(DATA)
        await second.until(len(DATA) - PORTION_BYTES)
        assert first.data + second.data == DATA
