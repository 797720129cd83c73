"""PlayoutTimeline: samples to words."""

from __future__ import annotations

from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from audio.playout import PlayoutTimeline, speaking_weight


def timeline(*segments: tuple[str, int]) -> PlayoutTimeline:
    result = PlayoutTimeline()
    for text, num_samples in segments:
        result.append(text, num_samples)
    return result


def test_nothing_is_heard_at_zero_and_all_at_the_end() -> None:
    line = timeline(("One two. ", 1000), ("Three.", 500))
    assert line.total_samples == 1500
    assert line.heard_text(0) == ""
    assert line.heard_text(-5) == ""
    assert line.heard_text(1500) == "One two. Three."
    assert line.heard_text(10**9) == "One two. Three."


def said_at(line: PlayoutTimeline, text: str) -> int:
    """The first sample at which ``text`` has been heard."""
    played = range(line.total_samples + 1)
    return bisect_left(played, len(text), key=line.num_heard_chars)


def test_clause_boundaries_are_exact_and_half_open() -> None:
    line = timeline(("One two. ", 1000), ("Three.", 500))
    assert line.heard_text(999) == "One "
    assert line.heard_text(1000) == "One two. "
    assert line.heard_text(1499) == "One two. "


def test_words_share_a_clause_by_what_there_is_to_say() -> None:
    line = timeline(("a mississippi steamboat", 2400))
    first = said_at(line, "a ")
    second = said_at(line, "a mississippi ")
    assert first < 300
    assert 1200 < second < 1700
    assert line.heard_text(first) == "a "
    assert line.heard_text(first - 1) == ""


def test_figures_and_signs_weigh_as_the_words_they_become() -> None:
    assert speaking_weight("$1,024") > speaking_weight("thousands")
    assert speaking_weight("7") > speaking_weight("a")
    assert speaking_weight("—") == 0
    assert speaking_weight("**") == 0
    line = timeline(("It costs $1,024.50 now", 4000))
    assert said_at(line, "It costs ") < 1300


def test_text_without_sound_is_heard_with_what_precedes_it() -> None:
    line = timeline(("One. ", 100), ("\n\n", 0), ("Two.", 100))
    assert line.heard_text(99) == ""
    assert line.heard_text(100) == "One. "
    assert line.heard_text(101) == "One. \n\n"
    assert line.heard_text(200) == "One. \n\nTwo."
    only_silent = timeline(("***", 0))
    assert only_silent.heard_text(0) == ""
    assert only_silent.heard_text(1) == "***"


def test_scripts_without_spaces_go_letter_by_letter() -> None:
    line = timeline(("今天天气", 4000))
    assert line.heard_text(2000) == "今天"


def test_refuses_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="negative"):
        timeline(("x", -1))


segments = st.lists(
    st.tuples(
        st.one_of(st.text(max_size=20), st.text("ab c. 1$\n人", max_size=30)),
        st.integers(0, 100_000),
    ),
    max_size=6,
)


@given(segments, st.integers(-10, 600_000), st.integers(-10, 600_000))
def test_heard_text_is_a_prefix_that_only_grows(
    parts: list[tuple[str, int]], first: int, second: int
) -> None:
    line = timeline(*parts)
    early, late = sorted((first, second))
    full = "".join(text for text, _ in parts)
    assert line.text == full
    assert full.startswith(line.heard_text(late))
    assert line.heard_text(late).startswith(line.heard_text(early))
    assert line.heard_text(0) == ""
    if late >= line.total_samples and late > 0:
        assert line.heard_text(late) == full


@given(segments)
def test_no_word_is_heard_in_part(parts: list[tuple[str, int]]) -> None:
    line = timeline(*parts)
    word_ends = {0}
    for segment in line._segments:
        word_ends |= {segment.start + end for end in segment.word_ends}
    for played in range(0, line.total_samples, max(1, line.total_samples // 50)):
        assert line.num_heard_chars(played) in word_ends | {len(line.text)}
