"""The recogniser with its real model: words, silence, noise, threads, bad input."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import jiwer
import numpy as np
import pytest
import soxr
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

from audio.asr.hallucination_filter import PunctuationLogprobs
from audio.asr.recognizer import Recognizer, Transcript
from audio.endpointing.speech_offset import find_voice_end
from audio.errors import AudioError, AudioFormatError, ModelError, NotWantedError
from audio.files.reader import read_audio
from audio.vad import VadModel

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def recognizer(asr_model_dir: Path) -> Recognizer:
    recognizer = Recognizer(asr_model_dir)
    recognizer.warm_up()
    return recognizer


def load(path: Path) -> np.ndarray:
    samples, rate = read_audio(path)
    return samples if rate == 16_000 else soxr.resample(samples, rate, 16_000)


def manifest(shared_data: Path, part: str) -> Iterator[dict[str, str]]:
    lines = (shared_data / "MANIFEST.tsv").read_text().splitlines()
    header = lines[0].split("\t")
    for line in lines[1:]:
        row = dict(zip(header, line.split("\t"), strict=False))
        if row["set"] == part:
            yield row


def normal(text: str) -> str:
    return str(EnglishTextNormalizer({})(text))


def test_word_error_rate_of_the_speech_recordings(
    recognizer: Recognizer, shared_data: Path
) -> None:
    """Plain faster-whisper with beam 5 has 5.6 % here (digits as words), we 5.8 %."""
    references, heard = [], []
    num_fallbacks = 0
    for row in manifest(shared_data, "speech"):
        transcript = recognizer.transcribe(load(shared_data / row["file"]))
        references.append(normal(row["transcript"]))
        heard.append(normal(transcript.text))
        num_fallbacks += transcript.num_fallbacks
    assert jiwer.wer(references, heard) < 0.065
    assert num_fallbacks <= 2


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ivr_vm-goodbye_8k.wav", "goodbye"),
        ("az_good_morning.flac", "good morning"),
        ("cards_001.flac", "10 of clubs"),
        ("padded_az_weather.flac", "what is the weather like"),
        ("tel_az_weather_ulaw.wav", "what is the weather like"),
        ("pause_un_dog_or_cat_1.6s.flac", "should i get a dog or a cat"),
        ("noisy_az_weather_crowd5db.flac", "what is the weather like"),
    ],
)
def test_short_and_noisy_turns(
    recognizer: Recognizer, shared_data: Path, name: str, expected: str
) -> None:
    assert normal(recognizer.transcribe(load(shared_data / "hard" / name)).text) == expected


def test_a_single_word(recognizer: Recognizer, shared_data: Path) -> None:
    yes = load(shared_data / "speech/az_chat2.flac")[: int(0.7 * 16_000)]
    transcript = recognizer.transcribe(yes)
    assert normal(transcript.text) == "yes"
    assert transcript.num_fallbacks == 0
    assert transcript.encoder_frames == 1_000


def test_noise_music_and_silence_say_nothing(recognizer: Recognizer, shared_data: Path) -> None:
    heard = {
        row["file"]: recognizer.transcribe(load(shared_data / row["file"])).text
        for row in manifest(shared_data, "noise")
    }
    assert len(heard) == 14
    assert {name: text for name, text in heard.items() if text} == {}


def test_repeated_digits_do_not_run_away(recognizer: Recognizer, shared_data: Path) -> None:
    """A card number "four, one, one, one ..." (16 ones): plain faster-whisper hears 110."""
    transcript = recognizer.transcribe(load(shared_data / "hard/digits_card_8k.wav"))
    digits = transcript.text.replace(",", " ").replace("-", " ").split()
    assert digits[0] == "4"
    assert set(digits[1:]) == {"1"}
    assert 12 <= len(digits) <= 20


def test_long_audio_is_heard_to_its_end(recognizer: Recognizer, shared_data: Path) -> None:
    once = load(shared_data / "speech/az_chat2.flac")  # 31.6 s
    pause = np.zeros(16_000, np.float32)
    transcript = recognizer.transcribe(np.concatenate([once, pause, once]))
    words = normal(transcript.text).split()
    assert transcript.audio_s == pytest.approx(64.1, abs=0.1)
    assert words[:2] == ["yes", "i"]
    assert words[-3:] == ["assess", "my", "responses"]
    assert sum(word == "smart" for word in words) == 2


def test_a_looping_prompt_is_ignored(recognizer: Recognizer, shared_data: Path) -> None:
    samples = load(shared_data / "speech/az_weather.flac")
    loop = "Thanks for watching! " * 10
    assert normal(recognizer.transcribe(samples, prompt=loop).text) == "what is the weather like"
    plain = "We talk about the forecast."
    assert normal(recognizer.transcribe(samples, prompt=plain).text) == "what is the weather like"


def test_callers_in_several_threads_hear_their_own_words(
    recognizer: Recognizer, shared_data: Path
) -> None:
    names = ["speech/az_weather.flac", "speech/sb_birch.flac", "speech/un_dog_or_cat.flac"]
    audio = {name: load(shared_data / name) for name in names}
    expected = {name: recognizer.transcribe(audio[name]).text for name in names}
    assert len(set(expected.values())) == 3
    heard: list[tuple[str, str]] = []

    def call(name: str) -> None:
        heard.extend((name, recognizer.transcribe(audio[name]).text) for _ in range(2))

    threads = [threading.Thread(target=call, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(heard) == 6
    assert all(text == expected[name] for name, text in heard)


def test_work_that_nobody_waits_for_is_given_up(recognizer: Recognizer, shared_data: Path) -> None:
    audio = load(shared_data / "speech" / "un_dog_or_cat.flac")
    asked: list[None] = []

    def is_wanted() -> bool:
        asked.append(None)
        return len(asked) < 2

    with pytest.raises(NotWantedError):
        recognizer.transcribe(audio, is_wanted=is_wanted)
    assert len(asked) == 2, "between the encoder and the decoder"


def test_empty_and_tiny_audio(recognizer: Recognizer) -> None:
    nothing = Transcript("", 0.0, 0.0, 1.0, 0.0, 0, 0, 0.0)
    for num_samples in (0, 1, 100, 512):
        transcript = recognizer.transcribe(np.zeros(num_samples, np.float32))
        assert transcript.text == nothing.text
        assert transcript.encoder_frames == 0
        assert transcript.no_speech_prob == 1.0


def test_bad_samples(recognizer: Recognizer) -> None:
    with pytest.raises(AudioFormatError, match="finite mono"):
        recognizer.transcribe(np.full(16_000, np.nan, np.float32))
    with pytest.raises(AudioFormatError, match="finite mono"):
        recognizer.transcribe(np.zeros((16_000, 2), np.float32))


def test_languages(recognizer: Recognizer, asr_model_dir: Path, shared_data: Path) -> None:
    samples = load(shared_data / "speech/az_weather.flac")
    assert recognizer.transcribe(samples, language="en-US").text
    assert recognizer.transcribe(samples, language="English").text
    with pytest.raises(AudioError, match="does not know the language 'fr'"):
        recognizer.transcribe(samples, language="fr")
    assert Recognizer(asr_model_dir, language=None).language == "en"


def test_model_errors(tmp_path: Path, asr_model_dir: Path) -> None:
    with pytest.raises(ModelError, match=r"has no model\.bin"):
        Recognizer(tmp_path)
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((asr_model_dir / name).read_bytes())
    (tmp_path / "model.bin").write_bytes((asr_model_dir / "model.bin").read_bytes()[:1_000])
    with pytest.raises(ModelError, match="cannot load the speech model"):
        Recognizer(tmp_path)


def test_behind_a_whole_sentence_a_full_stop_is_expected_and_behind_half_of_it_not(
    recognizer: Recognizer, shared_data: Path
) -> None:
    samples = load(shared_data / "speech" / "ls_1688-142285-0002.flac")
    whole = recognizer.transcribe(samples)
    half = recognizer.transcribe(np.concatenate((samples[:22_400], np.zeros(3_200, np.float32))))
    assert whole.text == "You don't mean that you thought me so silly."
    assert whole.end_marks is not None and half.end_marks is not None
    ends = [
        np.exp(marks.period) + np.exp(marks.question) + np.exp(marks.exclamation)
        for marks in (whole.end_marks, half.end_marks)
    ]
    # CPUs round int8 differently: 0.36 or 0.41 against 0.80.
    assert ends[0] > 0.6 and ends[1] < 0.65 * ends[0], (half.text, ends)
    chances = np.exp(
        [getattr(whole.end_marks, name) for name in PunctuationLogprobs.__dataclass_fields__]
    )
    assert 0.5 < chances.sum() <= 1.0
    nothing = recognizer.transcribe(np.zeros(16_000, np.float32))
    assert nothing.end_marks is None and nothing.end_odds is None


def test_its_encoder_tells_an_end_from_a_break(recognizer: Recognizer, shared_data: Path) -> None:
    for name in ("sb_birch", "sb_calc", "ls_3005-163389-0005"):
        samples = load(shared_data / "speech" / f"{name}.flac")
        windows = np.flatnonzero(VadModel().probabilities(samples) >= 0.5)
        voice_len = find_voice_end(samples, min((int(windows[-1]) + 1) * 512, samples.size))
        silence = np.zeros(1_600, np.float32)
        end = recognizer.transcribe(np.concatenate((samples[:voice_len], silence))).end_odds
        half = np.concatenate((samples[: voice_len // 2], silence))
        middle = recognizer.transcribe(half).end_odds
        assert end is not None and middle is not None
        assert end > 1 > -1 > middle, (name, end, middle)
        # The rule was not fitted to long silences, and says nothing behind them.
        late = np.concatenate((samples[:voice_len], np.zeros(8_000, np.float32)))
        assert recognizer.transcribe(late).end_odds is None


def test_where_others_wait_nothing_is_lost(recognizer: Recognizer, shared_data: Path) -> None:
    """Two speakers with a pause between: Whisper stops behind the first, and is asked again."""
    first = load(shared_data / "speech/ls_1688-142285-0000.flac")[int(9.6 * 16_000) :]
    second = load(shared_data / "speech/ls_1688-142285-0001.flac")[: int(5.6 * 16_000)]
    audio = np.concatenate([first, np.zeros(8_000, np.float32), second])
    transcript = recognizer.transcribe(audio, is_brief=True)
    words = normal(transcript.text)
    assert "too much of ste" in words and "said mister hale" in words, words
    assert transcript.encoder_frames <= 1_500 * (1 + transcript.num_fallbacks), "no long step"
