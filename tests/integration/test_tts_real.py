"""The Piper voice: intelligible, trimmed, shared by threads, clear about what it cannot do."""

from __future__ import annotations

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jiwer
import numpy as np
import pytest
import soxr
from faster_whisper import WhisperModel

from audio.errors import AudioError, ModelError
from audio.text.normalize.english import normalize
from audio.tts.synthesizer import MAX_PIECE_CHARS, Synthesizer, pronounceable, split_long
from audio.tts.vits import VitsSession

pytestmark = pytest.mark.integration

SENTENCES = [
    "Sure, let me check that for you.",
    "The weather in Paris is sunny and warm today, with a light breeze from the west.",
    "Your appointment with Dr. Smith is at 6:05 a.m. on July 4th.",
    "Your total comes to $47.50, and the parcel weighs 12 kg.",
    "I found three flights from New York to Los Angeles leaving tomorrow morning.",
    "Could you please tell me your name and your date of birth?",
    "There is a 5-10% chance of rain in St. Louis.",
    "Henry VIII had six wives, and World War II ended in 1945.",
    "Thanks for calling. Have a wonderful evening!",
    "The meeting starts at 9 a.m. and lasts about 2 1/2 hours.",
]


@pytest.fixture(scope="module")
def synthesizer(tts_voice_path: Path) -> Synthesizer:
    synthesizer = Synthesizer(tts_voice_path)
    synthesizer.warm_up()
    return synthesizer


@pytest.fixture(scope="module")
def deterministic(tts_voice_path: Path) -> Synthesizer:
    return Synthesizer(tts_voice_path, noise_scale=0.0, noise_w_scale=0.0)


def _words(text: str) -> str:
    return " ".join(re.sub(r"[^\w\s]", " ", normalize(text).lower()).split())


def test_speech_is_understood(synthesizer: Synthesizer, asr_model_dir: Path) -> None:
    model = WhisperModel(str(asr_model_dir), device="cpu", compute_type="int8", cpu_threads=1)
    expected, heard = [], []
    for sentence in SENTENCES:
        audio = synthesizer.synthesize(sentence)
        audio_16k = soxr.resample(audio, synthesizer.sample_rate, 16000)
        segments, _ = model.transcribe(audio_16k, language="en", beam_size=5)
        expected.append(_words(sentence))
        heard.append(_words(" ".join(segment.text for segment in segments)))
    word_error_rate = jiwer.wer(expected, heard)
    print(f"word error rate of tiny.en on the voice: {word_error_rate:.3f}")
    for wanted, got in zip(expected, heard, strict=True):
        if wanted != got:
            print(f"  wanted {wanted!r}\n  heard  {got!r}")
    assert word_error_rate <= 0.12


def test_form_of_the_audio(synthesizer: Synthesizer) -> None:
    audio = synthesizer.synthesize("Hello there.")
    assert audio.dtype == np.float32
    assert audio.ndim == 1
    assert synthesizer.sample_rate == 22050
    assert 0.4 < len(audio) / synthesizer.sample_rate < 2.0
    assert 0.2 < float(np.abs(audio).max()) <= 0.951
    assert audio[0] == 0.0  # faded in: no click
    assert audio[-1] == 0.0


@pytest.mark.parametrize(
    ("text", "pause_ms"),
    [("Hello there.", 220), ("Hello there,", 90), ("Hello there", 30), ('"Hello there!" ', 220)],
)
def test_silence_around_the_speech(synthesizer: Synthesizer, text: str, pause_ms: int) -> None:
    audio = synthesizer.synthesize(text)
    rate = synthesizer.sample_rate
    window = rate // 500  # 2 ms
    rms = np.sqrt(
        np.square(audio[: len(audio) // window * window].reshape(-1, window)).mean(axis=1)
    )
    voiced = np.flatnonzero(rms > 0.004)  # what voice_finish takes for sound, some 35 dB below
    assert voiced[0] * 2 <= 10
    assert abs((len(rms) - 1 - voiced[-1]) * 2 - pause_ms) <= 6


@pytest.mark.parametrize("text", ["", "   ", "...", "\U0001f642", "***", "\n\n", "—"])
def test_nothing_to_say_is_an_empty_array(synthesizer: Synthesizer, text: str) -> None:
    audio = synthesizer.synthesize(text)
    assert audio.shape == (0,)
    assert audio.dtype == np.float32


def test_speed_changes_the_length(deterministic: Synthesizer) -> None:
    normal, fast, slow = (
        len(deterministic.synthesize("This is a sentence of some length.", speed=speed))
        for speed in (1.0, 1.5, 0.75)
    )
    assert 0.6 < fast / normal < 0.75
    assert 1.2 < slow / normal < 1.45


@pytest.mark.parametrize("speed", [0.0, -1.0, 10.0, float("nan")])
def test_impossible_speeds_are_refused(synthesizer: Synthesizer, speed: float) -> None:
    with pytest.raises(AudioError, match="speed"):
        synthesizer.synthesize("Hello", speed=speed)


def test_threads_get_their_own_text(deterministic: Synthesizer) -> None:
    """espeak-ng keeps global state; what one thread says must not leak into another's."""
    texts = [f"This is sentence number {number}." for number in range(6)]
    alone = [deterministic.synthesize(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(deterministic.synthesize, texts * 2))
    for index, audio in enumerate(together):
        np.testing.assert_array_equal(audio, alone[index % len(texts)])


def test_without_noise_the_text_alone_decides(deterministic: Synthesizer) -> None:
    first, second = (deterministic.synthesize("The same again.") for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_very_long_text_is_split(deterministic: Synthesizer) -> None:
    text = "This goes on, " * 30 + "and ends."
    pieces = split_long(normalize(text), MAX_PIECE_CHARS)
    assert len(pieces) > 1
    assert max(map(len, pieces)) <= MAX_PIECE_CHARS
    assert " ".join(pieces) == normalize(text)
    assert split_long("x" * 700, 300) == ["x" * 300, "x" * 300, "x" * 100]
    audio = deterministic.synthesize(text)
    assert len(audio) / deterministic.sample_rate > 12


def test_letters_are_pronounced_as_letters(synthesizer: Synthesizer) -> None:
    assert pronounceable("the A P I's at six A M, vitamin A is") == (
        "the A.P.I's at six A.M, vitamin eigh is"
    )
    assert pronounceable("A dog. A P I") == "A dog. A.P.I"


def test_loudness_is_even(deterministic: Synthesizer) -> None:
    levels = []
    for text in ("Sure thing.", "The weather in Paris is sunny and warm today.", "Yes,"):
        audio = deterministic.synthesize(text)
        loud = audio[np.abs(audio) > 0.02]
        levels.append(20 * np.log10(np.sqrt(np.square(loud).mean())))
    assert max(levels) - min(levels) < 5.0, "one gain for all: as a person would say them"


def test_speech_in_pieces_is_the_speech_in_one(deterministic: Synthesizer) -> None:
    text = "I would like to tell you about the moon and its phases tonight. And then we sleep."
    whole = deterministic.synthesize(text)
    pieces = list(deterministic.stream(text))
    assert len(pieces) > 2
    assert [piece.is_last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    joined = np.concatenate([piece.samples for piece in pieces])
    assert len(joined) == len(whole) == pieces[-1].total_len
    np.testing.assert_allclose(joined, whole, atol=1e-4)
    for piece in pieces:
        assert len(piece.samples) <= piece.total_len <= len(whole)
    # A first piece that is cut short is what the hurry is for.
    assert 0.05 < len(pieces[0].samples) / deterministic.sample_rate < 1.0


@pytest.mark.parametrize("num_frames", [7, 33])
def test_any_number_of_frames_at_a_time_gives_the_same_samples(
    tts_voice_path: Path, num_frames: int
) -> None:
    net = VitsSession(tts_voice_path)
    ids = [1, *np.random.default_rng(0).integers(3, 60, 50).tolist(), 2]
    whole = net.open(ids, [0.0, 1.0, 0.0], None)
    expected = whole.decode_frames(whole.num_frames)
    assert len(expected) == whole.num_frames * net.hop_len
    utterance = net.open(ids, [0.0, 1.0, 0.0], None)
    taken = []
    while not utterance.is_over and len(taken) < 8:
        taken.append(utterance.decode_frames(num_frames))
    joined = np.concatenate(taken)
    np.testing.assert_allclose(joined, expected[: len(joined)], atol=1e-4)


def test_short_clauses_are_kept_and_cost_nothing(synthesizer: Synthesizer) -> None:
    (kept,) = synthesizer.stream("Sure,")
    assert kept.is_last and kept.total_len == len(kept.samples) > 0
    list(synthesizer.stream("Indeed it is,"))
    (kept,) = synthesizer.stream("Indeed it is,")
    kept.samples[:] = 0.0
    (again,) = synthesizer.stream("Indeed it is,")
    assert float(np.abs(again.samples).max()) > 0.1, "the caller's copy is the caller's"


def test_broken_voices_are_named(tts_voice_path: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing.onnx"
    with pytest.raises(ModelError, match=r"is a folder: name the file"):
        Synthesizer(tmp_path)
    with pytest.raises(ModelError, match=r"missing\.onnx"):
        Synthesizer(missing)

    no_config = tmp_path / "lonely.onnx"
    no_config.write_bytes(b"x")
    with pytest.raises(ModelError, match=r"lonely\.onnx\.json"):
        Synthesizer(no_config)

    config = tts_voice_path.with_name(tts_voice_path.name + ".json")
    shutil.copy(config, tmp_path / "lonely.onnx.json")
    with pytest.raises(ModelError, match="not a readable ONNX voice"):
        Synthesizer(no_config)

    truncated = tmp_path / "truncated.onnx"
    truncated.write_bytes(tts_voice_path.read_bytes()[:1_000_000])
    shutil.copy(config, tmp_path / "truncated.onnx.json")
    with pytest.raises(ModelError, match="not a readable ONNX voice"):
        Synthesizer(truncated)

    (tmp_path / "lonely.onnx.json").write_text('{"audio": 3}')
    with pytest.raises(ModelError, match="not the description of a Piper voice"):
        Synthesizer(no_config)
    (tmp_path / "lonely.onnx.json").write_text("{")
    with pytest.raises(ModelError, match="not the description of a Piper voice"):
        Synthesizer(no_config)


def test_a_failing_network_is_a_model_error(tts_voice_path: Path, tmp_path: Path) -> None:
    """A description that does not fit the network: a phoneme it has no embedding for."""
    voice = tmp_path / "voice.onnx"
    voice.symlink_to(tts_voice_path)
    config = json.loads(Path(f"{tts_voice_path}.json").read_text(encoding="utf-8"))
    config["phoneme_id_map"]["ɡ"] = [99_999]
    (tmp_path / "voice.onnx.json").write_text(json.dumps(config))
    mismatched = Synthesizer(voice)
    with pytest.raises(ModelError, match="the voice failed on a text of 6 characters"):
        mismatched.synthesize("Go on.")

    config["phoneme_id_map"]["h"] = [99_999]
    (tmp_path / "voice.onnx.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"voice\.onnx does not speak"):
        Synthesizer(voice)


def test_a_long_clause_without_hurry_lets_others_in_between(deterministic: Synthesizer) -> None:
    text = "The moon goes around the earth once in four weeks and shows us always one side of it"
    pieces = [piece.samples for piece in deterministic.stream(text, is_urgent=False)]
    lengths_s = [len(samples) / deterministic.sample_rate for samples in pieces]
    assert len(pieces) > 1 and max(lengths_s) <= 3.1, lengths_s
    hasty = [piece.samples for piece in deterministic.stream(text)]
    np.testing.assert_allclose(np.concatenate(pieces), np.concatenate(hasty), atol=1e-4)


def test_nor_does_a_hurry_once_there_is_enough_to_hear(deterministic: Synthesizer) -> None:
    """A clause of two minutes: what is in hand would allow for pieces of half a minute."""
    pieces = [piece.samples for piece in deterministic.stream("9" * 200, speed=0.5)]
    lengths_s = [len(samples) / deterministic.sample_rate for samples in pieces]
    assert sum(lengths_s) > 60 and max(lengths_s) <= 3.5, max(lengths_s)
