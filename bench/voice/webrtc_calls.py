"""Connection time and voice-to-voice latency over WebRTC and over a WebSocket.

    python -m bench.voice.webrtc_calls URL QUESTION.flac [--turns 5] [--json OUT]

One spoken question to a running server, alternately over both transports, each in a session of its
own. Times are measured by the client, from the last voiced sample sent (by energy) to the first
audible sample received.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import time
from pathlib import Path

import numpy as np
import soundfile as sf
from websockets.asyncio.client import connect

from audio.resample import resample
from bench.harness.figures import percentiles
from bench.harness.results import Result, add_json_option, report
from tests.support.rtc_client import Pcm, RtcClient

AUDIBLE = 328  # -40 dB of full scale


def question(path: Path, rate: int) -> tuple[Pcm, float]:
    """The recording, int16 at ``rate``, and the time in seconds at which the voice ends."""
    samples, own_rate = sf.read(path, dtype="float32")
    pcm = (resample(samples, own_rate, rate) * 32_767).astype(np.int16)
    loud = np.flatnonzero(np.abs(pcm) > 0.05 * np.abs(pcm).max())
    return pcm, float(loud[-1]) / rate


async def over_webrtc(url: str, path: Path) -> tuple[float, float, float]:
    """Milliseconds: offer to open data channel, offer to first audio packet, voice to voice."""
    pcm, voice_end_s = question(path, 48_000)
    async with RtcClient(url) as client:
        began_s = time.monotonic()
        await client.connect()
        open_ms = (time.monotonic() - began_s) * 1000
        while not client.heard:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        audio_ms = (time.monotonic() - began_s) * 1000
        await asyncio.sleep(0.5)
        num_before = len(client.heard)
        said_s = time.monotonic()
        client.microphone.say(pcm)
        while True:
            fresh = client.heard[num_before:]
            if any(np.abs(frame).max() > AUDIBLE for frame in fresh):
                break
            num_before = len(client.heard)
            await asyncio.sleep(0.002)
        return open_ms, audio_ms, (time.monotonic() - said_s - voice_end_s) * 1000


async def over_websocket(url: str, path: Path) -> tuple[float, float]:
    """Milliseconds: connect to open session, voice to voice."""
    pcm, voice_end_s = question(path, 24_000)
    began_s = time.monotonic()
    async with connect(url.replace("http", "ws") + "/v1/realtime", max_size=None) as socket:
        await socket.recv()
        open_ms = (time.monotonic() - began_s) * 1000

        async def speak() -> None:
            start_s = time.monotonic()
            whole = np.concatenate((pcm, np.zeros(24_000 * 20, np.int16)))
            for at in range(0, len(whole), 480):
                await asyncio.sleep(start_s + at / 24_000 - time.monotonic())
                audio = base64.b64encode(whole[at : at + 480].tobytes()).decode()
                await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))

        said_s = time.monotonic()
        speaking = asyncio.create_task(speak())
        try:
            async for message in socket:
                event = json.loads(message)
                if event["type"] != "response.output_audio.delta":
                    continue
                samples = np.frombuffer(base64.b64decode(event["delta"]), "<i2").astype(np.int32)
                loud = np.flatnonzero(np.abs(samples) > AUDIBLE)
                if len(loud):
                    at_s = time.monotonic() + loud[0] / 24_000
                    return open_ms, (at_s - said_s - voice_end_s) * 1000
        finally:
            speaking.cancel()
    raise RuntimeError("the server hung up without an answer")


async def measure(url: str, path: Path, num_turns: int) -> Result:
    """Percentiles of all times."""
    times: dict[str, list[float]] = {}
    for _ in range(num_turns):
        open_ms, audio_ms, call_ms = await over_webrtc(url, path)
        connect_ms, socket_ms = await over_websocket(url, path)
        for name, ms in (
            ("WebRTC: offer to open data channel", open_ms),
            ("WebRTC: offer to first audio", audio_ms),
            ("WebRTC: voice to voice", call_ms),
            ("WebSocket: connect to open session", connect_ms),
            ("WebSocket: voice to voice", socket_ms),
        ):
            times.setdefault(name, []).append(ms)
    result = Result(("time", "p50, ms", "max, ms"))
    for name, values in times.items():
        result.add(name, percentiles(values)["p50"], round(max(values), 1))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("question", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    add_json_option(parser)
    options = parser.parse_args()
    report(asyncio.run(measure(options.url, options.question, options.turns)), options)


if __name__ == "__main__":
    main()
