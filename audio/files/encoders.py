"""Streaming encoders of audio files: each chunk of samples becomes bytes at once.

A file that is sent while it is made cannot be rewritten, so headers declare an unknown length.
"""

from __future__ import annotations

import struct
from typing import Literal, Protocol

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream

from audio.codecs import AudioFormat, encode, to_pcm16
from audio.frame import Samples

FileFormat = Literal["wav", "pcm", "mp3", "opus", "aac", "flac"]

MEDIA_TYPES: dict[FileFormat, str] = {
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
}

# Container, codec, and bit rate for speech (0: the codec has none).
_CODED: dict[FileFormat, tuple[str, str, int]] = {
    "mp3": ("mp3", "libmp3lame", 64_000),
    "opus": ("ogg", "libopus", 32_000),
    "aac": ("adts", "aac", 64_000),
    "flac": ("flac", "flac", 0),
}
_OPTIONS = {
    # The Xing header would be written back at the start of the file, which is sent already.
    "mp3": {"write_xing": "0"},
    # Pages of 0.2 s; by default a whole second is held back.
    "ogg": {"page_duration": "200000"},
}
_UNKNOWN_LEN = 0xFFFFFFFF


class Encoder(Protocol):
    """Encoder of one file."""

    def encode(self, samples: Samples) -> bytes:
        """Encode ``samples`` float32 [n]; a codec may hold some back."""

    def finish(self) -> bytes:
        """The rest of the file; no more samples may follow."""


def make_encoder(file_format: FileFormat, rate: int) -> Encoder:
    """Encoder for mono speech at ``rate`` Hz."""
    if file_format == "pcm":
        return _Pcm(rate)
    if file_format == "wav":
        return _Wav(rate)
    return _Coded(*_CODED[file_format], rate)


class _Pcm:
    """16-bit little-endian samples without a header."""

    def __init__(self, rate: int) -> None:
        self._format = AudioFormat("pcm16", rate)

    def encode(self, samples: Samples) -> bytes:
        return encode(samples, self._format)

    def finish(self) -> bytes:
        return b""


class _Wav(_Pcm):
    def __init__(self, rate: int) -> None:
        super().__init__(rate)
        fmt = struct.pack("<HHIIHH", 1, 1, rate, 2 * rate, 2, 16)
        unknown = struct.pack("<I", _UNKNOWN_LEN)
        head = (
            b"RIFF",
            unknown,
            b"WAVE",
            b"fmt ",
            struct.pack("<I", len(fmt)),
            fmt,
            b"data",
            unknown,
        )
        self._header = b"".join(head)

    def encode(self, samples: Samples) -> bytes:
        header, self._header = self._header, b""
        return header + super().encode(samples)

    def finish(self) -> bytes:
        return self.encode(np.zeros(0, np.float32))  # without any samples, the header is still due


class _Coded:
    """A codec of FFmpeg in a container that is written sequentially."""

    def __init__(self, container: str, codec: str, bit_rate: int, rate: int) -> None:
        self._rate = rate
        self._written = _Written()
        self._num_samples = 0
        options = {"flush_packets": "1", **_OPTIONS.get(container, {})}
        self._container = av.open(self._written, "w", format=container, options=options)
        stream = self._container.add_stream(codec, rate=rate, layout="mono")
        assert isinstance(stream, AudioStream), "all codecs are audio codecs"
        self._stream = stream
        if bit_rate:
            self._stream.bit_rate = bit_rate

    def encode(self, samples: Samples) -> bytes:
        if len(samples):
            frame = AudioFrame.from_ndarray(to_pcm16(samples)[None, :], format="s16", layout="mono")
            frame.sample_rate = self._rate
            frame.pts = self._num_samples
            self._num_samples += len(samples)
            self._container.mux(self._stream.encode(frame))
        return self._written.take()

    def finish(self) -> bytes:
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._written.take()


class _Written:
    """Output file of FFmpeg; without ``seek`` it is written sequentially."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def write(self, data: bytes) -> int:
        self._bytes += data
        return len(data)

    def take(self) -> bytes:
        taken = bytes(self._bytes)
        self._bytes.clear()
        return taken
