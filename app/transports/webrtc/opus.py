"""Opus (RFC 6716) both ways, through the libopus that PyAV brings.

The decoder gives 48 kHz mono: libopus itself mixes stereo down, so that a voice on both channels
comes out as loud as it was. The encoder takes the 24 kHz that the synthesiser's output has anyway;
Opus needs no resampling for it.
"""

from __future__ import annotations

from fractions import Fraction

import av
import numpy as np
from av.audio.frame import AudioFrame

from app.transports.webrtc.libopus import OpusLibDecoder
from audio.frame import Samples, silence

DECODED_RATE = 48_000
ENCODED_RATE = 24_000
FRAME_S = 0.02
FRAME_SAMPLES = ENCODED_RATE // 50
"""Samples of one encoded frame: 20 ms."""

# Speech at 24 kHz is transparent well below this.
_BIT_RATE = 32_000
# Half of libopus' highest: 0.15 ms a frame less, and nobody hears it at this rate.
_COMPLEXITY = 5
# A longer gap in one call would be a mistake of ours (the receive buffer makes at most 1 s).
_MAX_CONCEALED = 2 * DECODED_RATE
# Of a long gap so much is made up, fading from the half on: libopus would go on with the voice's
# hum for a second and more, and the end of a turn is found in silence.
_MAX_MADE_UP = DECODED_RATE // 10
# What a packet may repeat of the one before it: a frame, usually this long.
_REPEATED = DECODED_RATE // 50


class OpusDecoder:
    """One incoming stream: packets and gaps to float32 mono samples at 48 kHz."""

    def __init__(self) -> None:
        self._decoder = OpusLibDecoder(DECODED_RATE)
        self.num_bad = 0

    def decode(self, payload: bytes) -> Samples:
        """Samples [n] of one packet; one that is damaged is counted, and nothing comes of it."""
        if not payload:
            return silence(0)
        samples = self._decoder.decode(payload)
        if samples is None:
            self.num_bad += 1
            return silence(0)
        return samples

    def conceal(self, num_samples: int, following: bytes = b"") -> Samples:
        """Samples [num_samples] in place of packets that were lost before ``following``.

        The last frame is repaired from what ``following`` repeats of it, if its encoder does so.
        """
        num_samples = min(num_samples, _MAX_CONCEALED)
        if num_samples <= _MAX_MADE_UP + _REPEATED:
            return self._decoder.make_up(num_samples, following)
        made = self._decoder.make_up(_MAX_MADE_UP)
        fading = _MAX_MADE_UP // 2
        made[-fading:] *= np.linspace(1.0, 0.0, fading, dtype=np.float32)
        hole = silence(num_samples - _MAX_MADE_UP - _REPEATED)
        return np.concatenate((made, hole, self._decoder.make_up(_REPEATED, following)))

    def pause(self, num_samples: int) -> Samples:
        """Samples [num_samples] of silence for a time in which the peer sent nothing."""
        return silence(min(num_samples, _MAX_CONCEALED))


class OpusEncoder:
    """One outgoing stream: frames of 20 ms to packets."""

    def __init__(self) -> None:
        codec = av.CodecContext.create("libopus", "w")
        codec.sample_rate = ENCODED_RATE
        codec.layout = "mono"
        codec.format = "s16"
        codec.bit_rate = _BIT_RATE
        codec.time_base = Fraction(1, ENCODED_RATE)
        codec.options = {
            "application": "voip",
            "frame_duration": "20",
            "compression_level": str(_COMPLEXITY),
            # In-band redundancy: the peer repairs a lost packet from the next one.
            "fec": "1",
            "packet_loss": "5",
        }
        self._codec = codec
        self._position = 0

    def encode(self, pcm: bytes) -> bytes:
        """One packet of ``FRAME_SAMPLES`` little-endian 16-bit samples."""
        samples = np.frombuffer(pcm, dtype="<i2").astype(np.int16, copy=False).reshape(1, -1)
        assert samples.shape[1] == FRAME_SAMPLES, samples.shape
        frame = AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate = ENCODED_RATE
        frame.pts = self._position
        frame.time_base = Fraction(1, ENCODED_RATE)
        self._position += FRAME_SAMPLES
        return b"".join(bytes(packet) for packet in self._codec.encode(frame))
