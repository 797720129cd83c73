"""Wire encodings: little-endian 16-bit PCM, and mu-law and A-law of ITU-T G.711.

Both directions of G.711 are table lookups: 256 entries to decode, 65,536 to encode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from audio.errors import AudioFormatError
from audio.frame import Samples

Encoding = Literal["pcm16", "pcmu", "pcma"]

PCM16_SCALE = 32768.0


@dataclass(frozen=True, slots=True)
class AudioFormat:
    """Encoding and sample rate (Hz) of mono audio on the wire."""

    encoding: Encoding
    rate: int

    @property
    def sample_len(self) -> int:
        """Bytes of one sample."""
        return 2 if self.encoding == "pcm16" else 1


PCM16_24K = AudioFormat("pcm16", 24_000)
PCMU_8K = AudioFormat("pcmu", 8_000)
PCMA_8K = AudioFormat("pcma", 8_000)


def decode(payload: bytes, fmt: AudioFormat) -> Samples:
    """Samples float32 [n] in [-1, 1) from wire bytes.

    Raises AudioFormatError when ``payload`` ends in the middle of a 16-bit sample.
    """
    if fmt.encoding == "pcm16":
        if len(payload) % 2:
            raise AudioFormatError(
                f"pcm16 audio has an odd number of bytes ({len(payload)}): every sample is two "
                "bytes, little-endian"
            )
        pcm = np.frombuffer(payload, dtype="<i2")
        return pcm.astype(np.float32) * np.float32(1.0 / PCM16_SCALE)
    return _DECODE[fmt.encoding][np.frombuffer(payload, dtype=np.uint8)]


def encode(samples: Samples, fmt: AudioFormat) -> bytes:
    """Wire bytes of float samples [n]; values beyond [-1, 1] are clipped, NaN becomes 0."""
    pcm = to_pcm16(samples)
    if fmt.encoding == "pcm16":
        return pcm.astype("<i2", copy=False).tobytes()
    return _ENCODE[fmt.encoding][pcm.view(np.uint16)].tobytes()


def to_pcm16(samples: Samples) -> npt.NDArray[np.int16]:
    """Samples [n] as native int16 [n]: scaled by 32768, rounded, clipped, NaN-free."""
    scaled = np.asarray(samples, dtype=np.float32) * np.float32(PCM16_SCALE)
    clean = np.nan_to_num(scaled, copy=False, nan=0.0, posinf=PCM16_SCALE, neginf=-PCM16_SCALE)
    pcm: npt.NDArray[np.int16] = np.clip(np.rint(clean), -32768, 32767).astype(np.int16)
    return pcm


def _mulaw_levels() -> npt.NDArray[np.int32]:
    """Linear 16-bit value of each of the 256 mu-law codes (G.711 table 2a/2b, times 4)."""
    code = ~np.arange(256, dtype=np.int32) & 0xFF
    magnitude = (((code & 0x0F) << 3) + 0x84 << ((code >> 4) & 7)) - 0x84
    return np.where(code & 0x80, -magnitude, magnitude)


def _alaw_levels() -> npt.NDArray[np.int32]:
    """Linear 16-bit value of each of the 256 A-law codes (G.711 table 1a/1b, times 8)."""
    code = np.arange(256, dtype=np.int32) ^ 0x55
    segment = (code >> 4) & 7
    mantissa = ((code & 0x0F) << 4) + 8
    magnitude = np.where(segment == 0, mantissa, (mantissa + 0x100) << np.maximum(segment - 1, 0))
    return np.where(code & 0x80, magnitude, -magnitude)


def _mulaw_codes() -> npt.NDArray[np.uint8]:
    """Mu-law code of every int16, indexed by its bits as uint16."""
    pcm = np.arange(65_536, dtype=np.uint16).view(np.int16).astype(np.int32)
    biased = np.minimum(np.abs(pcm), 32_635) + 0x84
    segment = _floor_log2(biased) - 7
    mantissa = (biased >> (segment + 3)) & 0x0F
    sign = np.where(pcm < 0, 0x80, 0)
    codes: npt.NDArray[np.uint8] = (~(sign | (segment << 4) | mantissa) & 0xFF).astype(np.uint8)
    return codes


def _alaw_codes() -> npt.NDArray[np.uint8]:
    """A-law code of every int16, indexed by its bits as uint16."""
    pcm = np.arange(65_536, dtype=np.uint16).view(np.int16).astype(np.int32)
    # The negative half is the one's complement: -1 belongs to the first negative interval.
    magnitude = np.where(pcm < 0, ~pcm, pcm) >> 4
    segment = np.maximum(_floor_log2(np.maximum(magnitude, 1)) - 3, 0)
    segment = np.where(magnitude < 16, 0, segment)
    mantissa = (magnitude >> np.maximum(segment - 1, 0)) & 0x0F
    sign = np.where(pcm < 0, 0, 0x80)
    codes: npt.NDArray[np.uint8] = ((sign | (segment << 4) | mantissa) ^ 0x55).astype(np.uint8)
    return codes


def _floor_log2(values: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Position of the highest set bit of positive integers below 2**24."""
    return (np.frexp(values.astype(np.float64))[1] - 1).astype(np.int32)


_DECODE: dict[Encoding, Samples] = {
    "pcmu": (_mulaw_levels() / PCM16_SCALE).astype(np.float32),
    "pcma": (_alaw_levels() / PCM16_SCALE).astype(np.float32),
}
_ENCODE: dict[Encoding, npt.NDArray[np.uint8]] = {
    "pcmu": _mulaw_codes(),
    "pcma": _alaw_codes(),
}
