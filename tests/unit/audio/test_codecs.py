"""Wire encodings against libsndfile's G.711, and their behaviour on bad input."""

from __future__ import annotations

import io

import numpy as np
import pytest
import soundfile as sf
from hypothesis import given
from hypothesis import strategies as st

from audio.codecs import PCM16_24K, PCMA_8K, PCMU_8K, AudioFormat, decode, encode, to_pcm16
from audio.errors import AudioFormatError

ALL_PCM = np.arange(-32768, 32768, dtype=np.int16)
ALL_SAMPLES = ALL_PCM.astype(np.float32) / np.float32(32768)
G711 = [pytest.param(PCMU_8K, "ULAW", id="pcmu"), pytest.param(PCMA_8K, "ALAW", id="pcma")]


def sndfile_encode(pcm: np.ndarray, subtype: str) -> bytes:
    raw = io.BytesIO()
    sf.write(raw, pcm, 8_000, format="RAW", subtype=subtype)
    return raw.getvalue()


def sndfile_decode(codes: bytes, subtype: str) -> np.ndarray:
    with sf.SoundFile(
        io.BytesIO(codes), samplerate=8_000, channels=1, format="RAW", subtype=subtype
    ) as file:
        return file.read(dtype="int16")


@pytest.mark.parametrize(("fmt", "subtype"), G711)
def test_every_code_decodes_as_in_libsndfile(fmt: AudioFormat, subtype: str) -> None:
    codes = bytes(range(256))
    ours = decode(codes, fmt)
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours * 32768, sndfile_decode(codes, subtype))


def test_every_pcm_value_encodes_to_the_mulaw_code_of_libsndfile() -> None:
    assert encode(ALL_SAMPLES, PCMU_8K) == sndfile_encode(ALL_PCM, "ULAW")


def test_alaw_codes_equal_libsndfile_except_on_a_decision_boundary() -> None:
    """There (negative values, 127 of 65,536) our code, which is CPython's audioop's, is as near."""
    ours = np.frombuffer(encode(ALL_SAMPLES, PCMA_8K), np.uint8)
    theirs = np.frombuffer(sndfile_encode(ALL_PCM, "ALAW"), np.uint8)
    differ = ours != theirs
    assert differ.sum() <= 127
    assert (ALL_PCM[differ] % 16 == 0).all()
    levels = decode(bytes(range(256)), PCMA_8K) * 32768
    our_error = np.abs(levels[ours] - ALL_PCM)
    their_error = np.abs(levels[theirs] - ALL_PCM)
    assert (our_error <= their_error).all()


@pytest.mark.parametrize(("fmt", "subtype"), G711)
def test_every_code_survives_a_round_trip(fmt: AudioFormat, subtype: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    again = np.frombuffer(encode(decode(codes.tobytes(), fmt), fmt), np.uint8)
    if fmt is PCMU_8K:  # 0x7F is minus zero and comes back as plus zero
        codes[0x7F] = 0xFF
    np.testing.assert_array_equal(again, codes)


def test_pcm16_is_little_endian_and_lossless() -> None:
    payload = ALL_PCM.astype("<i2").tobytes()
    samples = decode(payload, PCM16_24K)
    assert samples.min() == -1.0
    assert samples.max() == 32767 / 32768
    assert encode(samples, PCM16_24K) == payload
    assert decode(b"\x00\x40", PCM16_24K)[0] == 0.5


@pytest.mark.parametrize("num_bytes", [1, 3, 4801])
def test_odd_number_of_pcm16_bytes_is_an_error(num_bytes: int) -> None:
    with pytest.raises(AudioFormatError, match=rf"odd number of bytes \({num_bytes}\)"):
        decode(bytes(num_bytes), PCM16_24K)


@pytest.mark.parametrize("fmt", [PCM16_24K, PCMU_8K, PCMA_8K])
def test_nothing_becomes_nothing(fmt: AudioFormat) -> None:
    assert decode(b"", fmt).shape == (0,)
    assert encode(np.zeros(0, np.float32), fmt) == b""


def test_loud_samples_are_clipped_and_nan_is_silence() -> None:
    samples = np.array([2.0, -2.0, np.inf, -np.inf, np.nan, 1.0, -1.0], np.float32)
    np.testing.assert_array_equal(
        to_pcm16(samples), [32767, -32768, 32767, -32768, 0, 32767, -32768]
    )
    assert np.isnan(samples[4])  # the caller's array is left alone


@pytest.mark.parametrize(("fmt", "sample_len"), [(PCM16_24K, 2), (PCMU_8K, 1), (PCMA_8K, 1)])
def test_sample_len(fmt: AudioFormat, sample_len: int) -> None:
    assert fmt.sample_len == sample_len
    assert len(encode(np.zeros(160, np.float32), fmt)) == 160 * sample_len


@given(st.binary(max_size=400), st.sampled_from([PCMU_8K, PCMA_8K, PCM16_24K]))
def test_any_bytes_decode_to_finite_samples(payload: bytes, fmt: AudioFormat) -> None:
    if len(payload) % fmt.sample_len:
        return
    samples = decode(payload, fmt)
    assert len(samples) * fmt.sample_len == len(payload)
    assert np.isfinite(samples).all()
    assert (np.abs(samples) <= 1.0).all()
