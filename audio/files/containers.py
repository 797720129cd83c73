"""Uploaded recordings in any common container, decoded to speech for the recogniser.

The format is detected from the first bytes, never from the name. FFmpeg (through PyAV) decodes
packet by packet, so that memory depends on the real duration and not on what headers claim.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream
from av.container import InputContainer

from audio.errors import AbandonedError, AudioFormatError
from audio.files.reader import MAX_RATE, MIN_RATE
from audio.frame import SPEECH_RATE, Samples

EXPECTED = "expected a WAV, FLAC, Ogg, MP3, AAC, MP4 (M4A) or WebM file"

# Formats of self-synchronising frames. After the last frame many files have other data (tags,
# garbage), which every player skips.
_FRAMED = ("mp3", "aac")

# Offset, magic bytes, FFmpeg's name of the format. No other format is tried: playlists, for one,
# refer to other files.
_SIGNATURES = (
    (0, b"RIFF", "wav"),
    (0, b"fLaC", "flac"),
    (0, b"OggS", "ogg"),
    (0, b"ID3", "mp3"),
    (4, b"ftyp", "mov"),
    (0, b"\x1aE\xdf\xa3", "matroska"),
)


def read_speech(
    content: bytes, *, max_s: float, is_wanted: Callable[[], bool] = lambda: True
) -> Samples:
    """Decode the first audio track of ``content`` to float32 [n] at 16 kHz, channels mixed.

    ``is_wanted`` is polled between blocks. Raises AudioFormatError for other formats, damaged
    files, files without audio, and those longer than ``max_s``; AbandonedError when cancelled.
    """
    blocks: list[Samples] = []
    num_samples = 0
    try:
        for block in _blocks(content):
            if not is_wanted():
                raise AbandonedError("nobody waits for this recording any more")
            blocks.append(block)
            num_samples += block.size
            if num_samples > max_s * SPEECH_RATE:
                raise AudioFormatError(f"the recording is longer than {max_s:g} s")
    except av.FFmpegError as error:
        raise AudioFormatError(_broken(num_samples / SPEECH_RATE, error)) from error
    if not num_samples:
        raise AudioFormatError("there is no sound in the recording")
    samples = np.concatenate(blocks)
    if not np.isfinite(samples).all():
        raise AudioFormatError("the recording holds samples that are not finite numbers")
    return np.clip(samples, -1.0, 1.0, out=samples)


def _broken(good_s: float, error: av.FFmpegError) -> str:
    """Error message for a recording that could be decoded up to ``good_s``."""
    if good_s < 0.1:
        return f"the recording cannot be decoded: {error.strerror}"
    return (
        f"the recording is damaged after {good_s:.1f} s: what stands there cannot be decoded "
        f"({error.strerror})"
    )


def _blocks(content: bytes) -> Iterator[Samples]:
    file_format = _format_of(content)
    with av.open(
        io.BytesIO(content),
        "r",
        format=file_format,
        metadata_errors="replace",
        io_open=_no_other_file,
    ) as container:
        if not container.streams.audio:
            raise AudioFormatError("there is no sound in the recording")
        stream = container.streams.audio[0]
        if stream.codec_context is None:
            raise AudioFormatError("the recording is in an encoding that is not known")
        stream.codec_context.thread_count = 1
        resampler, last = _resampler(), None
        for frame in _frames(container, stream, skips_bad=file_format in _FRAMED):
            if not MIN_RATE <= frame.sample_rate <= MAX_RATE:
                raise AudioFormatError(
                    f"the recording says that its sample rate is {frame.sample_rate} Hz: expected "
                    f"{MIN_RATE} to {MAX_RATE} Hz"
                )
            kind = (frame.sample_rate, frame.layout.name, frame.format.name)
            if last not in (None, kind):  # concatenated files
                yield from _resampled(resampler, None)
                resampler = _resampler()
            last = kind
            frame.pts = None  # ignore gaps between timestamps
            yield from _resampled(resampler, frame)
        yield from _resampled(resampler, None)


def _frames(
    container: InputContainer, stream: AudioStream, *, skips_bad: bool
) -> Iterator[AudioFrame]:
    """Decoded frames of ``stream``, in order.

    ``skips_bad``: packets that cannot be decoded are skipped, as long as most can. Otherwise only
    the last packet may be bad, in a file that is cut off. Raises av.FFmpegError.
    """
    num_decoded = num_lost = 0
    packets = container.demux(stream)
    for packet in packets:
        try:
            frames = packet.decode()
        except av.FFmpegError:
            num_lost += 1
            if not skips_bad and (not num_decoded or any(more.size for more in packets)):
                raise
            continue
        num_decoded += 1
        yield from frames
    if num_lost > num_decoded:
        raise AudioFormatError("most of the recording cannot be decoded")


def _resampler() -> AudioResampler:
    return AudioResampler(format="flt", layout="mono", rate=SPEECH_RATE)


def _resampled(resampler: AudioResampler, frame: AudioFrame | None) -> Iterator[Samples]:
    for made in resampler.resample(frame):
        yield made.to_ndarray().reshape(-1).astype(np.float32, copy=False)


def _format_of(content: bytes) -> str:
    for at, sign, name in _SIGNATURES:
        if content.startswith(sign, at):
            return name
    # MPEG audio frames begin with eleven set bits; layer 0 is AAC.
    if len(content) > 2 and content[0] == 0xFF and content[1] & 0xE0 == 0xE0:
        return "aac" if content[1] & 0x06 == 0 else "mp3"
    raise AudioFormatError(EXPECTED)


def _no_other_file(*_: Any) -> Any:
    raise AudioFormatError("the recording refers to another file")
