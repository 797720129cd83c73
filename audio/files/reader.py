"""Read local audio files: WAV, FLAC, Ogg (libsndfile), and headerless G.711 (.ulaw, .alaw)."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import numpy as np
import soundfile as sf

from audio.codecs import PCMA_8K, PCMU_8K, AudioFormat, decode
from audio.errors import AudioError, AudioFormatError
from audio.frame import Samples

_EXPECTED = (
    "expected a WAV, FLAC or Ogg file (any sample rate, mono or stereo, 16-bit, float or G.711)"
)
_RAW_SUFFIXES = (".raw", ".pcm", ".sln", ".s16le")
_CONTAINERS = (b"RIFF", b"RIFX", b"fLaC", b"OggS")
_HEADERLESS: dict[str, AudioFormat] = {".ulaw": PCMU_8K, ".alaw": PCMA_8K}
MIN_RATE, MAX_RATE = 4_000, 768_000
"""Accepted sample rates. Resampling from 1 Hz, a broken header, would take gigabytes."""
# Written by programs that stream a WAV and cannot fill in its length.
_UNKNOWN_LEN = (0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 0x7FFFFFFF - 36, 0)


def read_audio(path: Path, *, max_s: float | None = None) -> tuple[Samples, int]:
    """Samples float32 [n] in [-1, 1] and their rate; channels are averaged.

    Raises AudioError when the file cannot be read, AudioFormatError when it is empty, not audio,
    truncated, longer than ``max_s`` seconds, without samples, or has a sample rate out of range or
    values that are not finite.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise AudioError(f"cannot read {path}: {error.strerror}") from error
    if not content:
        raise AudioFormatError(f"{path} is an empty file (0 bytes): {_EXPECTED}")
    headerless = _HEADERLESS.get(path.suffix.lower())
    if headerless is not None:
        samples = decode(content, headerless)
        _check_duration(path, samples.size / headerless.rate, max_s)
        return samples, headerless.rate
    if path.suffix.lower() in _RAW_SUFFIXES and not content.startswith(_CONTAINERS):
        raise AudioFormatError(
            f"{path} is raw audio: nothing in it tells its sample rate and encoding. Convert it to "
            "WAV, or, if it is G.711 at 8 kHz, rename it to end in .ulaw or .alaw"
        )
    _check_wav_len(path, content)
    return _read_container(path, content, max_s)


def _check_duration(path: Path, duration_s: float, max_s: float | None) -> None:
    if max_s is not None and duration_s > max_s:
        raise AudioFormatError(f"{path} is {duration_s:.1f} s long: expected at most {max_s:g} s")


def _read_container(path: Path, content: bytes, max_s: float | None) -> tuple[Samples, int]:
    try:
        # As bytes, so that libsndfile goes by the content and not by the name.
        with sf.SoundFile(io.BytesIO(content)) as file:
            rate = int(file.samplerate)
            if not MIN_RATE <= rate <= MAX_RATE:
                raise AudioFormatError(
                    f"{path} says that its sample rate is {rate} Hz: expected {MIN_RATE} to "
                    f"{MAX_RATE} Hz"
                )
            num_expected = len(file)
            _check_duration(path, num_expected / rate, max_s)
            frames = file.read(dtype="float32", always_2d=True)
    except sf.LibsndfileError as error:
        reason = error.error_string.rstrip(".")  # str(error) also names an object in memory
        raise AudioFormatError(f"{path} is not readable audio ({reason}): {_EXPECTED}") from error
    if frames.shape[0] == 0:
        raise AudioFormatError(f"{path} has a valid header but no samples: {_EXPECTED}")
    if frames.shape[0] < num_expected:
        raise AudioFormatError(
            f"{path} is truncated: its header promises {num_expected} samples, "
            f"only {frames.shape[0]} are there"
        )
    samples: Samples = frames.mean(axis=1, dtype=np.float32)
    if not np.isfinite(samples).all():
        raise AudioFormatError(f"{path} holds samples that are not finite numbers")
    return np.clip(samples, -1.0, 1.0), rate


def _check_wav_len(path: Path, content: bytes) -> None:
    """Raises AudioFormatError for a truncated WAV, which libsndfile accepts."""
    if content[:4] not in (b"RIFF", b"RIFX"):
        return
    order = "<" if content[:4] == b"RIFF" else ">"
    pos = 12
    while pos + 8 <= len(content):
        name = content[pos : pos + 4]
        (chunk_len,) = struct.unpack_from(order + "I", content, pos + 4)
        num_present = len(content) - pos - 8
        if name == b"data":
            if num_present < chunk_len and chunk_len not in _UNKNOWN_LEN:
                raise AudioFormatError(
                    f"{path} is truncated: its header promises {chunk_len} bytes of audio, "
                    f"only {num_present} are there"
                )
            return
        pos += 8 + chunk_len + chunk_len % 2  # chunks are padded to an even length
    raise AudioFormatError(f"{path} is a WAV file without audio data (truncated?): {_EXPECTED}")
