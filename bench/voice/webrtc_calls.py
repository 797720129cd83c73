"""WebRTC beside the WebSocket: how fast a call connects, and voice to voice over either line.

    python -m bench.voice.webrtc_calls URL QUESTION.flac [--turns 5]

A running server, one spoken question asked again and again, alternately over both lines, each in a
session of its own. Times are the client's: from the last voiced sample sent (as the recording's
manifest or energy has it) to the first audible sample received.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import statistics
import time
from pathlib import Path

import numpy as np
import soundfile as sf
from websockets.asyncio.client import connect

from audio.resample import resample
from tests.support.rtc_client import Pcm, RtcClient

AUDIBLE = 328  # -40 dB of full scale


def question(path: Path, rate: int) -> tuple[Pcm, float]:
    """Samples at ``rate``, and the second at which the voice ends."""
    samples, own_rate = sf.read(path, dtype="float32")
    pcm = (resample(samples, own_rate, rate) * 32_767).astype(np.int16)
    loud = np.flatnonzero(np.abs(pcm) > 0.05 * np.abs(pcm).max())
    return pcm, float(loud[-1]) / rate


async def over_webrtc(url: str, path: Path) -> tuple[float, float, float]:
    """Milliseconds: offer to open channel, offer to first packet of audio, voice to voice."""
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
    """Milliseconds: to the open session, voice to voice."""
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


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("question", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    calls, sockets = [], []
    for _ in range(arguments.turns):
        calls.append(await over_webrtc(arguments.url, arguments.question))
        sockets.append(await over_websocket(arguments.url, arguments.question))
    for name, values in (
        ("WebRTC: offer to open data channel", [call[0] for call in calls]),
        ("WebRTC: offer to first audio", [call[1] for call in calls]),
        ("WebRTC: voice to voice", [call[2] for call in calls]),
        ("WebSocket: connect to open session", [socket[0] for socket in sockets]),
        ("WebSocket: voice to voice", [socket[1] for socket in sockets]),
    ):
        print(f"{name:38} p50 {statistics.median(values):6.0f} ms  max {max(values):6.0f} ms")


if __name__ == "__main__":
    asyncio.run(main())
