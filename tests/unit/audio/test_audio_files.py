"""Uploaded recordings, files of speech that are sent while they are made, and captions."""

from __future__ import annotations

import io
import random
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
from av.audio.frame import AudioFrame

from audio.asr.word_timing import WordTime
from audio.errors import AbandonedError, AudioFormatError
from audio.files.captions import split_into_lines, to_srt, to_vtt
from audio.files.containers import read_speech
from audio.files.encoders import MEDIA_TYPES, FileFormat, make_encoder
from audio.frame import Samples

RATE = 24_000


def tone(seconds: float, rate: int = RATE) -> Samples:
    at = np.arange(int(seconds * rate)) / rate
    return (0.5 * np.sin(2 * np.pi * 440 * at)).astype(np.float32)


def made(file_format: FileFormat, samples: Samples, piece: int = 5_000) -> list[bytes]:
    encoder = make_encoder(file_format, RATE)
    parts = [encoder.encode(samples[i : i + piece]) for i in range(0, len(samples), piece)]
    return [*parts, encoder.finish()]


def of_container(name: str, codec: str, **options: Any) -> bytes:
    """Two seconds of a tone as a file of FFmpeg's."""
    out = io.BytesIO()
    with av.open(out, "w", format=name) as container:
        stream: Any = container.add_stream(codec, rate=48_000, layout="stereo", **options)
        stereo = np.repeat(tone(2.0, 48_000)[:, None], 2, axis=1).reshape(1, -1)
        frame = AudioFrame.from_ndarray(
            (stereo * 32767).astype(np.int16), format="s16", layout="stereo"
        )
        frame.sample_rate = 48_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return out.getvalue()


def of_soundfile(
    kind: str, subtype: str | None = None, rate: int = 44_100, channels: int = 2
) -> bytes:
    out = io.BytesIO()
    samples = np.repeat(tone(2.0, rate)[:, None], channels, axis=1)
    soundfile.write(out, samples, rate, format=kind, subtype=subtype)
    return out.getvalue()


def pitch_of(samples: Samples) -> float:
    middle = samples[len(samples) // 4 : len(samples) * 3 // 4]
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle))))
    return float(np.argmax(spectrum)) * 16_000 / len(middle)


# --- what comes in ---


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(lambda: of_soundfile("WAV"), id="wav"),
        pytest.param(lambda: of_soundfile("WAV", "FLOAT", 16_000, 1), id="wav of floats"),
        pytest.param(lambda: of_soundfile("WAV", "ULAW", 8_000, 1), id="wav of a telephone"),
        pytest.param(lambda: of_soundfile("WAV", "PCM_24", 192_000, 6), id="wav of six channels"),
        pytest.param(lambda: of_soundfile("FLAC"), id="flac"),
        pytest.param(lambda: of_soundfile("OGG", "VORBIS"), id="ogg"),
        pytest.param(lambda: of_soundfile("OGG", "OPUS", 48_000), id="opus"),
        pytest.param(lambda: of_soundfile("MP3"), id="mp3"),
        pytest.param(lambda: of_container("mp4", "aac"), id="m4a"),
        pytest.param(lambda: of_container("webm", "libopus"), id="webm"),
        pytest.param(lambda: of_container("adts", "aac"), id="aac"),
    ],
)
def test_what_people_record_is_heard(content: Callable[[], bytes]) -> None:
    samples = read_speech(content(), max_s=60)
    assert samples.dtype == np.float32 and samples.ndim == 1
    assert len(samples) == pytest.approx(32_000, abs=2_000)
    assert pitch_of(samples) == pytest.approx(440, abs=3)
    assert 0.3 < np.abs(samples).max() <= 1.0


@pytest.mark.parametrize("file_format", sorted(set(MEDIA_TYPES) - {"pcm"}))
def test_our_own_files_are_heard(file_format: FileFormat) -> None:
    samples = read_speech(b"".join(made(file_format, tone(2.0))), max_s=60)
    assert len(samples) == pytest.approx(32_000, abs=2_500)
    assert pitch_of(samples) == pytest.approx(440, abs=3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected a WAV"),
        (b"What is the weather like?", "expected a WAV"),
        (b"#EXTM3U\nfile:///etc/passwd\n", "expected a WAV"),
        (b"ffconcat version 1.0\nfile '/etc/passwd'\n", "expected a WAV"),
        (b"RIFF", "cannot be decoded"),
        (b"OggS" + bytes(1000), "cannot be decoded"),
        (b"\0\0\0\x20ftypisom" + bytes(1000), "cannot be decoded"),
        (b"\x1aE\xdf\xa3" + b"\xff" * 1000, "cannot be decoded"),
        (b"fLaC" + b"\xff" * 1000, "cannot be decoded|no sound"),
        (b"\xff\xfb" + b"\x13" * 1000, "cannot be decoded|no sound"),
    ],
)
def test_what_is_no_recording_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(AudioFormatError, match=message):
        read_speech(content, max_s=60)


def test_a_recording_is_not_too_long(tmp_path: Path) -> None:
    content = of_soundfile("FLAC")
    with pytest.raises(AudioFormatError, match="longer than 1.5 s"):
        read_speech(content, max_s=1.5)
    # Its header says an hour: what counts is what comes.
    header = bytearray(of_soundfile("WAV", rate=16_000, channels=1))
    header[40:44] = struct.pack("<I", 3600 * 32_000)
    assert len(read_speech(bytes(header), max_s=60)) == 32_000


def test_half_a_recording_is_what_there_is() -> None:
    content = of_soundfile("WAV", rate=16_000, channels=1)
    assert 15_000 < len(read_speech(content[: len(content) // 2], max_s=60)) <= 16_000
    rng = np.random.default_rng(5)
    out = io.BytesIO()
    soundfile.write(out, rng.normal(0.0, 0.1, 32_000), 16_000, format="FLAC")
    flac = out.getvalue()
    for share in (0.5, 0.77, 0.999):
        samples = read_speech(flac[: int(share * len(flac))], max_s=60)
        # The frame in which it is cut off, of at most 4,608 samples, is lost.
        assert share * 32_000 - 5_000 < len(samples) <= share * 32_000
    with pytest.raises(AudioFormatError, match="cannot be decoded"):
        read_speech(flac[:200], max_s=60)


def test_damage_inside_a_recording_is_told_with_its_place() -> None:
    content = bytearray(of_container("mp4", "aac"))
    middle = len(content) // 2
    content[middle : middle + 200] = bytes(200)
    with pytest.raises(AudioFormatError, match="damaged after 1.0 s"):
        read_speech(bytes(content), max_s=60)


def test_a_film_without_sound() -> None:
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream: Any = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 64
        frame = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24")
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with pytest.raises(AudioFormatError, match="no sound"):
        read_speech(out.getvalue(), max_s=60)


@pytest.mark.parametrize("rate", [1, 3_999, 184_593_476])
def test_a_sample_rate_that_no_recording_has(rate: int) -> None:
    content = bytearray(of_soundfile("WAV", rate=16_000, channels=1))
    content[24:28] = struct.pack("<I", rate)
    with pytest.raises(AudioFormatError, match="sample rate"):
        read_speech(bytes(content), max_s=1e9)


def test_files_one_behind_the_other_are_one_recording() -> None:
    one, other = of_soundfile("MP3"), of_soundfile("MP3", None, 22_050, 1)
    samples = read_speech(one + other, max_s=60)
    assert len(samples) == pytest.approx(64_000, abs=2_000)
    assert pitch_of(samples[:32_000]) == pytest.approx(440, abs=3)
    assert pitch_of(samples[32_000:]) == pytest.approx(440, abs=3)


@pytest.mark.parametrize(
    ("tail", "seconds"),
    [(random.Random(1).randbytes(20_000), 0.2), (bytes(20_000), 0.1), (b"APETAGEX" * 300, 0.1)],
)
def test_what_stands_behind_the_last_frame_is_passed_over(tail: bytes, seconds: float) -> None:
    for content in (of_soundfile("MP3"), of_container("adts", "aac")):
        samples = read_speech(content + tail, max_s=60)
        assert len(samples) / 16_000 == pytest.approx(2.0, abs=seconds)
        assert pitch_of(samples) == pytest.approx(440, abs=3)


def test_a_hole_in_a_recording_is_not_its_end() -> None:
    content = of_soundfile("MP3")
    middle = len(content) // 2
    holed = content[:middle] + random.Random(2).randbytes(3_000) + content[middle:]
    assert 1.8 < len(read_speech(holed, max_s=60)) / 16_000 < 2.2


def test_some_sound_in_much_that_is_none() -> None:
    sync = b"\xff\xfb\x90\x44" + b"\xff" * 413  # the head of a frame, and nothing good in it
    with pytest.raises(AudioFormatError, match="cannot be decoded"):
        read_speech(of_soundfile("MP3") + sync * 300, max_s=60)


def test_an_encoding_that_nobody_knows() -> None:
    content = bytearray(of_soundfile("WAV", rate=16_000, channels=1))
    content[20:22] = b"\x34\x12"
    with pytest.raises(AudioFormatError, match="not known"):
        read_speech(bytes(content), max_s=60)


def test_broken_recordings_are_refused_and_no_worse() -> None:
    """A seed in each part of each kind; more were tried by hand (40,000)."""
    rng = random.Random(7)
    seeds = [of_soundfile("WAV"), of_soundfile("FLAC"), of_soundfile("OGG"), of_soundfile("MP3")]
    seeds += [of_container("mp4", "aac"), of_container("webm", "libopus")]
    num_read = 0
    for _ in range(300):
        content = bytearray(rng.choice(seeds))
        for _ in range(rng.choice((1, 3, 10))):
            at = rng.randrange(min(len(content), rng.choice((64, 512, 10**9))))
            if rng.random() < 0.7:
                content[at] = rng.randrange(256)
            else:
                del content[at : at + rng.randrange(1, 100)]
        try:
            num_read += len(read_speech(bytes(content), max_s=60)) > 0
        except AudioFormatError:
            continue
    assert 20 < num_read < 280


def test_values_that_are_no_numbers() -> None:
    out = io.BytesIO()
    samples = np.full(16_000, np.nan, np.float32)
    soundfile.write(out, samples, 16_000, format="WAV", subtype="FLOAT")
    with pytest.raises(AudioFormatError, match="not finite"):
        read_speech(out.getvalue(), max_s=60)


def test_a_recording_that_nobody_waits_for() -> None:
    with pytest.raises(AbandonedError):
        read_speech(of_soundfile("FLAC"), max_s=60, is_wanted=lambda: False)


# --- what goes out ---


def test_bare_samples() -> None:
    samples = tone(0.5)
    content = b"".join(made("pcm", samples))
    assert np.allclose(np.frombuffer(content, "<i2") / 32768, samples, atol=1e-4)


def test_a_wav_of_unknown_length_begins_with_its_header() -> None:
    parts = made("wav", tone(0.5))
    assert parts[0][:4] == b"RIFF" and parts[0][8:12] == b"WAVE"
    content = b"".join(parts)
    assert len(content) == 44 + 2 * 12_000
    with tempfile.NamedTemporaryFile(suffix=".wav") as file:
        file.write(content)
        file.flush()
        samples, rate = soundfile.read(file.name)
    assert (len(samples), rate) == (12_000, RATE)
    assert b"".join(made("wav", np.zeros(0, np.float32)))[:4] == b"RIFF", "of no sound, too"


@pytest.mark.parametrize("file_format", ["mp3", "opus", "aac", "flac"])
def test_coded_files_come_while_they_are_made(file_format: FileFormat) -> None:
    *parts, last = made(file_format, tone(4.0))
    assert sum(map(len, parts)) > 0.5 * len(last + b"".join(parts))
    half = parts[: len(parts) // 2]
    heard = read_speech(b"".join(half), max_s=60)
    assert len(heard) > 16_000, "what came by then can be played"


@pytest.mark.parametrize("file_format", ["mp3", "opus", "aac", "flac"])
def test_a_file_without_sound_is_no_fault(file_format: FileFormat) -> None:
    assert isinstance(b"".join(made(file_format, np.zeros(0, np.float32))), bytes)


# --- captions ---


def words(text: str, *, each_s: float = 0.5, at_s: float = 0.0) -> list[WordTime]:
    return [
        WordTime(word, at_s + each_s * i, at_s + each_s * (i + 1), (i,))
        for i, word in enumerate(text.split())
    ]


def test_lines_end_with_sentences_at_pauses_and_before_they_are_too_long() -> None:
    said = [*words("I saw Mr. Hale. He left."), *words("and then", at_s=5.0)]
    assert [line.text for line in split_into_lines(said)] == [
        "I saw Mr. Hale.",
        "He left.",
        "and then",
    ]
    long = split_into_lines(words("word " * 40))
    assert [len(line.text) for line in long] == [84, 84, 29]
    assert [word for line in long for word in line.words] == words("word " * 40)
    commas = split_into_lines(
        words("one two three four five six seven eight nine ten eleven, twelve")
    )
    assert [line.text[-6:] for line in commas] == ["leven,", "twelve"]
    assert split_into_lines([]) == []


def test_a_line_spans_its_words() -> None:
    (line,) = split_into_lines(words("a b c", at_s=1.0))
    assert (line.start_s, line.end_s, line.tokens) == (1.0, 2.5, [0, 1, 2])
    assert split_into_lines(words("今日 は"), joint="")[0].text == "今日は"


def test_subtitles() -> None:
    said = [WordTime("Tom", 3723.0, 3723.4), WordTime("&", 3723.4, 3723.5)]
    said += [WordTime("<Jerry>.", 3723.5, 3724.9996)]
    assert to_srt(split_into_lines(said)) == "1\n01:02:03,000 --> 01:02:05,000\nTom & <Jerry>.\n\n"
    assert to_vtt(split_into_lines(said)) == (
        "WEBVTT\n\n01:02:03.000 --> 01:02:05.000\nTom &amp; &lt;Jerry&gt;.\n\n"
    )
    assert to_srt([]) == ""
    assert to_vtt([]) == "WEBVTT\n\n"
