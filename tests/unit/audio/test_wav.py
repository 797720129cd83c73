"""Reading a user's file: every kind that people have, and clear words for what is broken."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf

from audio.codecs import PCMU_8K, encode
from audio.errors import AudioError, AudioFormatError
from audio.files.reader import read_audio

TONE = (0.4 * np.sin(2 * np.pi * 440 * np.arange(8_000) / 16_000)).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "rate", "subtype", "tolerance"),
    [
        ("a.wav", 16_000, "PCM_16", 1e-4),
        ("a.wav", 8_000, "PCM_16", 1e-4),
        ("a.wav", 44_100, "PCM_24", 1e-6),
        ("a.wav", 22_050, "PCM_U8", 0.01),
        ("a.wav", 16_000, "FLOAT", 0.0),
        ("a.wav", 16_000, "DOUBLE", 1e-7),
        ("a.wav", 8_000, "ULAW", 0.02),
        ("a.wav", 8_000, "ALAW", 0.02),
        ("a.flac", 48_000, "PCM_16", 1e-4),
    ],
)
def test_common_files(tmp_path: Path, name: str, rate: int, subtype: str, tolerance: float) -> None:
    sf.write(tmp_path / name, TONE, rate, subtype=subtype)
    samples, got_rate = read_audio(tmp_path / name)
    assert got_rate == rate
    assert samples.dtype == np.float32
    np.testing.assert_allclose(samples, TONE, atol=tolerance)


def test_stereo_is_mixed_down(tmp_path: Path) -> None:
    sf.write(tmp_path / "s.wav", np.stack([TONE, np.zeros_like(TONE)], axis=1), 48_000)
    samples, rate = read_audio(tmp_path / "s.wav")
    assert rate == 48_000
    assert samples.shape == TONE.shape
    np.testing.assert_allclose(samples, TONE / 2, atol=1e-4)


def test_headerless_mulaw_by_its_suffix(tmp_path: Path) -> None:
    (tmp_path / "call.ulaw").write_bytes(encode(TONE, PCMU_8K))
    samples, rate = read_audio(tmp_path / "call.ulaw")
    assert rate == 8_000
    np.testing.assert_allclose(samples, TONE, atol=0.02)


def test_float_samples_beyond_full_scale_are_clipped(tmp_path: Path) -> None:
    sf.write(tmp_path / "loud.wav", TONE * 5, 16_000, subtype="FLOAT")
    samples, _ = read_audio(tmp_path / "loud.wav")
    assert np.abs(samples).max() == 1.0


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(AudioError, match="cannot read .*No such file"):
        read_audio(tmp_path / "none.wav")
    with pytest.raises(AudioError, match="cannot read .*directory"):
        read_audio(tmp_path)


def test_empty_file(tmp_path: Path) -> None:
    (tmp_path / "e.wav").write_bytes(b"")
    with pytest.raises(AudioFormatError, match=r"empty file .*expected a WAV, FLAC or Ogg"):
        read_audio(tmp_path / "e.wav")


@pytest.mark.parametrize(
    "content", [b"hello, I am a text\n" * 20, b"\x89PNG\r\n\x1a\n" + b"\0" * 99]
)
def test_not_audio(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.wav").write_bytes(content)
    expected = r"audio \([A-Z][a-z ]+\): expected a WAV, FLAC or Ogg"
    with pytest.raises(AudioFormatError, match=expected):
        read_audio(tmp_path / "t.wav")


@pytest.mark.parametrize("name", ["a.raw", "a.RAW", "a.pcm"])
def test_raw_audio_says_what_to_do(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(TONE.tobytes())
    with pytest.raises(AudioFormatError, match=r"is raw audio.*Convert it to WAV"):
        read_audio(tmp_path / name)


@pytest.mark.parametrize(
    "name", ["a", "a.", ".wav", "a.vox", "a.gsm", "a.au", "a.txt", "a\udcff.b"]
)
def test_a_name_does_not_matter(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"hello, I am a text\n" * 20)
    with pytest.raises(AudioFormatError, match="not readable audio"):
        read_audio(path)
    sf.write(tmp_path / "good.wav", TONE, 16_000)
    path.write_bytes((tmp_path / "good.wav").read_bytes())
    samples, rate = read_audio(path)
    assert (samples.size, rate) == (TONE.size, 16_000)


def test_header_without_samples(tmp_path: Path) -> None:
    sf.write(tmp_path / "z.wav", np.zeros(0, np.float32), 16_000)
    with pytest.raises(AudioFormatError, match="no samples"):
        read_audio(tmp_path / "z.wav")


@pytest.mark.parametrize("keep", [0.3, 0.99])
@pytest.mark.parametrize("name", ["t.wav", "t.flac"])
def test_truncated_file(tmp_path: Path, name: str, keep: float) -> None:
    path = tmp_path / name
    sf.write(path, np.random.default_rng(0).uniform(-0.5, 0.5, 50_000), 16_000)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(AudioFormatError, match="truncated|not readable"):
        read_audio(path)


@pytest.mark.parametrize("keep", [3, 11, 20, 40])
def test_truncated_in_the_header(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "h.wav"
    sf.write(path, TONE, 16_000)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(AudioFormatError, match=r"h\.wav"):
        read_audio(path)


def test_a_streamed_wav_of_unknown_length_is_read(tmp_path: Path) -> None:
    path = tmp_path / "pipe.wav"
    sf.write(path, TONE, 16_000, subtype="PCM_16")
    content = bytearray(path.read_bytes())
    at = content.index(b"data") + 4
    struct.pack_into("<I", content, at, 0xFFFFFFFF)
    struct.pack_into("<I", content, 4, 0xFFFFFFFF)
    path.write_bytes(content)
    samples, _ = read_audio(path)
    assert len(samples) == len(TONE)


def test_an_odd_chunk_before_the_audio_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "list.wav"
    sf.write(path, TONE, 16_000, subtype="PCM_16")
    content = path.read_bytes()
    at = content.index(b"data")
    chunk = b"note" + struct.pack("<I", 3) + b"abc\0"
    path.write_bytes(content[:at] + chunk + content[at:])
    samples, _ = read_audio(path)
    np.testing.assert_allclose(samples, TONE, atol=1e-4)


def test_samples_that_are_not_numbers(tmp_path: Path) -> None:
    broken = TONE.copy()
    broken[100] = np.nan
    sf.write(tmp_path / "nan.wav", broken, 16_000, subtype="FLOAT")
    with pytest.raises(AudioFormatError, match="not finite numbers"):
        read_audio(tmp_path / "nan.wav")


def test_a_rate_that_no_recording_has(tmp_path: Path) -> None:
    path = tmp_path / "x.wav"
    for rate in (1, 3_999, 768_001):
        sf.write(path, np.zeros(100, np.float32), rate)
        with pytest.raises(AudioFormatError, match=f"{rate} Hz: expected 4000 to 768000 Hz"):
            read_audio(path)
    sf.write(path, np.zeros(100, np.float32), 4_000)
    assert read_audio(path)[1] == 4_000
