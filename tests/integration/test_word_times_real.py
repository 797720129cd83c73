"""When words were said, by the real recogniser: against words whose places are known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from audio.asr.recognizer import Recognizer, Transcript
from audio.asr.word_timing import WordTime
from audio.frame import SPEECH_RATE, Samples, silence
from tests.integration.openai_caller import words as words_of
from tests.support.speech import DOG_OR_CAT, MONOLOGUE, WEATHER, Recordings, Voice

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def recognizer(asr_model_dir: Path) -> Recognizer:
    recognizer = Recognizer(asr_model_dir)
    recognizer.warm_up()
    return recognizer


def trimmed(samples: Samples) -> Samples:
    """``samples`` from the first audible one to the last."""
    loud = np.flatnonzero(np.abs(samples) > 0.02)
    cut: Samples = samples[loud[0] : loud[-1] + 1]
    return cut


def joined(
    parts: Sequence[Samples], lead_s: float, gap_s: float
) -> tuple[Samples, list[tuple[float, float]]]:
    """All of them with silence between, and where each one lies, in seconds."""
    places, pieces, at = [], [silence(int(lead_s * SPEECH_RATE))], int(lead_s * SPEECH_RATE)
    for part in parts:
        places.append((at / SPEECH_RATE, (at + len(part)) / SPEECH_RATE))
        pieces += [part, silence(int(gap_s * SPEECH_RATE))]
        at += len(part) + int(gap_s * SPEECH_RATE)
    return np.concatenate(pieces), places


def check(words: Sequence[WordTime], transcript: Transcript) -> None:
    """One for each word, in order, inside the audio."""
    assert [word.word for word in words] == transcript.text.split()
    edges = [edge for word in words for edge in (word.start_s, word.end_s)]
    assert edges == sorted(edges)
    assert not edges or edges[0] >= 0 and edges[-1] <= transcript.audio_s + 1e-6


def test_sentences_are_found_where_they_are(recognizer: Recognizer, voice: Voice) -> None:
    texts = ("The weather is fine today.", "Where do you want to go?", "I would like some coffee.")
    audio, places = joined([trimmed(voice.samples(text)) for text in texts], lead_s=1.7, gap_s=0.9)
    transcript = recognizer.transcribe(audio, keep_encoder_output=True)
    words = recognizer.align_words(transcript)
    check(words, transcript)
    assert words_of(transcript.text) == words_of(" ".join(texts))
    first = 0
    for text, (start_s, end_s) in zip(texts, places, strict=True):
        last = first + len(text.split()) - 1
        assert words[first].start_s == pytest.approx(start_s, abs=0.15), words[first]
        assert words[last].end_s == pytest.approx(end_s, abs=0.2), words[last]
        first = last + 1


def test_words_are_found_where_they_are(recognizer: Recognizer, voice: Voice) -> None:
    said = ("apple", "window", "monday", "garden", "yellow", "seven", "river", "camera")
    audio, places = joined([trimmed(voice.samples(word)) for word in said], lead_s=0.3, gap_s=0.25)
    transcript = recognizer.transcribe(audio, keep_encoder_output=True)
    words = recognizer.align_words(transcript)
    check(words, transcript)
    heard = words_of(transcript.text).split()
    assert len(words) == len(heard)
    known = [
        (word, places[said.index(name)])
        for word, name in zip(words, heard, strict=True)
        if name in said
    ]
    assert len(known) >= 6, transcript.text
    for word, (start_s, end_s) in known:
        assert start_s - 0.15 <= (word.start_s + word.end_s) / 2 <= end_s + 0.15, (word, start_s)
        assert word.start_s == pytest.approx(start_s, abs=0.25), word


def check_within_voice(recognizer: Recognizer, samples: Samples) -> None:
    """Each word has a time of its own, and none takes longer than words do."""
    transcript = recognizer.transcribe(samples, keep_encoder_output=True)
    words = recognizer.align_words(transcript)
    check(words, transcript)
    assert all(word.end_s - word.start_s < 2.0 for word in words), words
    assert words[-1].tokens


@pytest.mark.parametrize("text", [WEATHER, DOG_OR_CAT, "Goodbye.", "Ten of clubs.", MONOLOGUE])
def test_each_word_has_its_time(recognizer: Recognizer, voice: Voice, text: str) -> None:
    check_within_voice(recognizer, voice.say(text).samples())


def test_each_word_of_people_has_its_time(recognizer: Recognizer, recordings: Recordings) -> None:
    for name in (
        *("speech/un_dog_or_cat.flac", "speech/sb_birch.flac", "speech/ls_367-130732-0001.flac"),
        *("speech/ls_1688-142285-0007.flac", "speech/jfk.flac", "hard/cards_001.flac"),
        *("hard/pause_un_dog_or_cat_1.6s.flac", "hard/noisy_az_weather_crowd5db.flac"),
        *("hard/digits_card_8k.wav", "hard/padded_az_weather.flac", "hard/ivr_vm-goodbye_8k.wav"),
    ):
        check_within_voice(recognizer, recordings.samples(name))


def test_pieces_count_from_the_beginning(recognizer: Recognizer, voice: Voice) -> None:
    once = voice.say(MONOLOGUE).samples()  # longer than one piece
    audio = np.concatenate([silence(3 * SPEECH_RATE), once, silence(SPEECH_RATE), once])
    transcript = recognizer.transcribe(audio, keep_encoder_output=True)
    words = recognizer.align_words(transcript)
    assert len(transcript.segments) > 2
    check(words, transcript)
    assert 3.0 <= words[0].start_s < 4.0
    later_s = once.size / SPEECH_RATE + 1.0
    smart = [word.start_s for word in words if "smart" in word.word]
    assert len(smart) == 2
    assert smart[1] - smart[0] == pytest.approx(later_s, abs=0.3)


def test_what_was_not_kept_is_heard_again(recognizer: Recognizer, voice: Voice) -> None:
    samples = voice.say(DOG_OR_CAT).samples()
    kept, bare = (
        recognizer.transcribe(samples, keep_encoder_output=keeps) for keeps in (True, False)
    )
    assert kept.segments[0].encoder_output is not None and bare.segments[0].encoder_output is None
    pairs = zip(recognizer.align_words(kept), recognizer.align_words(bare), strict=True)
    assert all(abs(one.start_s - other.start_s) < 0.2 for one, other in pairs)


def test_nothing_said_has_no_times(recognizer: Recognizer) -> None:
    transcript = recognizer.transcribe(silence(SPEECH_RATE))
    assert recognizer.align_words(transcript) == ()


def test_a_very_short_piece_can_be_aligned(recognizer: Recognizer, voice: Voice) -> None:
    yes = trimmed(voice.samples("Yes."))
    assert yes.size < 0.7 * SPEECH_RATE
    transcript = recognizer.transcribe(yes, keep_encoder_output=True)
    assert transcript.text
    check(recognizer.align_words(transcript), transcript)
