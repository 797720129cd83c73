"""The receive path against networks that lose, delay, repeat and reorder, on a clock of the test.

A frame's delay is the time from its arrival at a perfect network's pace to its delivery.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest

from app.transports.webrtc.jitter import (
    MAX_GAP_TICKS,
    MAX_HELD,
    RTP_RATE,
    Gap,
    Packet,
    Piece,
    ReceiveBuffer,
    opus_ticks,
)

MS = 1_000_000
FRAME_MS, FRAME_TICKS = 20, 960
# One 20 ms frame of wideband SILK (configuration 9, code 0).
PAYLOAD = bytes([9 << 3, 1])


@dataclass
class Heard:
    """What came out: each piece with the instant at which it did."""

    pieces: list[tuple[int, Piece]] = field(default_factory=list)
    buffer: ReceiveBuffer = field(default_factory=ReceiveBuffer)

    @property
    def packets(self) -> list[tuple[int, Packet]]:
        return [(at, p) for at, p in self.pieces if isinstance(p, Packet)]

    @property
    def gaps(self) -> list[tuple[int, Gap]]:
        return [(at, p) for at, p in self.pieces if isinstance(p, Gap)]

    def num_ticks(self) -> int:
        return sum(
            p.num_ticks if isinstance(p, Gap) else opus_ticks(p.payload) for _, p in self.pieces
        )


def listen(arrivals: Iterable[tuple[int, int]], *, sequence: int = 0, timestamp: int = 0) -> Heard:
    """Packets (arrival in ns, number) through a buffer whose timer is kept to the nanosecond."""
    heard = Heard()
    for at_ns, number in sorted(arrivals):
        poll_until(heard, at_ns)
        packet = Packet(
            (sequence + number) & 0xFFFF,
            (timestamp + number * FRAME_TICKS) & 0xFFFFFFFF,
            PAYLOAD,
            at_ns,
        )
        heard.pieces += [(at_ns, piece) for piece in heard.buffer.push(packet)]
    poll_until(heard, None)
    return heard


def poll_until(heard: Heard, at_ns: int | None) -> None:
    while (deadline := heard.buffer.deadline_ns) is not None:
        if at_ns is not None and deadline > at_ns:
            return
        heard.pieces += [(deadline, piece) for piece in heard.buffer.poll(deadline)]


def network(
    num: int,
    *,
    is_lost: Callable[[int], bool] = lambda number: False,
    delay_ms: Callable[[], float] = lambda: 0.0,
    rate: float = 1.0,
) -> list[tuple[int, int]]:
    """Arrivals of ``num`` packets; ``rate``: how fast the sender's clock runs."""
    return [
        (int((number * FRAME_MS / rate + delay_ms()) * MS), number)
        for number in range(num)
        if not is_lost(number)
    ]


def delays_ms(heard: Heard, rate: float = 1.0) -> list[float]:
    first = heard.packets[0][1].sequence_number
    return [
        at / MS - ((p.sequence_number - first) & 0xFFFF) * FRAME_MS / rate
        for at, p in heard.packets
    ]


def test_a_perfect_network_costs_nothing() -> None:
    heard = listen(network(500))
    assert delays_ms(heard) == [0.0] * 500
    assert heard.gaps == []


def test_one_lost_packet_costs_one_frame_and_no_lasting_delay() -> None:
    heard = listen(network(200, is_lost=lambda n: n == 100))
    assert [(gap.num_ticks, gap.is_loss) for _, gap in heard.gaps] == [(FRAME_TICKS, True)]
    assert heard.num_ticks() == 200 * FRAME_TICKS
    delays = delays_ms(heard)
    assert delays[:100] == [0.0] * 100
    # What waited behind the gap waited 40 ms at most, and the rest not at all.
    assert max(delays) <= 40.0
    assert delays[103:] == [0.0] * len(delays[103:])


@pytest.mark.parametrize("percent", [1, 5])
def test_random_loss(percent: int) -> None:
    dice = random.Random(percent)
    lost = {n for n in range(1, 2_999) if dice.random() < percent / 100}
    heard = listen(network(3_000, is_lost=lost.__contains__))
    assert heard.num_ticks() == 3_000 * FRAME_TICKS
    assert len(heard.packets) == 3_000 - len(lost)
    assert heard.buffer.num_lost == len(lost)
    delays = delays_ms(heard)
    assert max(delays) <= 40.0
    # Apart from the frames right behind a loss, there is no delay.
    assert sum(delay > 0 for delay in delays) <= 2 * len(lost)


@pytest.mark.parametrize("num_lost", [2, 5, 15, 40])
def test_bursts_are_over_when_they_are_over(num_lost: int) -> None:
    heard = listen(network(300, is_lost=lambda n: 100 <= n < 100 + num_lost))
    assert sum(gap.num_ticks for _, gap in heard.gaps) == num_lost * FRAME_TICKS
    burst_end_ms = (100 + num_lost) * FRAME_MS
    late = [
        at / MS for (at, _), delay in zip(heard.packets, delays_ms(heard), strict=True) if delay
    ]
    assert max(late) - burst_end_ms <= 200.0
    assert delays_ms(heard)[-1] == 0.0


def test_an_outage_is_not_made_up_for_ever() -> None:
    heard = listen(network(1_000, is_lost=lambda n: 100 <= n < 800))
    assert sum(gap.num_ticks for _, gap in heard.gaps) == MAX_GAP_TICKS
    assert delays_ms(heard)[-1] == 0.0


def test_jitter_with_reordering() -> None:
    """Up to 100 ms, each packet on its own, so that most of them overtake one another."""
    dice = random.Random(7)
    heard = listen(network(3_000, delay_ms=lambda: dice.uniform(0, 100)))
    numbers = [p.sequence_number for _, p in heard.packets]
    assert numbers == sorted(numbers)
    # It waits for what is on its way; no packet waits longer than the largest delay allows.
    assert len(numbers) >= 0.99 * 3_000
    assert max(delays_ms(heard)) <= 100 + 120
    assert heard.num_ticks() == pytest.approx(3_000 * FRAME_TICKS, abs=5 * FRAME_TICKS)


def test_loss_and_jitter_together_end_within_200_ms() -> None:
    dice = random.Random(3)
    arrivals = []
    for n in range(2_000):
        is_bad = 500 <= n < 1_500
        if is_bad and dice.random() < 0.05:
            continue
        arrivals.append((int((n * FRAME_MS + (dice.uniform(0, 100) if is_bad else 0)) * MS), n))
    heard = listen(arrivals)
    after = [
        delay
        for (at, _), delay in zip(heard.packets, delays_ms(heard), strict=True)
        if at > (1_500 * FRAME_MS + 200) * MS
    ]
    assert len(after) > 480
    assert max(after) == 0.0


@pytest.mark.parametrize("rate", [0.9995, 1.0005])
def test_no_drift_in_ten_minutes(rate: float) -> None:
    """A sender's clock 0.05% off: 300 ms in ten minutes, were anything buffered by the clock."""
    dice = random.Random(1)
    num = 10 * 60 * 50
    lost = {n for n in range(1, num - 1) if dice.random() < 0.01}
    heard = listen(
        network(num, is_lost=lost.__contains__, delay_ms=lambda: dice.uniform(0, 15), rate=rate),
        sequence=65_000,
        timestamp=0xFFFF0000,
    )
    assert heard.num_ticks() == num * FRAME_TICKS
    delays = delays_ms_unwrapped(heard, rate)
    assert max(delays[-500:]) <= 15 + 40
    assert sorted(delays[-500:])[250] == pytest.approx(sorted(delays[:500])[250], abs=3.0)


def delays_ms_unwrapped(heard: Heard, rate: float) -> list[float]:
    delays, number, last = [], 0, heard.packets[0][1].sequence_number
    for at, packet in heard.packets:
        number += (packet.sequence_number - last) & 0xFFFF
        last = packet.sequence_number
        delays.append(at / MS - number * FRAME_MS / rate)
    return delays


def test_duplicates_are_dropped() -> None:
    arrivals = network(100)
    heard = listen([*arrivals, *((at + 5 * MS, n) for at, n in arrivals if n % 3 == 0)])
    assert len(heard.packets) == 100
    assert heard.buffer.num_duplicates == 34


def test_a_packet_that_comes_too_late_widens_the_wait() -> None:
    arrivals = [(at, n) for at, n in network(400) if n not in (100, 200)]
    arrivals += [((100 * FRAME_MS + 95) * MS, 100), ((200 * FRAME_MS + 95) * MS, 200)]
    heard = listen(arrivals)
    # The first is given up for lost; the second is waited for.
    assert heard.buffer.num_late == 1
    assert len(heard.gaps) == 1
    assert 100 not in [p.sequence_number for _, p in heard.packets]
    assert 200 in [p.sequence_number for _, p in heard.packets]


def test_a_sender_that_pauses_leaves_silence_and_no_loss() -> None:
    buffer = ReceiveBuffer()
    pieces = buffer.push(Packet(7, 0, PAYLOAD, 0))
    # In sequence, and half a second later by its own clock.
    pieces += buffer.push(Packet(8, FRAME_TICKS + RTP_RATE // 2, PAYLOAD, 500 * MS))
    gap = next(p for p in pieces if isinstance(p, Gap))
    assert (gap.num_ticks, gap.is_loss) == (RTP_RATE // 2, False)
    assert buffer.num_lost == 0


def test_another_stream_on_the_same_line() -> None:
    buffer = ReceiveBuffer()
    for n in range(10):
        buffer.push(Packet(n, n * FRAME_TICKS, PAYLOAD, n * 20 * MS))
    pieces = [p for n in range(3) for p in buffer.push(Packet(30_000 + n, n * 960, PAYLOAD, 0))]
    assert [p.sequence_number for p in pieces if isinstance(p, Packet)] == [30_000, 30_001, 30_002]
    assert buffer.num_resets == 1
    # A sender that starts over with numbers just passed is understood after a few packets.
    pieces = [p for n in range(8) for p in buffer.push(Packet(29_980 + n, n, PAYLOAD, 0))]
    assert [p.sequence_number for p in pieces if isinstance(p, Packet)][-1] == 29_987


def test_what_waits_is_bounded() -> None:
    buffer = ReceiveBuffer()
    buffer.push(Packet(0, 0, PAYLOAD, 0))
    pieces: list[Piece] = []
    for n in range(2, 2_000, 2):  # every second one is missing, and no time passes
        pieces += buffer.push(Packet(n, n * FRAME_TICKS, PAYLOAD, 0))
        assert len(buffer._held) <= MAX_HELD
    assert len([p for p in pieces if isinstance(p, Packet)]) >= 900


@pytest.mark.parametrize(
    "payload, ms",
    [
        (b"", 0),
        (bytes([9 << 3]), 20),  # SILK wideband
        (bytes([11 << 3]), 60),
        (bytes([12 << 3 | 1]), 20),  # hybrid, two frames of 10 ms
        (bytes([16 << 3]), 2.5),  # CELT
        (bytes([19 << 3 | 2]), 40),
        (bytes([19 << 3 | 3, 5]), 100),
        (bytes([11 << 3 | 3, 63]), 120),  # more than is allowed
        (bytes([19 << 3 | 3]), 0),
    ],
)
def test_length_of_opus_packets(payload: bytes, ms: float) -> None:
    assert opus_ticks(payload) == ms * 48
