"""The data channel ``oai-events`` as an EventChannel, and the caller's audio as an AudioPort.

Both outlive the connection beneath them: while the line is interrupted, events wait, audio stops
where it is, and all goes on over the next connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from aiortc import RTCDataChannel
from aiortc.exceptions import InvalidStateError

from app.transports.audio_port import AudioChunk, Cut, Playback, PlaybackNotes
from app.transports.base import ChannelClosed
from app.transports.webrtc.opus import DECODED_RATE, ENCODED_RATE
from app.transports.webrtc.playout import SILENT_FRAME, OutputBuffer
from audio.codecs import AudioFormat, encode
from audio.frame import Samples

logger = logging.getLogger(__name__)

LABEL = "oai-events"
# Messages of the client that nobody has handled. Overflow rule: the call ends with 1013.
MAX_RECEIVED_BYTES = 4 * 1024 * 1024
# Events that the client has not taken, or that wait for a new line. Overflow rule: the same.
MAX_QUEUED_BYTES = 4 * 1024 * 1024
# What a message costs beside its text: an empty one is not free.
MESSAGE_BYTES = 256
# How long a closing channel waits for the peer to take the rest.
CLOSE_TIMEOUT_S = 1.0
_CLOSE_POLL_S = 0.02


class CallChannel:
    """Events of one call. ``greet`` makes the message with which a resumed call begins."""

    def __init__(self) -> None:
        self.closed: ChannelClosed | None = None
        self.greet: Callable[[], str] | None = None
        self.on_close: Callable[[], None] = lambda: None
        self._line: RTCDataChannel | None = None
        self._has_line = True  # false: this client has no data channel, and wants no events
        self._num_lines = 0
        self._outgoing: deque[str] = deque()
        self._outgoing_bytes = 0
        self._incoming: deque[str | bytes] = deque()
        self._incoming_bytes = 0
        self._changed = asyncio.Event()

    # --- the side of the session (EventChannel) ---

    async def receive(self) -> str | bytes:
        """See ``EventChannel``."""
        while not self._incoming:
            self._raise_if_closed()
            self._changed.clear()
            await self._changed.wait()
        message = self._incoming.popleft()
        self._incoming_bytes -= MESSAGE_BYTES + len(message)
        return message

    async def send(self, text: str) -> None:
        """See ``EventChannel``. While there is no line, the message waits for the next one."""
        self._raise_if_closed()
        if not self._has_line:
            return
        waiting = self._num_unsent if self._line is not None else self._outgoing_bytes
        if waiting + len(text) > MAX_QUEUED_BYTES:
            logger.warning("client does not read: %d bytes queued", waiting)
            self.fail(1013, "the client does not read what it is sent")
            self._raise_if_closed()
        if self._line is None:
            self._outgoing.append(text)
            self._outgoing_bytes += len(text)
        else:
            self._write(text)

    async def close(self, code: int, reason: str) -> None:
        """See ``EventChannel``. Takes at most ``CLOSE_TIMEOUT_S``."""
        waited_s = 0.0
        while self.closed is None and self._num_unsent and waited_s < CLOSE_TIMEOUT_S:
            await asyncio.sleep(_CLOSE_POLL_S)
            waited_s += _CLOSE_POLL_S
        self.fail(code, reason)

    def fail(self, code: int, reason: str) -> None:
        """Nothing more is sent or received; wakes a waiting ``receive``. The first time counts."""
        if self.closed is not None:
            return
        self.closed = ChannelClosed(code, reason)
        self._outgoing.clear()
        self._incoming.clear()
        self._changed.set()
        self.on_close()

    # --- the side of the line ---

    def expect(self, has_line: bool) -> None:
        """Whether the client will open a data channel at all."""
        self._has_line = has_line

    def attach(self, line: RTCDataChannel) -> None:
        """Events go over ``line`` from now on; what has waited goes first."""
        if self.closed is not None:
            return
        self._line = line
        self._num_lines += 1
        # The channel is open when aiortc tells us of it: "open" was fired before anyone listened.
        line.on("message", lambda message: self._take(line, message))
        if self._num_lines > 1 and self.greet is not None:
            self._write(self.greet())
        while self._outgoing and self._line is line:
            text = self._outgoing.popleft()
            self._outgoing_bytes -= len(text)
            self._write(text)

    def detach(self) -> None:
        """There is no line for now."""
        self._line = None

    def _take(self, line: RTCDataChannel, message: str | bytes) -> None:
        if self.closed is not None or line is not self._line:
            return
        self._incoming.append(message)
        self._incoming_bytes += MESSAGE_BYTES + len(message)
        self._changed.set()
        if self._incoming_bytes > MAX_RECEIVED_BYTES:
            self.fail(1013, "too many events at once")

    def _write(self, text: str) -> None:
        assert self._line is not None
        try:
            self._line.send(text)
        except ValueError as error:  # longer than the peer's limit
            logger.warning("event not sent: %s", error)
        except (InvalidStateError, ConnectionError):
            # Going down; whoever watches the connection decides whether it will come back.
            logger.debug("event not sent, the data channel is %s", self._line.readyState)

    @property
    def _num_unsent(self) -> int:
        """Bytes that the data channel has not sent yet."""
        return self._line.bufferedAmount if self._line is not None else 0

    def _raise_if_closed(self) -> None:
        if self.closed is not None:
            raise ChannelClosed(self.closed.code, self.closed.reason)


# Two seconds of audio that the session has not taken. Overflow rule: the oldest is dropped, since a
# recogniser that is two seconds late helps nobody.
_MAX_CHUNKS = 100
# So much is handed over at once when several packets came together.
_MAX_JOINED = 5
_MAX_OUTPUT_MS = 3_000


class CallAudio:
    """Audio of one call; see ``AudioPort``."""

    input_format = AudioFormat("pcm16", DECODED_RATE)
    output_format = AudioFormat("pcm16", ENCODED_RATE)

    def __init__(self) -> None:
        self.num_dropped = 0
        self.is_attached = False
        """There is a line."""
        self._notes = PlaybackNotes()
        self.output = OutputBuffer(self._notes.add)
        self._incoming: deque[AudioChunk] = deque()
        self._heard = asyncio.Event()
        self._has_ear = True
        self._moved = asyncio.Event()  # the line is there, or the queue has become shorter
        self._is_closed = False

    # --- the side of the session ---

    async def receive(self) -> AudioChunk:
        """See ``AudioPort``."""
        while not self._incoming:
            self._raise_if_closed()
            self._heard.clear()
            await self._heard.wait()
        count = min(len(self._incoming), _MAX_JOINED)
        chunks = [self._incoming.popleft() for _ in range(count)]
        return AudioChunk(b"".join(chunk.payload for chunk in chunks), chunks[-1].received_ns)

    async def play(self, response_id: str, item_id: str, payload: bytes) -> None:
        """See ``AudioPort``."""
        while (
            self._has_ear
            and not self._is_closed
            and (not self.is_attached or self.output.waiting_ms > _MAX_OUTPUT_MS)
        ):
            self._moved.clear()
            await self._moved.wait()
        if self._has_ear:
            self.output.push(response_id, item_id, payload)

    def finish(self, response_id: str) -> None:
        """See ``AudioPort``."""
        self.output.finish(response_id)

    def clear(self) -> Cut | None:
        """See ``AudioPort``."""
        cut = self.output.clear()
        self._moved.set()
        return cut

    def take_playback(self) -> list[Playback]:
        """See ``AudioPort``."""
        return self._notes.take()

    async def playback_changed(self) -> None:
        """See ``AudioPort``."""
        await self._notes.changed()

    def close(self) -> None:
        """Wakes everybody who waits here."""
        if self.num_dropped and not self._is_closed:
            logger.warning("the session was too slow for %d packets of audio", self.num_dropped)
        self._is_closed = True
        self._notes.close()
        for event in (self._heard, self._moved):
            event.set()

    # --- the side of the line ---

    def expect(self, has_ear: bool) -> None:
        """Whether the client wants audio at all; without an ear, what is said goes nowhere."""
        self._has_ear = has_ear

    def attach(self) -> None:
        """There is a line: what waits is played from where it was."""
        self.is_attached = True
        self._moved.set()

    def detach(self) -> None:
        """There is no line for now: nothing is played, and nothing is lost."""
        self.is_attached = False

    def heard(self, samples: Samples, received_ns: int) -> None:
        """Audio of the caller at 48 kHz."""
        if self._is_closed:
            return
        if len(self._incoming) >= _MAX_CHUNKS:
            self._incoming.popleft()
            self.num_dropped += 1
        self._incoming.append(AudioChunk(encode(samples, self.input_format), received_ns))
        self._heard.set()

    def next_frame(self) -> bytes:
        """The next 20 ms for the caller's ear."""
        if self.output.is_idle:
            return SILENT_FRAME
        frame = self.output.next_frame()
        self._moved.set()
        return frame

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise ChannelClosed(1000, "the call has ended")
