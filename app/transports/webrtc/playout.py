"""What is still to be said, frame by frame, and what of it has been.

    [0, taken) sent to the ear | [taken, queued) waiting | the rest has not come yet

Pure: whoever sends asks ``next_frame`` once every 20 ms.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from app.transports.audio_port import Cut, Playback
from app.transports.webrtc.opus import ENCODED_RATE, FRAME_SAMPLES

_SAMPLE_LEN = 2
FRAME_BYTES = FRAME_SAMPLES * _SAMPLE_LEN
SILENT_FRAME = bytes(FRAME_BYTES)
# A sound that ends at once clicks; this is too short to be heard as speech.
_FADE_SAMPLES = ENCODED_RATE // 200


@dataclass(slots=True)
class _Item:
    response_id: str
    item_id: str
    waiting: bytearray
    taken_samples: int = 0
    is_told: bool = False
    is_finished: bool = False


class OutputBuffer:
    """Audio of the responses in the order in which they came. ``on_playback`` hears of each."""

    def __init__(self, on_playback: Callable[[Playback], None]) -> None:
        self._on_playback = on_playback
        self._items: deque[_Item] = deque()
        self._fading = b""
        self._sounding = ""  # the response that has begun

    @property
    def waiting_ms(self) -> float:
        """Length of the audio that waits to be sent."""
        return sum(len(i.waiting) for i in self._items) * 1000 / (_SAMPLE_LEN * ENCODED_RATE)

    @property
    def is_idle(self) -> bool:
        """Nothing is being played, and nothing waits."""
        return not self._items and not self._fading

    def push(self, response_id: str, item_id: str, pcm: bytes) -> None:
        """Queue 16-bit samples of an item."""
        last = self._items[-1] if self._items else None
        if last is None or last.item_id != item_id:
            if last is not None:
                last.is_finished = True
            last = _Item(response_id, item_id, bytearray())
            self._items.append(last)
        last.waiting += pcm
        if last is self._items[0]:
            self._tell_start(last)

    def finish(self, response_id: str) -> None:
        """No more audio comes for this response."""
        for item in self._items:
            if item.response_id == response_id:
                item.is_finished = True
        self._retire()

    def next_frame(self) -> bytes:
        """20 ms of 16-bit samples: of the queue, or silence.

        Less than a frame waits for its rest, unless there is none: then silence fills the frame.
        """
        if self._fading:
            frame, self._fading = self._fading, b""
            return frame + bytes(FRAME_BYTES - len(frame))
        frame = b""
        while self._items and len(frame) < FRAME_BYTES:
            item = self._items[0]
            missing = FRAME_BYTES - len(frame)
            if len(item.waiting) < missing and not item.is_finished:
                if frame:  # the end of the item before must not wait for this one
                    break
                return SILENT_FRAME
            part = bytes(item.waiting[:missing])
            del item.waiting[:missing]
            self._tell_start(item)
            item.taken_samples += len(part) // _SAMPLE_LEN
            frame += part
            if not item.waiting and item.is_finished:
                self._retire()
            else:
                break
        return frame + bytes(FRAME_BYTES - len(frame))

    def clear(self) -> Cut | None:
        """Drop all that waits; what is cut off fades out within the next frame."""
        if not self._items:
            return None
        item = self._items[0]
        if item.taken_samples:
            self._fading = _faded(bytes(item.waiting[: _FADE_SAMPLES * _SAMPLE_LEN]))
        self._items.clear()
        self._sounding = ""
        return Cut(item.response_id, item.item_id, item.taken_samples * 1000 // ENCODED_RATE)

    def _tell_start(self, item: _Item) -> None:
        """It sounds within 20 ms. Told once a response, whatever number of items it has."""
        if not item.is_told:
            item.is_told = True
            if item.response_id != self._sounding:
                self._sounding = item.response_id
                self._on_playback(Playback("started", item.response_id))

    def _retire(self) -> None:
        while self._items and self._items[0].is_finished and not self._items[0].waiting:
            done = self._items.popleft()
            more = bool(self._items) and self._items[0].response_id == done.response_id
            if done.is_told and not more:
                self._sounding = ""
                self._on_playback(Playback("stopped", done.response_id))


def _faded(pcm: bytes) -> bytes:
    samples = np.frombuffer(pcm, dtype="<i2").astype(np.float32)
    if not len(samples):
        return b""
    return (samples * np.linspace(1.0, 0.0, len(samples))).astype("<i2").tobytes()
