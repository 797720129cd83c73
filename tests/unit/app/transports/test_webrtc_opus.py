"""Opus in and out: channels, rates, levels, and packets that are not what they should be."""

from __future__ import annotations

from fractions import Fraction

import av
import numpy as np
import numpy.typing as npt
import pytest
from av import AudioFrame

from app.transports.webrtc.jitter import opus_ticks
from app.transports.webrtc.opus import (
    DECODED_RATE,
    ENCODED_RATE,
    FRAME_SAMPLES,
    OpusDecoder,
    OpusEncoder,
)
from audio.frame import Samples

Pcm = npt.NDArray[np.int16]
LEVEL = 0.3


def sine(seconds: float, rate: int, hz: float = 440.0) -> npt.NDArray[np.float64]:
    return LEVEL * np.sin(2 * np.pi * hz * np.arange(int(seconds * rate)) / rate)


def packets_of(channels: list[npt.NDArray[np.float64]]) -> list[bytes]:
    """Opus packets of 20 ms as a peer makes them: 48 kHz, one or two channels."""
    codec = av.CodecContext.create("libopus", "w")
    codec.sample_rate, codec.format, codec.bit_rate = 48_000, "s16", 64_000
    codec.layout = layout = "stereo" if len(channels) == 2 else "mono"
    codec.time_base = Fraction(1, 48_000)
    packed = (np.stack(channels, axis=1) * 32_767).astype(np.int16).reshape(1, -1)
    step = 960 * len(channels)
    packets = []
    for start in range(0, packed.shape[1], step):
        frame = AudioFrame.from_ndarray(
            packed[:, start : start + step], format="s16", layout=layout
        )
        frame.sample_rate = 48_000
        packets += [bytes(packet) for packet in codec.encode(frame)]
    return packets


def decoded(packets: list[bytes]) -> Samples:
    decoder = OpusDecoder()
    return np.concatenate([decoder.decode(packet) for packet in packets])


def pitch(samples: Samples, rate: int) -> float:
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(np.argmax(spectrum)) * rate / len(samples)


@pytest.mark.parametrize("kind", ["mono", "both", "left"])
def test_channels_are_mixed_down(kind: str) -> None:
    """Stereo is neither half as fast (taken for mono) nor twice as loud (added up)."""
    voice = sine(1.0, 48_000)
    channels = {"mono": [voice], "both": [voice, voice], "left": [voice, 0 * voice]}[kind]
    samples = decoded(packets_of(channels))
    assert len(samples) == DECODED_RATE
    middle = samples[DECODED_RATE // 4 : -DECODED_RATE // 4]
    assert pitch(middle, DECODED_RATE) == pytest.approx(440.0, abs=3)
    loud = float(np.sqrt(np.mean(middle**2))) * np.sqrt(2)
    assert loud == pytest.approx(LEVEL / 2 if kind == "left" else LEVEL, rel=0.08)


def test_our_packets_are_20_ms_and_sound_as_they_should() -> None:
    pcm = (sine(1.0, ENCODED_RATE) * 32_767).astype("<i2")
    encoder = OpusEncoder()
    packets = [
        encoder.encode(pcm[start : start + FRAME_SAMPLES].tobytes())
        for start in range(0, len(pcm), FRAME_SAMPLES)
    ]
    assert len(packets) == 50
    assert {opus_ticks(packet) for packet in packets} == {960}
    assert sum(map(len, packets)) < 8_000  # 64 kbit/s
    samples = decoded(packets)
    assert pitch(samples[12_000:-12_000], DECODED_RATE) == pytest.approx(440.0, abs=3)
    assert float(np.abs(samples[12_000:-12_000]).max()) == pytest.approx(LEVEL, rel=0.1)


def test_damaged_packets_are_counted_and_nothing_else() -> None:
    packets = packets_of([sine(0.5, 48_000)])
    decoder = OpusDecoder()
    good = [decoder.decode(packet) for packet in packets[:10]]
    assert len(decoder.decode(b"")) == 0
    assert len(decoder.decode(bytes([19 << 3 | 3, 0]))) == 0
    assert decoder.num_bad == 1
    more = [decoder.decode(packet) for packet in packets[10:]]
    assert sum(map(len, good + more)) == DECODED_RATE // 2


def test_a_lost_packet_leaves_no_hole() -> None:
    packets = packets_of([sine(1.0, 48_000)])
    decoder = OpusDecoder()
    parts = [decoder.decode(packet) for packet in packets[:20]]
    parts.append(decoder.conceal(960))
    parts += [decoder.decode(packet) for packet in packets[21:]]
    samples = np.concatenate(parts)
    assert len(samples) == DECODED_RATE
    lost = samples[20 * 960 : 21 * 960]
    assert float(np.sqrt(np.mean(lost**2))) > 0.3 * LEVEL / np.sqrt(2)
