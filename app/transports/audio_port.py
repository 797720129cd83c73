"""What the protocol handlers ask of a transport that carries the audio itself, beside its events.

A WebRTC call and a phone line play to the caller's ear without a player that we do not know: they
send in real time, so they know to the frame what was played, and can fall silent at once.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal, Protocol

from app.transports.base import ChannelClosed
from audio.codecs import AudioFormat


@dataclass(frozen=True, slots=True)
class AudioChunk:
    """Audio of the caller in the port's input format, and when its last packet arrived."""

    payload: bytes
    received_ns: int


@dataclass(frozen=True, slots=True)
class Playback:
    """What happens at the loudspeaker: the first or the last sound of a response was sent."""

    state: Literal["started", "stopped"]
    response_id: str


@dataclass(frozen=True, slots=True)
class Cut:
    """Audio that was taken back. ``heard_ms``: how much of the item was sent to the ear."""

    response_id: str
    item_id: str
    heard_ms: int


class AudioPort(Protocol):
    """Both directions of one caller's audio."""

    input_format: AudioFormat
    output_format: AudioFormat

    async def receive(self) -> AudioChunk:
        """The caller's audio, in order. Raises ChannelClosed."""
        ...

    async def play(self, response_id: str, item_id: str, payload: bytes) -> None:
        """Queue audio of a response; waits while the queue is full or the line interrupted."""
        ...

    def finish(self, response_id: str) -> None:
        """All of this response's audio was queued."""
        ...

    def clear(self) -> Cut | None:
        """Fall silent at once. None: nothing was being played."""
        ...

    def take_playback(self) -> list[Playback]:
        """What has happened at the loudspeaker since the last call."""
        ...

    async def playback_changed(self) -> None:
        """Returns when ``take_playback`` has something to give. Raises ChannelClosed."""
        ...


class PlaybackNotes:
    """What has happened at the loudspeaker and was not taken yet; behind an ``AudioPort``."""

    def __init__(self) -> None:
        self._notes: list[Playback] = []
        self._changed = asyncio.Event()
        self._is_closed = False

    def add(self, note: Playback) -> None:
        """It has happened."""
        self._notes.append(note)
        self._changed.set()

    def take(self) -> list[Playback]:
        """See ``AudioPort.take_playback``."""
        notes, self._notes = self._notes, []
        return notes

    async def changed(self) -> None:
        """See ``AudioPort.playback_changed``."""
        while not self._notes:
            if self._is_closed:
                raise ChannelClosed(1000, "the call has ended")
            self._changed.clear()
            await self._changed.wait()

    def close(self) -> None:
        """Wakes who waits."""
        self._is_closed = True
        self._changed.set()
