"""The decoder of libopus, called directly: FFmpeg's wrapper neither conceals nor repairs.

The library is the one that PyAV's wheels bring; where PyAV was built on the machine's own FFmpeg,
it is the machine's. Importing this module without any raises ModuleNotFoundError, as a Python
package that is missing would.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import weakref
from pathlib import Path

import av
import numpy as np

from audio.frame import Samples

_MAX_PACKET_MS = 120  # RFC 6716, section 3.2.5


def _load() -> ctypes.CDLL:
    package = Path(av.__file__).resolve().parent
    folders = (package.parent / "av.libs", package / ".dylibs")
    brought = [str(path) for folder in folders for path in sorted(folder.glob("*opus*"))]
    name = brought[0] if brought else ctypes.util.find_library("opus")
    if name is None:
        raise ModuleNotFoundError("libopus is neither in PyAV nor on this machine", name="libopus")
    return ctypes.CDLL(name)


_LIB = _load()
_LIB.opus_decoder_create.restype = ctypes.c_void_p
_LIB.opus_decoder_create.argtypes = [
    ctypes.c_int32,
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_int),
]
_LIB.opus_decoder_destroy.restype = None
_LIB.opus_decoder_destroy.argtypes = [ctypes.c_void_p]
_LIB.opus_decode_float.restype = ctypes.c_int
_LIB.opus_decode_float.argtypes = [
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_int,
]


class OpusLibDecoder:
    """One mono stream at ``rate`` samples a second (8,000 to 48,000, as Opus has them)."""

    def __init__(self, rate: int) -> None:
        error = ctypes.c_int()
        self._state = _LIB.opus_decoder_create(rate, 1, ctypes.byref(error))
        if not self._state:
            raise ValueError(f"libopus makes no decoder for {rate} Hz: error {error.value}")
        weakref.finalize(self, _LIB.opus_decoder_destroy, self._state)
        self._longest = rate * _MAX_PACKET_MS // 1000
        self._step = rate // 400  # libopus makes up multiples of 2.5 ms

    def decode(self, packet: bytes) -> Samples | None:
        """Samples [n] of a packet; None: it is damaged."""
        return self._call(packet, self._longest, repair=False)

    def make_up(self, num_samples: int, following: bytes = b"") -> Samples:
        """Samples [num_samples] in place of packets that were lost before ``following``.

        What ``following`` repeats of the last of them (in-band FEC, RFC 6716, section 2.1.7) is
        used; the rest, or all, is libopus' concealment.
        """
        made = num_samples - num_samples % self._step
        samples = np.zeros(num_samples, np.float32)
        if made:
            found = self._call(following, made, repair=True) if following else None
            if found is None:
                found = self._call(b"", made, repair=False)
            if found is not None:
                samples[: len(found)] = found
        return samples

    def _call(self, packet: bytes, room: int, *, repair: bool) -> Samples | None:
        samples = np.empty(room, np.float32)
        num = _LIB.opus_decode_float(
            self._state, packet or None, len(packet), samples.ctypes.data, room, int(repair)
        )
        return samples[:num] if num >= 0 else None
