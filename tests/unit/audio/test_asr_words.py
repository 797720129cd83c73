"""When words were said: from times of tokens to words inside the voice, in order."""

from __future__ import annotations

import numpy as np
import pytest

from audio.asr.segmentation import AudioSegment
from audio.asr.word_timing import HeardPart, Span, words_in
from audio.frame import SPEECH_RATE
from audio.vad import WINDOW_SAMPLES

WINDOW_S = WINDOW_SAMPLES / SPEECH_RATE


def part(
    text: str,
    seconds: float = 3.0,
    voice: tuple[tuple[float, float], ...] = ((0.0, 9.0),),
    language: str = "en",
    start_sample: int = 0,
) -> HeardPart:
    """A piece with voice from second to second."""
    num_windows = round(seconds / WINDOW_S)
    at_s = np.arange(num_windows) * WINDOW_S
    probabilities = np.zeros(num_windows, np.float32)
    for first_s, last_s in voice:
        probabilities[(at_s >= first_s) & (at_s < last_s)] = 0.9
    samples = np.zeros(num_windows * WINDOW_SAMPLES, np.float32)
    return HeardPart(AudioSegment(samples, probabilities, start_sample), text, language, None)


def told(heard: HeardPart, *spans: Span) -> list[tuple[str, float, float]]:
    words = words_in(heard, spans)
    return [(w.word, round(w.start_s, 3), round(w.end_s, 3)) for w in words]


def test_marks_are_silence_and_belong_to_the_word_before() -> None:
    heard = part("Yes, I know.")
    assert told(
        heard,
        Span(" Yes", 0.1, 0.5),
        Span(",", 0.5, 0.8),
        Span(" I", 0.8, 1.0),
        Span(" know", 1.0, 1.4),
        Span(".", 1.4, 2.9),
    ) == [("Yes,", 0.1, 0.5), ("I", 0.8, 1.0), ("know.", 1.0, 1.4)]


def test_one_word_for_each_of_the_text_however_the_tokenizer_cuts() -> None:
    text = 'He said "well-known" - 5% of it\'s here ...'
    spans = (" He", " said", ' "', "well", "-", "known", '"', " -", " 5", "%", " of", " it", "'s")
    spans = (*spans, " here", " .", "..")
    times = [Span(one, 0.1 * i, 0.1 * (i + 1), (i,)) for i, one in enumerate(spans)]
    words = words_in(part(text), times)
    assert [word.word for word in words] == text.split()
    assert [token for word in words for token in word.tokens] == list(range(len(spans)))
    by_word = {word.word: (round(word.start_s, 3), round(word.end_s, 3)) for word in words}
    assert by_word['"well-known"'] == (0.3, 0.6), "without the marks around it"
    assert by_word["-"] == (0.7, 0.8), "a mark alone has no other time"
    assert by_word["5%"] == (0.8, 0.9)


def test_without_spaces_each_unit_is_a_word() -> None:
    heard = part("今日は、いい。", language="ja")
    spans = [
        Span(one, 0.2 * i, 0.2 * (i + 1))
        for i, one in enumerate(("今日", "は", "、", "いい", "。"))
    ]
    assert told(heard, *spans) == [("今日", 0.0, 0.2), ("は、", 0.2, 0.4), ("いい。", 0.6, 0.8)]


def test_a_word_begins_with_its_voice_and_ends_with_it() -> None:
    heard = part("Hello", voice=((0.96, 1.6),))
    ((_, start_s, end_s),) = told(heard, Span(" Hello", 0.0, 2.5))
    # The detector begins late: a consonant may lie before.
    assert start_s == pytest.approx(0.96 - WINDOW_S)
    assert end_s == pytest.approx(1.6)


def test_of_two_sounds_around_a_pause_a_word_is_the_longer_one() -> None:
    heard = part("should I", voice=((0.0, 0.288), (0.992, 1.6)))
    should, second = told(heard, Span(" should", 0.0, 0.2), Span(" I", 0.2, 1.4))
    assert should == ("should", 0.0, 0.2)
    assert second[1] == pytest.approx(0.992 - WINDOW_S)
    heard = part("dog", voice=((0.0, 0.64), (2.0, 2.1)))
    ((_, start_s, end_s),) = told(heard, Span(" dog", 0.0, 2.5))
    assert (start_s, end_s) == (0.0, pytest.approx(0.64))


def test_a_short_silence_inside_a_word_is_a_stop() -> None:
    heard = part("actor", voice=((0.32, 0.448), (0.576, 0.9)))
    ((_, start_s, end_s),) = told(heard, Span(" actor", 0.3, 0.9))
    assert (start_s, end_s) == (0.3, 0.9)


def test_words_are_in_order_and_inside_their_piece() -> None:
    spans = (Span(" a", 0.5, 1.2), Span(" b", 0.9, 0.7), Span(" c", 0.8, 9.0), Span(" d", 9.0, 9.1))
    words = words_in(part("a b c d", seconds=1.536, start_sample=2 * SPEECH_RATE), spans)
    edges = [edge for word in words for edge in (word.start_s, word.end_s)]
    assert edges == sorted(edges)
    assert edges[0] == 2.5, "counted from the beginning of the recording"
    assert edges[-1] == pytest.approx(2 + 1.536)


def test_where_no_voice_is_found_the_times_stay() -> None:
    assert told(part("hm", voice=()), Span(" hm", 0.4, 0.9)) == [("hm", 0.4, 0.9)]


def test_no_words_have_no_times() -> None:
    assert words_in(part(""), []) == []
    assert words_in(part(""), [Span(" ", 0.0, 0.1)]) == []
    assert words_in(part("", language="ja"), [Span(" ", 0.0, 0.1)]) == []


def test_pieces_know_where_they_were_cut() -> None:
    probabilities = np.zeros(400, np.float32)
    probabilities[100:300] = 0.9
    samples = np.zeros(400 * WINDOW_SAMPLES, np.float32)
    trimmed = AudioSegment(samples, probabilities).trimmed()
    assert trimmed.start_sample == (100 - 31) * WINDOW_SAMPLES, "a margin of a second"
    for piece in (*trimmed.parts(2.0), *trimmed.halves()):
        first = piece.start_sample // WINDOW_SAMPLES
        assert np.array_equal(
            piece.probabilities, probabilities[first:][: len(piece.probabilities)]
        )
    assert sum(p.num_samples for p in trimmed.parts(2.0)) == trimmed.num_samples
