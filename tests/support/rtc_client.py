"""A WebRTC client for tests: aiortc's own peer connection, with a microphone and two ears.

``LossyLink`` stands between it and the network, so that packets are lost, late or out of order as a
script says.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.mediastreams import MediaStreamError, MediaStreamTrack
from av import AudioFrame

Pcm = npt.NDArray[np.int16]
RATE = 48_000
FRAME = RATE // 50


class Microphone(MediaStreamTrack):
    """Plays what ``say`` was given, 20 ms at a time in real time, silence otherwise."""

    kind = "audio"

    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        self._channels = channels
        self._waiting = np.zeros(0, np.int16)
        self._position = 0
        self._began_s = 0.0

    def say(self, samples: Pcm) -> None:
        """Queue mono samples at 48 kHz."""
        self._waiting = np.concatenate((self._waiting, samples))

    @property
    def is_done(self) -> bool:
        return not len(self._waiting)

    async def recv(self) -> AudioFrame:
        if self.readyState != "live":
            raise MediaStreamError
        loop = asyncio.get_running_loop()
        self._began_s = self._began_s or loop.time()
        await asyncio.sleep(self._began_s + self._position / RATE - loop.time())
        part, self._waiting = self._waiting[:FRAME], self._waiting[FRAME:]
        mono = np.concatenate((part, np.zeros(FRAME - len(part), np.int16)))
        samples = np.repeat(mono, self._channels).reshape(1, -1)
        layout = "stereo" if self._channels == 2 else "mono"
        frame = AudioFrame.from_ndarray(samples, format="s16", layout=layout)
        frame.sample_rate, frame.time_base = RATE, Fraction(1, RATE)
        frame.pts = self._position
        self._position += FRAME
        return frame


class RtcClient:
    """One caller. Use as an async context manager; ``connect`` makes the call."""

    def __init__(
        self,
        url: str,
        *,
        channels: int = 1,
        has_microphone: bool = True,
        has_audio: bool = True,
    ) -> None:
        self.url = url
        self.call_id = ""
        self.events: list[dict[str, Any]] = []
        self.heard: list[Pcm] = []
        self.microphone = Microphone(channels)
        self.connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self.channel = self.connection.createDataChannel("oai-events")
        self.is_open = asyncio.Event()
        self._arrived = asyncio.Event()
        self._num_read = 0
        self._listening: asyncio.Task[None] | None = None
        self.channel.on("open", self.is_open.set)
        self.channel.on("message", self._take)
        self.connection.on("track", self._hear)
        if has_microphone and has_audio:
            self.connection.addTrack(self.microphone)
        elif has_audio:
            self.connection.addTransceiver("audio", direction="recvonly")

    async def __aenter__(self) -> RtcClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def offer(self) -> str:
        await self.connection.setLocalDescription(await self.connection.createOffer())
        return str(self.connection.localDescription.sdp)

    async def connect(self, query: str = "") -> None:
        """Offer, answer, and wait for the data channel."""
        # Reading the certificates of the world takes longer than the whole call.
        async with httpx.AsyncClient(verify=False) as http:
            reply = await http.post(
                f"{self.url}/v1/realtime/calls{query}",
                content=await self.offer(),
                headers={"content-type": "application/sdp"},
            )
        assert reply.status_code == 201, reply.text
        self.call_id = reply.headers["location"].rpartition("/")[2]
        await self.accept(reply.text)
        async with asyncio.timeout(10):
            await self.is_open.wait()

    async def accept(self, answer: str) -> None:
        await self.connection.setRemoteDescription(RTCSessionDescription(answer, "answer"))

    async def close(self) -> None:
        link = self.connection.sctp.transport.transport._connection
        await self.connection.close()
        self.microphone.stop()
        # aioice 0.13 begins to watch a connection that was closed in the moment it came about.
        await asyncio.sleep(0.025)
        if link._query_consent_task is not None:
            link._query_consent_task.cancel()
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait([self._listening])

    def send(self, kind: str, **fields: Any) -> None:
        self.channel.send(json.dumps({"type": kind, **fields}))

    async def until(self, kind: str, timeout_s: float = 15.0) -> dict[str, Any]:
        """The next event of this type, skipping others; an unexpected error fails."""
        async with asyncio.timeout(timeout_s):
            while True:
                event = await self.next()
                if event["type"] == kind:
                    return event
                assert event["type"] != "error", event

    async def until_error(self, timeout_s: float = 15.0) -> dict[str, Any]:
        """The body of the next error event."""
        async with asyncio.timeout(timeout_s):
            while True:
                event = await self.next()
                if event["type"] == "error":
                    error: dict[str, Any] = event["error"]
                    return error

    async def next(self) -> dict[str, Any]:
        while self._num_read == len(self.events):
            self._arrived.clear()
            await self._arrived.wait()
        self._num_read += 1
        return self.events[self._num_read - 1]

    def names(self) -> list[str]:
        return [event["type"] for event in self.events]

    def _take(self, message: str) -> None:
        self.events.append(json.loads(message))
        self._arrived.set()

    def _hear(self, track: MediaStreamTrack) -> None:
        self._listening = asyncio.create_task(self._listen(track))

    async def _listen(self, track: MediaStreamTrack) -> None:
        while True:
            try:
                frame = await track.recv()
            except MediaStreamError:
                return
            samples = frame.to_ndarray().reshape(-1, len(frame.layout.channels))
            self.heard.append(samples[:, 0].copy())


def tone(seconds: float, hz: float = 220.0, level: float = 0.3) -> Pcm:
    """A sine at 48 kHz."""
    at = np.arange(int(seconds * RATE)) / RATE
    return (np.sin(2 * np.pi * hz * at) * level * 32767).astype(np.int16)


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Waits for something that has no event; fails when it does not come."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
