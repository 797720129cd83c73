"""The audio of one phone call, both ways: the ``AudioPort`` of a line."""

from __future__ import annotations

import asyncio
from collections import deque

from app.clock import Clock
from app.transports.audio_port import AudioChunk, Cut, Playback, PlaybackNotes
from app.transports.base import ChannelClosed
from app.transports.telephony.playout import Frame, PhonePlayout
from app.transports.telephony.protocol import AudioReceived, PhoneProtocol
from app.transports.telephony.reorder_buffer import InOrder, Missing
from audio.codecs import AudioFormat, decode, encode
from audio.packet_loss_concealment import PacketLossConcealer

# Audio that the session has not taken. Overflow rule: the oldest is dropped, since a recogniser
# that is two seconds late helps nobody.
_MAX_WAITING_S = 2.0
_MAX_OUTPUT_MS = 3_000
# More is not made up: nobody was there.
_MAX_MISSING = 50


class PhoneAudio:
    """See ``AudioPort``. What comes from the caller is put in order, and holes are concealed.

    ``lead_ms``: how far ahead of its playout audio may be sent, unless the protocol says less.
    """

    def __init__(self, protocol: PhoneProtocol, clock: Clock, *, lead_ms: int) -> None:
        self.input_format = AudioFormat("pcm16", protocol.input_format.rate)
        self.output_format = protocol.output_format
        self.num_dropped = 0
        """Pieces of the caller's audio that the session was too slow for."""
        self.num_missing = 0
        """Pieces that never came."""
        self.changed = asyncio.Event()
        """There may be something to send."""
        self.must_clear = False
        """The provider has to be told that it shall fall silent."""
        self._wire_format = protocol.input_format
        self._clock = clock
        self._notes = PlaybackNotes()
        self._playout = PhonePlayout(
            protocol.output_format,
            frame_ms=protocol.frame_ms,
            lead_ms=lead_ms if protocol.lead_ms is None else min(lead_ms, protocol.lead_ms),
            has_marks=protocol.has_marks,
            on_playback=self._notes.add,
        )
        self._order = InOrder()
        self._concealer = PacketLossConcealer(protocol.input_format.rate)
        self._incoming: deque[AudioChunk] = deque()
        self._waiting_bytes = 0
        self._heard = asyncio.Event()
        self._moved = asyncio.Event()  # the queue has become shorter
        self._is_closed = False

    # --- the side of the session ---

    async def receive(self) -> AudioChunk:
        """See ``AudioPort``."""
        while not self._incoming:
            self._raise_if_closed()
            self._heard.clear()
            await self._heard.wait()
        chunks = [*self._incoming]
        self._incoming.clear()
        self._waiting_bytes = 0
        return AudioChunk(b"".join(chunk.payload for chunk in chunks), chunks[-1].received_ns)

    async def play(self, response_id: str, item_id: str, payload: bytes) -> None:
        """See ``AudioPort``."""
        while not self._is_closed and self._playout.waiting_ms > _MAX_OUTPUT_MS:
            self._moved.clear()
            await self._moved.wait()
        if not self._is_closed:
            self._playout.push(response_id, item_id, payload)
            self.changed.set()

    def finish(self, response_id: str) -> None:
        """See ``AudioPort``."""
        self._playout.finish(response_id)
        self.changed.set()

    def clear(self) -> Cut | None:
        """See ``AudioPort``. Also what was sent long ago: the provider may have it still."""
        cut = self._playout.clear(self._clock.now_ns())
        self.must_clear = self.must_clear or cut is not None
        self._moved.set()
        self.changed.set()
        return cut

    def take_playback(self) -> list[Playback]:
        """See ``AudioPort``."""
        return self._notes.take()

    async def playback_changed(self) -> None:
        """See ``AudioPort``."""
        await self._notes.changed()

    @property
    def is_silent(self) -> bool:
        """All that was said has been heard."""
        return self._playout.is_idle

    # --- the side of the line ---

    def hear(self, sound: AudioReceived) -> None:
        """Audio of the caller, as it came."""
        fmt = self._wire_format
        for piece in self._order.feed(sound.chunk, sound.payload):
            if isinstance(piece, Missing):
                self.num_missing += piece.num_pieces
                count = min(piece.num_pieces, _MAX_MISSING)
                samples = self._concealer.conceal(count * len(sound.payload) // fmt.sample_len)
            else:
                samples = self._concealer.good(decode(piece, fmt))
            self._add(encode(samples, self.input_format))

    def next_frame(self) -> Frame | None:
        """What may be sent to the provider now."""
        frame = self._playout.next_frame(self._clock.now_ns())
        self._moved.set()
        return frame

    def wait_s(self) -> float | None:
        """Seconds until there is something to do; None: not before ``changed``."""
        return self._playout.wait_s(self._clock.now_ns())

    def reached(self, mark: str) -> None:
        """The provider has given a mark back."""
        self._playout.reached(mark, self._clock.now_ns())
        self.changed.set()

    def close(self) -> None:
        """Wakes everybody who waits here."""
        self._is_closed = True
        self._notes.close()
        for event in (self._heard, self._moved, self.changed):
            event.set()

    def _add(self, pcm: bytes) -> None:
        if not pcm or self._is_closed:
            return
        self._incoming.append(AudioChunk(pcm, self._clock.now_ns()))
        self._waiting_bytes += len(pcm)
        max_bytes = _MAX_WAITING_S * self.input_format.rate * self.input_format.sample_len
        while self._waiting_bytes > max_bytes and len(self._incoming) > 1:
            self._waiting_bytes -= len(self._incoming.popleft().payload)
            self.num_dropped += 1
        self._heard.set()

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise ChannelClosed(1000, "the call has ended")
