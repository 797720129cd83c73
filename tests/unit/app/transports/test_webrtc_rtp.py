"""Packets to sound: real Opus over scripted networks, on a clock of the test.

A packet is sent every 20 ms; the script says when it arrives, if at all.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any, cast

import av
import numpy as np
import pytest
from aiortc.rtp import RtpPacket
from av import AudioFrame

from app.transports.webrtc.opus import DECODED_RATE, ENCODED_RATE, OpusDecoder, OpusEncoder
from app.transports.webrtc.rtp import AudioReceiver, AudioSender
from audio.frame import Samples
from tests.support.fakes import ManualClock

FRAME_MS = 20
FRAME = DECODED_RATE * FRAME_MS // 1000
MS = 1_000_000
# When a packet (by its number) arrives after it was sent, in ms; None: never.
Script = Callable[[int], float | None]


def voice(seconds: float) -> Samples:
    """What Opus takes for a voice: a gliding buzz with a formant, in syllables, at 48 kHz."""
    at = np.arange(int(seconds * DECODED_RATE)) / DECODED_RATE
    phase = np.cumsum(110 + 25 * np.sin(2 * np.pi * 0.7 * at)) / DECODED_RATE
    buzz = sum(np.sin(2 * np.pi * k * phase) / (1 + abs(k - 5)) for k in range(1, 25))
    syllables = 0.35 + 0.65 * np.sin(2 * np.pi * 2.0 * at) ** 2
    return (0.15 * buzz * syllables).astype(np.float32)


def packets_of(samples: Samples, *, has_repeats: bool = True) -> list[bytes]:
    """As a browser encodes: mono, 20 ms, 32 kbit/s, each packet with a rough copy of the last."""
    codec = av.CodecContext.create("libopus", "w")
    codec.sample_rate, codec.layout, codec.format = DECODED_RATE, "mono", "s16"
    codec.bit_rate, codec.time_base = 32_000, Fraction(1, DECODED_RATE)
    codec.options = {"application": "voip", "packet_loss": "10", "fec": str(int(has_repeats))}
    packets = []
    for start in range(0, len(samples) - FRAME + 1, FRAME):
        pcm = (samples[start : start + FRAME] * 32_767).astype(np.int16).reshape(1, -1)
        frame = AudioFrame.from_ndarray(pcm, format="s16", layout="mono")
        frame.sample_rate, frame.pts = DECODED_RATE, start
        packets += [bytes(packet) for packet in codec.encode(frame)]
    return packets


SPEECH = voice(8.0)
PACKETS = packets_of(SPEECH)


class Ear:
    """A receiver on a clock of its own: what was heard, and how late each sample was."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.began_ns = self.clock.now_ns()
        self.receiver = AudioReceiver(111, self.clock, self._hear)
        self.parts: list[Samples] = []
        self.delays_ms: list[tuple[float, float]] = []
        """(when, how long after the last of its samples was spoken), of each part."""

    def _hear(self, samples: Samples, received_ns: int) -> None:
        self.parts.append(samples)
        now_ms = (self.clock.now_ns() - self.began_ns) / MS
        spoken_ms = sum(map(len, self.parts)) * 1000 / DECODED_RATE
        # A frame is sent when it has been spoken to its end: the first at 0 ms of the clock.
        self.delays_ms.append((now_ms, now_ms + FRAME_MS - spoken_ms))

    @property
    def heard(self) -> Samples:
        return np.concatenate(self.parts)

    def _move_to(self, at_ns: int) -> None:
        while (due := self.receiver.buffer.deadline_ns) is not None and due <= at_ns:
            self.clock._now_ns = due
            self.receiver._on_timer()
        self.clock._now_ns = at_ns

    async def listen(self, packets: list[bytes], script: Script) -> Ear:
        arrivals = []
        for number, payload in enumerate(packets):
            if (late_ms := script(number)) is not None:
                at_ns = self.began_ns + int((number * FRAME_MS + late_ms) * MS)
                arrivals.append((at_ns, number, payload))
        for at_ns, number, payload in sorted(arrivals):
            self._move_to(at_ns)
            packet = RtpPacket(
                payload_type=111,
                sequence_number=(65_400 + number) & 0xFFFF,
                timestamp=(2**32 - 9_600 + number * FRAME) & 0xFFFFFFFF,
                ssrc=7,
                payload=payload,
            )
            await self.receiver._handle_rtp_packet(packet, 0)
        self._move_to(self.began_ns + len(packets) * FRAME_MS * MS + 500 * MS)
        self.receiver.close()
        return self


def scripted_loss(percent: float, seed: int = 1) -> Script:
    dice = random.Random(seed)
    lost = {n for n in range(1, len(PACKETS) - 1) if dice.random() < percent / 100}
    return lambda number: None if number in lost else 0.0


def bursts(number: int) -> float | None:
    """Five packets of every fifty are gone."""
    return None if 30 <= number % 50 < 35 else 0.0


def jittery(seed: int = 2) -> Script:
    """Up to 100 ms each on its own, so that most packets overtake others."""
    dice = random.Random(seed)
    # A stream begins with the packet that comes first; here that is the one that was sent first.
    late = [0.0, *(dice.uniform(0.0, 100.0) for _ in PACKETS[1:])]
    return lambda number: late[number]


def lossy_and_jittery() -> Script:
    loss, jitter = scripted_loss(5), jittery()
    return lambda number: None if loss(number) is None else jitter(number)


# The worst and the usual (median) delay that a network may add, in ms. A frame that is lost would
# have come 20 ms before the one that is waited with, for 40 ms where no packet is ever late and up
# to 120 ms where some are.
NETWORKS: dict[str, tuple[Script, float, float]] = {
    "perfect": (lambda number: 0.0, 0.0, 0.0),
    "1% lost": (scripted_loss(1), 60.0, 0.0),
    "5% lost": (scripted_loss(5), 60.0, 0.0),
    "bursts": (bursts, 60.0, 0.0),
    "jitter and reordering": (jittery(), 140.0, 75.0),
    "5% lost, jitter and reordering": (lossy_and_jittery(), 240.0, 90.0),
}


@pytest.mark.parametrize("name", NETWORKS)
async def test_added_delay_is_bounded_and_no_time_is_lost(name: str) -> None:
    script, worst_ms, usual_ms = NETWORKS[name]
    ear = await Ear().listen(PACKETS, script)
    # To the sample, whatever was lost: positions in the audio stay what they are.
    assert len(ear.heard) == len(PACKETS) * FRAME
    delays = [delay for _, delay in ear.delays_ms]
    print(f"{name}: {np.median(delays):.0f} ms, at most {max(delays):.0f} ms")
    assert max(delays) <= worst_ms + 1e-3
    assert float(np.median(delays)) <= usual_ms + 1e-3
    assert min(delays) >= -1e-3


@pytest.mark.parametrize("name", ["5% lost", "bursts", "5% lost, jitter and reordering"])
async def test_all_is_as_before_200_ms_after_a_bad_spell(name: str) -> None:
    script = NETWORKS[name][0]
    bad = range(100, 200)
    ear = await Ear().listen(PACKETS, lambda n: script(n) if n in bad else 0.0)
    again_ms = bad.stop * FRAME_MS + 200
    assert max(delay for at_ms, delay in ear.delays_ms if at_ms >= again_ms) == pytest.approx(0.0)
    # The sound, too: the decoder has forgotten what it had to make up.
    clean = await Ear().listen(PACKETS, lambda n: 0.0)
    after = slice(again_ms * DECODED_RATE // 1000, None)
    assert snr_db(clean.heard[after], ear.heard[after]) > 25


def snr_db(wanted: Samples, got: Samples) -> float:
    """Signal over error, in dB."""
    error = float(np.sum((wanted - got) ** 2)) + 1e-12
    return 10 * float(np.log10(float(np.sum(wanted**2)) / error))


async def test_a_lost_packet_is_repaired_from_the_next_one() -> None:
    """In-band FEC (RFC 6716, section 2.1.7) against concealment alone, in what was lost."""
    lost = range(30, len(PACKETS) - 1, 20)
    script: Script = lambda n: None if n in lost else 0.0  # noqa: E731
    with_repeats = [await Ear().listen(PACKETS, s) for s in (lambda n: 0.0, script)]
    plain = packets_of(SPEECH, has_repeats=False)
    without = [await Ear().listen(plain, s) for s in (lambda n: 0.0, script)]
    where = np.concatenate([np.arange(n * FRAME, (n + 1) * FRAME) for n in lost])
    repaired = snr_db(*(ear.heard[where] for ear in with_repeats))
    concealed = snr_db(*(ear.heard[where] for ear in without))
    print(f"lost frames: {repaired:.1f} dB repaired, {concealed:.1f} dB concealed")
    assert repaired > concealed + 3
    assert concealed > 0  # better than silence


async def test_two_lost_in_a_row_and_odd_gaps_keep_their_length() -> None:
    decoder = OpusDecoder()
    for payload in PACKETS[:50]:
        decoder.decode(payload)
    for num_samples in (0, 1, 119, 120, 961, 2 * FRAME, 5_760, 48_000):
        for following in (b"", PACKETS[52], b"\xff\xff", b"\x00"):
            made = decoder.conceal(num_samples, following)
            assert made.shape == (num_samples,)
            assert np.isfinite(made).all()
    # A second of nothing fades out, it does not hum.
    decoder = OpusDecoder()
    for payload in PACKETS[:50]:
        decoder.decode(payload)
    made = np.abs(decoder.conceal(48_000))
    assert made[:FRAME].max() > 0.05
    assert made[6 * FRAME : -FRAME].max() == 0.0


# --- outgoing ---


class Wire:
    """Stands for the DTLS transport: notes each packet with its instant."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.sent: list[tuple[int, RtpPacket]] = []

    def _register_rtp_sender(self, sender: object, parameters: object) -> None:
        """The real one hands reports to the sender."""

    def _unregister_rtp_sender(self, sender: object) -> None:
        """See ``_register_rtp_sender``."""

    async def _send_rtp(self, data: bytes) -> None:
        self.sent.append((self.clock.now_ns(), RtpPacket.parse(data)))


async def test_no_drift_in_ten_minutes_of_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop wakes late every time, and once by a quarter of a second."""
    silent = OpusEncoder().encode(bytes(ENCODED_RATE // 50 * 2))
    monkeypatch.setattr(OpusEncoder, "encode", lambda self, pcm: silent)
    clock, dice = ManualClock(), random.Random(5)
    wire, began_ns = Wire(clock), clock.now_ns()
    sleeps = 0

    async def oversleep(seconds: float) -> None:
        nonlocal sleeps
        sleeps += 1
        late_s = 0.25 if sleeps == 10_000 else dice.uniform(0.0, 0.004)
        clock._now_ns += int((seconds + late_s) * 1e9)
        if clock.now_ns() - began_ns > 600 * 1_000_000_000:
            raise ConnectionError

    monkeypatch.setattr(clock, "sleep", oversleep)
    sender = AudioSender(111, 7, "cname", clock)
    async with asyncio.timeout(30):
        await sender.run(cast(Any, wire), lambda: b"")
    first = wire.sent[0][1].timestamp
    drifts_ms = [
        (at_ns - began_ns) / MS - ((packet.timestamp - first) & 0xFFFFFFFF) / 48
        for at_ns, packet in wire.sent
    ]
    assert len(wire.sent) + sender.num_skipped_frames == pytest.approx(30_000, abs=3)
    assert sender.num_skipped_frames in (11, 12, 13)
    assert min(drifts_ms) >= -1e-3  # never ahead of the peer's clock
    assert max(drifts_ms[-1_000:]) <= 5.0
