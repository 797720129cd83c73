"""Whole calls between aiortc and us over real sockets: scripted models, real media."""

from __future__ import annotations

import asyncio
import json
import logging
import statistics
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.client import connect

from tests.support.busy import Stopwatch
from tests.support.fakes import recent
from tests.support.rtc_client import tone, until
from tests.support.rtc_server import STORY, ask, loud_s, serving


async def test_a_call_connects_within_300_ms(tmp_path: Path) -> None:
    """From making the offer to the open data channel, both ends on this machine, without STUN."""
    took_s = []
    async with serving(tmp_path) as server:
        for _ in range(5):
            async with server.client() as client:
                watch = Stopwatch()
                await client.connect()
                took_s.append(watch.took_s())
    print(f"connected after {[round(1000 * s) for s in took_s]} ms")
    assert statistics.median(took_s) < 0.3


async def test_a_spoken_question_gets_a_spoken_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "app.transports.webrtc.peer")
    async with serving(tmp_path) as server, server.client() as client:
        watch = Stopwatch()
        await client.connect()
        assert watch.took_s() < 1.0
        assert (await client.until("session.created"))["session"]["type"] == "realtime"
        client.microphone.say(tone(0.8))
        started = await client.until("output_audio_buffer.started")
        done = await client.until("response.done")
        assert done["response"]["status"] == "completed"
        assert started["response_id"] == done["response"]["id"]
        stopped = await client.until("output_audio_buffer.stopped")
        assert stopped["response_id"] == done["response"]["id"]
        # A sound of 1,000 samples a character at 24 kHz, to the sample, in real time.
        await until(lambda: loud_s(client) > 0.45)
        await asyncio.sleep(0.1)
        assert loud_s(client) == pytest.approx(len("It is sunny.") / 24, abs=0.08)
        # Audio does not travel in events as well.
        assert "response.output_audio.delta" not in client.names()
        assert "response.output_audio_transcript.delta" in client.names()
        trace = recent(server.services.traces.store, 1)[0]
        assert 100 < trace["voice_to_voice_ms"] < 900 + 1000 * watch.lost_s()
    (line,) = [record for record in caplog.records if record.message == "webrtc connection closed"]
    told = vars(line)
    assert told["damaged"] == told["resets"] == 0
    assert all(told[name] >= 0 for name in ("lost", "late", "duplicates", "skipped_frames"))


@pytest.mark.parametrize("channels", [1, 2])
async def test_the_caller_s_audio_has_its_length(tmp_path: Path, channels: int) -> None:
    async with serving(tmp_path) as server, server.client(channels=channels) as client:
        await client.connect()
        watch = Stopwatch()
        await asyncio.sleep(0.4)  # so that there is something for the padding
        client.microphone.say(tone(1.0))
        begin = await client.until("input_audio_buffer.speech_started")
        end = await client.until("input_audio_buffer.speech_stopped")
        length_ms = end["audio_end_ms"] - begin["audio_start_ms"]
        # The padding, and VAD windows.
        tolerance_ms = 130 + 1000 * watch.lost_s()
        assert length_ms - 300 == pytest.approx(1_000, abs=tolerance_ms)


async def test_speaking_over_an_answer_cuts_it(tmp_path: Path) -> None:
    async with serving(tmp_path, STORY) as server, server.client() as client:
        await client.connect()
        client.microphone.say(tone(0.6))
        await client.until("output_audio_buffer.started")
        await until(lambda: loud_s(client) > 0.9)  # it knows by now that we hear no echo
        client.microphone.say(tone(0.6))
        await client.until("input_audio_buffer.speech_started")
        cleared = await client.until("output_audio_buffer.cleared")
        before, watch = loud_s(client), Stopwatch()
        done = await client.until("response.done")
        truncated = await client.until("conversation.item.truncated")
        assert done["response"]["status"] == "cancelled"
        assert done["response"]["status_details"]["reason"] == "turn_detected"
        assert cleared["response_id"] == done["response"]["id"]
        assert truncated["item_id"] == done["response"]["output"][0]["id"]
        # Silence at once: what was on its way, and the client's own jitter buffer.
        await asyncio.sleep(0.35)
        assert loud_s(client) - before < 0.25 + watch.lost_s()
        # The position is what was sent, whatever the clock says.
        tolerance_s = 0.25 + watch.lost_s()
        assert truncated["audio_end_ms"] / 1000 == pytest.approx(loud_s(client), abs=tolerance_s)


async def test_a_hum_holds_an_answer_and_it_goes_on(tmp_path: Path) -> None:
    words = ("Tell me a story.", "Mhm.", "Mhm.", "Mhm.")
    async with serving(tmp_path, STORY, words=words) as server, server.client() as client:
        watch = Stopwatch()
        await client.connect()
        client.microphone.say(tone(0.6))
        await client.until("output_audio_buffer.started")
        await until(lambda: loud_s(client) > 0.9)  # it knows by now that we hear no echo
        client.microphone.say(tone(0.35))
        await client.until("input_audio_buffer.speech_started")
        await client.until("input_audio_buffer.speech_stopped")
        before = loud_s(client)
        await until(lambda: loud_s(client) > before + 1.0)
        assert "output_audio_buffer.cleared" not in client.names()
        assert "conversation.item.truncated" not in client.names()
        # Interrupted for good, it is cut to all that was heard, before the hum and after it.
        client.send("response.cancel")
        truncated = await client.until("conversation.item.truncated")
        await asyncio.sleep(0.3)
        tolerance_s = 0.35 + watch.lost_s()
        assert truncated["audio_end_ms"] / 1000 == pytest.approx(loud_s(client), abs=tolerance_s)


async def test_the_client_clears_the_output(tmp_path: Path) -> None:
    async with serving(tmp_path, STORY) as server, server.client() as client:
        await client.connect()
        await ask(client)
        await client.until("output_audio_buffer.started")
        client.send("output_audio_buffer.clear")
        await client.until("output_audio_buffer.cleared")
        done = await client.until("response.done")
        assert done["response"]["status_details"]["reason"] == "client_cancelled"
        client.send("output_audio_buffer.clear")  # nothing to clear is no error
        client.send("input_audio_buffer.append", audio="AAAA", event_id="evt_1")
        error = await client.until_error()
        assert error["event_id"] == "evt_1"
        assert error["code"] == "unsupported_value"
        assert "its own track" in error["message"]


async def test_a_client_that_only_listens(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, server.client(has_microphone=False) as client:
        await client.connect()
        await ask(client)
        await client.until("output_audio_buffer.stopped")
        await until(lambda: loud_s(client) > 0.4)


async def test_a_client_without_audio(tmp_path: Path) -> None:
    """Only a data channel: it types, and reads the transcripts of what nobody hears."""
    async with serving(tmp_path, STORY[:110]) as server, server.client(has_audio=False) as client:
        await client.connect()
        await ask(client)
        done = await client.until("response.done", timeout_s=30)
        assert done["response"]["status"] == "completed"
        assert "output_audio_buffer.started" not in client.names()


async def test_a_second_client_attaches(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, server.client() as client:
        await client.connect()
        address = f"{server.url.replace('http', 'ws')}/v1/realtime?call_id={client.call_id}"
        async with connect(address) as attached:
            assert json.loads(await attached.recv())["type"] == "session.created"
            await ask(client)
            kinds = []
            async for message in attached:
                kinds.append(json.loads(message)["type"])
                if kinds[-1] == "output_audio_buffer.stopped":
                    break
            assert "output_audio_buffer.started" in kinds
            assert "response.output_audio_transcript.delta" in kinds
            await client.until("output_audio_buffer.stopped")


async def test_hanging_up(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, server.client() as client:
        await client.connect()
        assert server.num_sessions == 1
        async with httpx.AsyncClient() as http:
            reply = await http.post(f"{server.url}/v1/realtime/calls/{client.call_id}/hangup")
            assert reply.status_code == 200
        await until(lambda: client.channel.readyState == "closed")
        await until(lambda: server.num_sessions == 0)


async def test_a_client_that_hangs_up_ends_the_call_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path, STORY) as server:
        for act in ("idle", "speaking", "answered"):
            client = server.client()
            await client.connect()
            if act != "idle":
                client.microphone.say(tone(1.0))
                await client.until("input_audio_buffer.speech_started")
            if act == "answered":
                await client.until("output_audio_buffer.started")
            await client.close()
            await until(lambda: server.num_sessions == 0, timeout_s=2.0)
        assert server.engine.num_running == 0


async def test_the_server_goes_away_in_a_call(tmp_path: Path) -> None:
    async with serving(tmp_path, STORY, drain_timeout_s=0.3) as server:
        client = server.client()
        await client.connect()
        await ask(client)
        await client.until("output_audio_buffer.started")
    await until(lambda: client.channel.readyState == "closed")
    await client.close()
