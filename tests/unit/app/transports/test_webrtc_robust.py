"""Calls that break, networks that are bad, callers who come and go, strangers and nonsense."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from app.config import Settings
from app.transports.webrtc import call as call_module
from app.transports.webrtc.call import Gateway
from app.transports.webrtc.peer import Peer
from tests.support.busy import Stopwatch
from tests.support.fakes import ManualClock, recent
from tests.support.leaks import Memory
from tests.support.rtc_client import RtcClient, tone, until
from tests.support.rtc_server import STORY, Server, ask, loud_s, serving
from tests.unit.app.transports.test_webrtc_sdp import OFFER

# --- lost and found ---


def cut_line(client: RtcClient) -> None:
    """From now on nothing that the client sends arrives, goodbyes included."""
    link = client.connection.getSenders()[0].transport.transport

    async def nowhere(data: bytes) -> None:
        return None

    link._send = nowhere
    link._connection.send = nowhere
    for protocol in link._connection._protocols:
        protocol.send_stun = lambda *args: None


async def test_a_lost_call_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_module, "LOST_S", 0.4)
    async with (
        serving(tmp_path, STORY, resume_window_s=20.0) as server,
        server.client() as first,
        server.client() as second,
    ):
        await first.connect()
        created = await first.until("session.created")
        await ask(first)
        await first.until("output_audio_buffer.started")
        await until(lambda: loud_s(first) > 0.5)
        cut_line(first)
        audio = server.the_audio()
        await until(lambda: not audio.is_attached)
        # The answer pauses: nobody would hear it.
        waiting_ms = audio.output.waiting_ms
        await asyncio.sleep(0.5)
        assert audio.output.waiting_ms >= waiting_ms > 0
        assert server.num_sessions == 1

        await second.connect(f"?resume={first.call_id}")
        assert second.call_id == first.call_id
        again = await second.until("session.created")
        assert again["session"]["id"] == created["session"]["id"]
        await until(lambda: loud_s(second) > 0.5)
        # The conversation is the same one, and so is the prompt's beginning.
        second.send("response.cancel")
        await second.until("response.done")
        await ask(second)
        await second.until("response.created")
        await until(lambda: len(server.engine.requests) == 2)
        before, after = server.engine.requests
        assert after[: len(before)] == before
        assert [m.role for m in after[len(before) :]] == ["assistant", "user"]


async def test_a_caller_may_come_back_before_anyone_missed_him(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, server.client() as first, server.client() as second:
        await first.connect()
        await second.connect(f"?resume={first.call_id}")
        await second.until("session.created")
        await ask(second)
        await second.until("response.done")
        await until(lambda: first.channel.readyState == "closed")
        assert server.num_sessions == 1


class Talker:
    """Stands for a connection whose peer speaks, or does not."""

    is_connected = True
    last_heard_ns = 0

    async def close(self) -> None:
        """Nothing is open."""


async def test_a_server_that_was_held_up_does_not_take_it_for_the_peer_s_silence() -> None:
    clock, talker = ManualClock(), Talker()
    call = Gateway(Settings(), clock).new_call()
    call._peer = cast(Peer, talker)
    call._watching = asyncio.create_task(call._watch())
    for _ in range(20):
        talker.last_heard_ns = clock.now_ns()
        await clock.advance(0.5)
    # Ten seconds in which nothing runs: neither is anything read, nor is the peer looked after.
    clock._now_ns += 10_000_000_000
    await clock.advance(0.0)
    assert not call.is_lost
    talker.last_heard_ns = clock.now_ns()
    await clock.advance(call_module.LOST_S)
    assert not call.is_lost
    await clock.advance(1.0)
    assert call.is_lost
    await call.close()


async def at_once() -> None:
    return None


async def test_a_peer_that_answers_late_has_not_hung_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It speaks, but the checks of its consent get no answer in time."""
    monkeypatch.setattr("aioice.ice.CONSENT_INTERVAL", 0.02)
    monkeypatch.setattr("aioice.stun.RETRY_RTO", 0.02)
    async with serving(tmp_path) as server, server.client() as client:
        link = client.connection.sctp.transport.transport._connection
        monkeypatch.setattr(link, "query_consent", at_once)  # the client's own
        await client.connect()
        monkeypatch.setattr(link, "request_received", lambda *args: None)
        await asyncio.sleep(0.6)
        assert server.the_audio().is_attached
        await ask(client)
        await client.until("response.done")


async def test_nobody_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_module, "LOST_S", 0.4)
    async with serving(tmp_path, resume_window_s=0.5) as server, server.client() as client:
        await client.connect()
        cut_line(client)
        await until(lambda: server.num_sessions == 0, timeout_s=5.0)
        async with httpx.AsyncClient() as http:
            reply = await http.post(
                f"{server.url}/v1/realtime/calls?resume={client.call_id}",
                content=OFFER,
                headers={"content-type": "application/sdp"},
            )
        assert reply.status_code == 404


async def test_of_many_who_come_back_one_goes_on(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, server.client() as first:
        await first.connect()
        fds = num_fds()
        clients = [server.client() for _ in range(4)]
        results = await asyncio.gather(
            *(client.connect(f"?resume={first.call_id}") for client in clients),
            return_exceptions=True,
        )
        assert sum(result is None for result in results) >= 1
        assert server.num_sessions == 1
        for client in clients:
            await client.close()
        await until(lambda: server.num_sessions == 0)
        await until(lambda: num_fds() <= fds)


async def test_datagrams_of_strangers(tmp_path: Path) -> None:
    """Whoever knows the port may send to it: nothing, garbage, a flood."""
    async with serving(tmp_path) as server, server.client() as client:
        await client.connect()
        link = client.connection.getSenders()[0].transport.transport._connection
        [pair] = link._nominated.values()
        dice = random.Random(2)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            for length in (0, 1, 12, 200, 1_400):
                for _ in range(100):
                    stranger.sendto(dice.randbytes(length), pair.remote_addr)
        await ask(client)
        await client.until("output_audio_buffer.stopped")


# --- bad networks ---


def make_lossy(client: RtcClient, delay_of: Callable[[int], float | None]) -> None:
    """Audio packets are delayed by ``delay_of(number)`` seconds, or lost (None)."""
    link = client.connection.getSenders()[0].transport.transport
    send = link._send
    loop = asyncio.get_running_loop()
    count = 0
    late: set[asyncio.Task[None]] = set()

    def deliver(data: bytes) -> None:
        task = loop.create_task(swallow(send(data)))
        late.add(task)
        task.add_done_callback(late.discard)

    async def swallow(sending: Any) -> None:
        try:
            await sending
        except ConnectionError:
            return

    async def lossy(data: bytes) -> None:
        nonlocal count
        is_rtp = 127 < data[0] < 192 and not 192 <= data[1] <= 223
        if not is_rtp:
            await send(data)
            return
        count += 1
        delay_s = delay_of(count)
        if delay_s is not None:
            loop.call_later(delay_s, deliver, data)

    link._send = lossy


@pytest.mark.parametrize("kind", ["loss", "bursts", "jitter"])
async def test_a_bad_network_costs_neither_words_nor_time(tmp_path: Path, kind: str) -> None:
    dice = random.Random(5)

    def delay_of(number: int) -> float | None:
        if kind == "loss":
            return None if dice.random() < 0.05 else 0.0
        if kind == "bursts":
            return None if number % 60 < 4 else 0.0
        return dice.uniform(0.0, 0.1)

    async with serving(tmp_path) as server, server.client() as client:
        await client.connect()
        make_lossy(client, delay_of)
        watch = Stopwatch()
        await asyncio.sleep(0.4)  # so that there is something for the padding
        client.microphone.say(tone(2.0))
        begin = await client.until("input_audio_buffer.speech_started")
        end = await client.until("input_audio_buffer.speech_stopped")
        length_ms = end["audio_end_ms"] - begin["audio_start_ms"]
        # Not a packet's time is lost, and speech is not cut in two.
        assert length_ms - 300 == pytest.approx(2_000, abs=150 + 1000 * watch.lost_s())
        await client.until("response.done")
        trace = recent(server.services.traces.store, 1)[0]
        # 560 ms without loss; a wait of 120 ms at most on top, and nothing that lasts.
        assert trace["voice_to_voice_ms"] < 560 + 250 + 1000 * watch.lost_s()


# --- comings and goings ---


def num_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def our_threads() -> set[str]:
    """All but those of AnyIO and of the loop's own pool (aiortc's encoder in the client): they stay
    for reuse; and the decoder that aiortc's client leaves when it is closed while connecting."""
    theirs = ("AnyIO", "asyncio", "audio-decoder")
    return {t.name for t in threading.enumerate() if not t.name.startswith(theirs)}


def our_tasks() -> set[str]:
    """All but those of aiortc's peer connection and its streams, which only the client has."""
    tasks = ((task.get_name(), str(task.get_coro())) for task in asyncio.all_tasks())
    theirs = ("RTCPeerConnection", "RTCRtpSender", "RTCRtpReceiver")
    return {f"{name} {coro}" for name, coro in tasks if not any(t in coro for t in theirs)}


async def back_to(excess: Callable[[], object], what: str) -> None:
    """Waits until nothing is in excess; fails with what is."""
    try:
        await until(lambda: not excess())
    except TimeoutError:
        pytest.fail(f"{what} left: {excess()}")


async def leave_at_random(server: Server, dice: random.Random) -> None:
    client = server.client()
    stage = dice.choice(["offered", "answered", "connecting", "open", "speaking", "answering"])
    try:
        if stage in ("open", "speaking", "answering"):
            await client.connect()
            if stage == "speaking":
                client.microphone.say(tone(1.0))
                await asyncio.sleep(dice.uniform(0.0, 0.5))
            if stage == "answering":
                await ask(client)
                await asyncio.sleep(dice.uniform(0.0, 0.3))
            return
        offer = await client.offer()
        async with httpx.AsyncClient() as http:
            posting = asyncio.create_task(
                http.post(
                    f"{server.url}/v1/realtime/calls",
                    content=offer,
                    headers={"content-type": "application/sdp"},
                )
            )
            if stage == "offered":  # gone before the answer
                await asyncio.sleep(dice.uniform(0.0, 0.02))
                posting.cancel()
                await asyncio.wait([posting])
                return
            answer = await posting
        if stage == "connecting":
            await client.accept(answer.text)
            await asyncio.sleep(dice.uniform(0.0, 0.12))
    finally:
        await client.close()


async def test_fifty_callers_come_and_go_at_random(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A caller who never connects is waited for; here not so long.
    monkeypatch.setattr("app.transports.webrtc.peer.CONNECT_TIMEOUT_S", 1.0)
    monkeypatch.setattr(call_module, "LOST_S", 1.0)
    dice = random.Random(11)
    async with serving(tmp_path, STORY, max_sessions=64, resume_window_s=0.5) as server:
        # First-time imports, sockets, and what pools and caches keep.
        await asyncio.gather(*(leave_at_random(server, random.Random(n)) for n in range(4)))
        await until(lambda: server.num_sessions == 0, timeout_s=10)
        memory = Memory()
        tasks, threads, fds = our_tasks(), our_threads(), num_fds()
        for _ in range(10):
            await asyncio.gather(*(leave_at_random(server, dice) for _ in range(5)))
        await until(lambda: server.num_sessions == 0, timeout_s=15)
        assert server.engine.num_running == 0
        assert len(server.app.state.calls) == 0
        await back_to(lambda: our_tasks() - tasks, "tasks")
        await back_to(lambda: our_threads() - threads, "threads")
        gc.collect()
        # Sockets of the HTTP client may still be closing on the server's side.
        await back_to(lambda: max(0, num_fds() - fds - 2), "file descriptors")
        await memory.assert_returned(16.0)  # aiortc's clients are in it
