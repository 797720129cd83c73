"""When words were said: from times of tokens to words inside the voice, in order."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from audio.asr.segmentation import AudioSegment
from audio.asr.word_timing import TokenSpan, TranscribedSegment, words_of_segment
from audio.frame import SPEECH_RATE
from audio.vad import WINDOW_SAMPLES, VadWindows

WINDOW_S = WINDOW_SAMPLES / SPEECH_RATE


def part(
    text: str,
    seconds: float = 3.0,
    voice: tuple[tuple[float, float], ...] = ((0.0, 9.0),),
    language: str = "en",
    start_sample: int = 0,
) -> TranscribedSegment:
    """A piece with voice from second to second."""
    num_windows = round(seconds / WINDOW_S)
    at_s = np.arange(num_windows) * WINDOW_S
    probabilities = np.zeros(num_windows, np.float32)
    for first_s, last_s in voice:
        probabilities[(at_s >= first_s) & (at_s < last_s)] = 0.9
    samples = np.zeros(num_windows * WINDOW_SAMPLES, np.float32)
    return TranscribedSegment(
        AudioSegment(samples, VadWindows(probabilities), start_sample), text, language, None
    )


def told(heard: TranscribedSegment, *spans: TokenSpan) -> list[tuple[str, float, float]]:
    words = words_of_segment(heard, spans)
    return [(w.word, round(w.start_s, 3), round(w.end_s, 3)) for w in words]


def test_marks_are_silence_and_belong_to_the_word_before() -> None:
    heard = part("Yes, I know.")
    assert told(
        heard,
        TokenSpan(" Yes", 0.1, 0.5),
        TokenSpan(",", 0.5, 0.8),
        TokenSpan(" I", 0.8, 1.0),
        TokenSpan(" know", 1.0, 1.4),
        TokenSpan(".", 1.4, 2.9),
    ) == [("Yes,", 0.1, 0.5), ("I", 0.8, 1.0), ("know.", 1.0, 1.4)]


def test_one_word_for_each_of_the_text_however_the_tokenizer_cuts() -> None:
    text = 'He said "well-known" - 5% of it\'s here ...'
    spans = (" He", " said", ' "', "well", "-", "known", '"', " -", " 5", "%", " of", " it", "'s")
    spans = (*spans, " here", " .", "..")
    times = [TokenSpan(one, 0.1 * i, 0.1 * (i + 1), (i,)) for i, one in enumerate(spans)]
    words = words_of_segment(part(text), times)
    assert [word.word for word in words] == text.split()
    assert [token for word in words for token in word.tokens] == list(range(len(spans)))
    by_word = {word.word: (round(word.start_s, 3), round(word.end_s, 3)) for word in words}
    assert by_word['"well-known"'] == (0.3, 0.6), "without the marks around it"
    assert by_word["-"] == (0.7, 0.8), "a mark alone has no other time"
    assert by_word["5%"] == (0.8, 0.9)


def test_without_spaces_each_unit_is_a_word() -> None:
    heard = part("今日は、いい。", language="ja")
    spans = [
        TokenSpan(one, 0.2 * i, 0.2 * (i + 1))
        for i, one in enumerate(("今日", "は", "、", "いい", "。"))
    ]
    assert told(heard, *spans) == [("今日", 0.0, 0.2), ("は、", 0.2, 0.4), ("いい。", 0.6, 0.8)]


def test_a_word_begins_with_its_voice_and_ends_with_it() -> None:
    heard = part("Hello", voice=((0.96, 1.6),))
    ((_, start_s, end_s),) = told(heard, TokenSpan(" Hello", 0.0, 2.5))
    # The detector begins late: a consonant may lie before.
    assert start_s == pytest.approx(0.96 - WINDOW_S)
    assert end_s == pytest.approx(1.6)


def test_of_two_sounds_around_a_pause_a_word_is_the_longer_one() -> None:
    heard = part("should I", voice=((0.0, 0.288), (0.992, 1.6)))
    should, second = told(heard, TokenSpan(" should", 0.0, 0.2), TokenSpan(" I", 0.2, 1.4))
    assert should == ("should", 0.0, 0.2)
    assert second[1] == pytest.approx(0.992 - WINDOW_S)
    heard = part("dog", voice=((0.0, 0.64), (2.0, 2.1)))
    ((_, start_s, end_s),) = told(heard, TokenSpan(" dog", 0.0, 2.5))
    assert (start_s, end_s) == (0.0, pytest.approx(0.64))


def test_a_short_silence_inside_a_word_is_a_stop() -> None:
    heard = part("actor", voice=((0.32, 0.448), (0.576, 0.9)))
    ((_, start_s, end_s),) = told(heard, TokenSpan(" actor", 0.3, 0.9))
    assert (start_s, end_s) == (0.3, 0.9)


def test_words_are_in_order_and_inside_their_piece() -> None:
    spans = (
        TokenSpan(" a", 0.5, 1.2),
        TokenSpan(" b", 0.9, 0.7),
        TokenSpan(" c", 0.8, 9.0),
        TokenSpan(" d", 9.0, 9.1),
    )
    words = words_of_segment(part("a b c d", seconds=1.536, start_sample=2 * SPEECH_RATE), spans)
    edges = [edge for word in words for edge in (word.start_s, word.end_s)]
    assert edges == sorted(edges)
    assert edges[0] == 2.5, "counted from the beginning of the recording"
    assert edges[-1] == pytest.approx(2 + 1.536)


def test_where_no_voice_is_found_the_times_stay() -> None:
    assert told(part("hm", voice=()), TokenSpan(" hm", 0.4, 0.9)) == [("hm", 0.4, 0.9)]


def test_no_words_have_no_times() -> None:
    assert words_of_segment(part(""), []) == []
    assert words_of_segment(part(""), [TokenSpan(" ", 0.0, 0.1)]) == []
    assert words_of_segment(part("", language="ja"), [TokenSpan(" ", 0.0, 0.1)]) == []


def test_pieces_know_where_they_were_cut() -> None:
    probabilities = np.zeros(400, np.float32)
    probabilities[100:300] = 0.9
    samples = np.zeros(400 * WINDOW_SAMPLES, np.float32)
    trimmed = AudioSegment(samples, VadWindows(probabilities)).trimmed()
    assert trimmed.start_sample == (100 - 31) * WINDOW_SAMPLES, "a margin of a second"
    for piece in (*trimmed.split_at_pauses(2.0), *trimmed.split_in_half()):
        first = piece.start_sample // WINDOW_SAMPLES
        assert np.array_equal(
            piece.windows.probabilities, probabilities[first:][: len(piece.windows.probabilities)]
        )
    assert sum(p.num_samples for p in trimmed.split_at_pauses(2.0)) == trimmed.num_samples


@pytest.mark.parametrize("lead", [0, 100, 511])
def test_silence_is_found_where_windows_begin_before_the_audio(lead: int) -> None:
    """Speech from 1.0 to 1.5 s of audio that was cut from a stream inside a window."""
    at = np.arange(100) * WINDOW_SAMPLES - lead
    speech = (at >= SPEECH_RATE) & (at < 1.5 * SPEECH_RATE)
    windows = VadWindows(np.where(speech, 0.9, 0.0).astype(np.float32), lead)
    segment = AudioSegment(np.zeros(100 * WINDOW_SAMPLES - lead, np.float32), windows)
    assert segment.trailing_silence_s == pytest.approx(100 * WINDOW_S - 1.5, abs=2 * WINDOW_S)
    (word,) = words_of_segment(
        TranscribedSegment(segment, "yes", "en", None), [TokenSpan(" yes", 0.2, 2.5)]
    )
    assert word.start_s == pytest.approx(1.0, abs=2 * WINDOW_S)
    assert word.end_s == pytest.approx(1.5, abs=WINDOW_S)


@given(st.integers(1, 511), st.integers(1_000, 60_000), st.integers(1, 80), st.integers(0, 80))
def test_cuts_of_audio_from_inside_a_window_lose_nothing(
    lead: int, num_samples: int, at: int, num_more: int
) -> None:
    num_windows = -(-(lead + num_samples) // WINDOW_SAMPLES)
    samples = np.arange(num_samples, dtype=np.float32)
    whole = AudioSegment(
        samples, VadWindows(np.linspace(0, 1, num_windows, dtype=np.float32), lead)
    )
    ends = (at, at + num_more, num_windows)
    parts = [whole.cut(a, b) for a, b in pairwise((0, *(min(e, num_windows) for e in ends)))]
    assert np.array_equal(np.concatenate([part.samples for part in parts]), samples)
    for part in parts:
        assert np.array_equal(
            part.samples[:1], samples[part.start_sample :][: part.num_samples][:1]
        )
        assert part.windows.fit(part.num_samples).num_windows == part.windows.num_windows
