"""From RTP packets as they come to audio in order: no clock of its own, no standing delay.

The listener behind this is a recogniser, not a loudspeaker, so nothing has to come out at an even
pace. A packet that is next in line leaves at once; only when one is missing do the ones behind it
wait, at most ``wait_ns`` each, for it to arrive after all. Then the gap is named (to be concealed)
and everything that waited leaves together: the delay is back at zero. Since nothing is played, the
sender's clock and ours may drift apart for ever without a buffer that fills or runs dry.

    sequence numbers   ... emitted | next: missing | held held . held |

Overflow rule: when more than ``MAX_HELD`` packets wait, the gap before them is given up.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

RTP_RATE = 48_000
"""Ticks per second of Opus RTP timestamps, whatever rate was encoded (RFC 7587, section 4.1)."""

MAX_HELD = 64
_MIN_WAIT_NS = 40_000_000
_MAX_WAIT_NS = 120_000_000
_WAIT_MARGIN_NS = 10_000_000
# Per packet that came in time: a wait that was widened by 80 ms is back in 80 s.
_WAIT_DECAY_NS = 20_000
# A jump of so many packets, either way, is a new stream and not loss or delay.
_MAX_JUMP = 3_000
# So many packets in a row from the past: the sender has started over.
_MAX_OLD = 5
# More silence than this is not made up: nobody was there.
MAX_GAP_TICKS = RTP_RATE
_SEEN_LOSSES = 64


@dataclass(frozen=True, slots=True)
class Packet:
    """One RTP packet: 16-bit sequence number, 32-bit timestamp, when it arrived."""

    sequence_number: int
    timestamp: int
    payload: bytes
    arrived_ns: int


@dataclass(frozen=True, slots=True)
class Gap:
    """``num_ticks`` of 1/48,000 s for which there is no audio.

    ``is_loss`` False: the sender paused; nothing was lost, nothing should be made up but silence.
    """

    num_ticks: int
    is_loss: bool
    arrived_ns: int


Piece = Packet | Gap


class ReceiveBuffer:
    """Order out of arrival. Feed ``push``, and call ``poll`` at ``deadline_ns``."""

    def __init__(self) -> None:
        self.wait_ns = _MIN_WAIT_NS
        self.num_lost = 0
        self.num_late = 0
        self.num_duplicates = 0
        self.num_resets = 0
        self._held: dict[int, Packet] = {}  # by sequence number, counted on beyond 16 bits
        self._next: int | None = None
        self._next_timestamp: int | None = None
        self._frame_ticks = 960
        self._num_old = 0
        self._given_up: deque[tuple[int, int]] = deque(maxlen=_SEEN_LOSSES)  # (number, when)

    @property
    def deadline_ns(self) -> int | None:
        """When ``poll`` should be called, unless a packet comes before; None: nothing waits."""
        if not self._held:
            return None
        return min(packet.arrived_ns for packet in self._held.values()) + self.wait_ns

    def push(self, packet: Packet) -> list[Piece]:
        """Take a packet; gives what can be listened to now, in order."""
        if self._next is None:
            self._next = packet.sequence_number
        offset = _signed(packet.sequence_number - self._next, 16)
        if abs(offset) > _MAX_JUMP:
            return self._restart(packet)
        number = self._next + offset
        if offset < 0:
            return self._take_old(number, packet)
        self._num_old = 0
        if number in self._held:
            self.num_duplicates += 1
            return []
        self._held[number] = packet
        pieces = self._drain()
        if len(self._held) > MAX_HELD:
            pieces += self._give_up(packet.arrived_ns)
        return pieces + self.poll(packet.arrived_ns)

    def poll(self, now_ns: int) -> list[Piece]:
        """Give up on what has been waited for long enough."""
        pieces: list[Piece] = []
        while (deadline_ns := self.deadline_ns) is not None and now_ns >= deadline_ns:
            pieces += self._give_up(now_ns)
        return pieces

    def _take_old(self, number: int, packet: Packet) -> list[Piece]:
        for lost, gave_up_ns in self._given_up:
            if lost == number:
                # It would have been in time had we waited so much longer.
                self.num_late += 1
                needed_ns = self.wait_ns + packet.arrived_ns - gave_up_ns + _WAIT_MARGIN_NS
                self.wait_ns = min(_MAX_WAIT_NS, max(self.wait_ns, needed_ns))
                self._given_up.remove((lost, gave_up_ns))
                return []
        self.num_duplicates += 1
        self._num_old += 1
        return self._restart(packet) if self._num_old >= _MAX_OLD else []

    def _restart(self, packet: Packet) -> list[Piece]:
        """Another stream begins with ``packet``; what waited of the old one is let go first."""
        pieces: list[Piece] = []
        while self._held:
            pieces += self._give_up(packet.arrived_ns)
        self.num_resets += 1
        self._num_old = 0
        self._given_up.clear()
        self._next, self._next_timestamp = packet.sequence_number, None
        self._held[packet.sequence_number] = packet
        return pieces + self._drain()

    def _drain(self) -> list[Piece]:
        pieces: list[Piece] = []
        assert self._next is not None
        while (packet := self._held.pop(self._next, None)) is not None:
            paused = self._ticks_until(packet)
            if paused > 0:
                pieces.append(Gap(min(paused, MAX_GAP_TICKS), False, packet.arrived_ns))
            pieces.append(packet)
            self._pass(packet)
            self.wait_ns = max(_MIN_WAIT_NS, self.wait_ns - _WAIT_DECAY_NS)
        return pieces

    def _give_up(self, now_ns: int) -> list[Piece]:
        """Skip to the next packet that is here, and on to all that follow it."""
        assert self._next is not None
        found = min(self._held)
        missing = found - self._next
        self.num_lost += missing
        self._given_up.extend((number, now_ns) for number in range(self._next, found))
        ticks = self._ticks_until(self._held[found])
        if ticks <= 0 or self._next_timestamp is None:
            ticks = missing * self._frame_ticks
        self._next = found
        self._next_timestamp = self._held[found].timestamp
        gap = Gap(min(ticks, MAX_GAP_TICKS), True, now_ns)
        return [gap, *self._drain()] if missing else self._drain()

    def _ticks_until(self, packet: Packet) -> int:
        if self._next_timestamp is None:
            return 0
        return _signed(packet.timestamp - self._next_timestamp, 32)

    def _pass(self, packet: Packet) -> None:
        assert self._next is not None
        self._frame_ticks = opus_ticks(packet.payload)
        self._next += 1
        self._next_timestamp = (packet.timestamp + self._frame_ticks) & 0xFFFFFFFF


def _signed(value: int, bits: int) -> int:
    """``value`` modulo 2**bits, as a signed number: how far ahead (or behind) of another."""
    half = 1 << (bits - 1)
    return (value + half) % (1 << bits) - half


# Ticks of one frame by configuration number (RFC 6716, section 3.1, table 2).
_SILK_TICKS = (480, 960, 1_920, 2_880)
_HYBRID_TICKS = (480, 960)
_CELT_TICKS = (120, 240, 480, 960)


def opus_ticks(payload: bytes) -> int:
    """Length of an Opus packet in 1/48,000 s, from its first bytes (RFC 6716, section 3); 0: none.

    Never more than 120 ms, whatever a damaged packet claims.
    """
    if not payload:
        return 0
    config, code = payload[0] >> 3, payload[0] & 3
    if config < 12:
        ticks = _SILK_TICKS[config & 3]
    elif config < 16:
        ticks = _HYBRID_TICKS[config & 1]
    else:
        ticks = _CELT_TICKS[config & 3]
    count = (1, 2, 2, 0)[code]
    if code == 3 and len(payload) > 1:
        count = payload[1] & 0x3F
    return min(ticks * count, 5_760)
