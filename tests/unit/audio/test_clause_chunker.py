"""ClauseChunker: early first clause, exact text, no cut inside what belongs together."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audio.text.clauses import ClauseChunker, ClauseLimits


def chunk(text: str, **options: int) -> list[str]:
    chunker = ClauseChunker(**options)  # type: ignore[arg-type]
    clauses = chunker.feed(text) + chunker.flush()
    assert "".join(clauses) == text
    return clauses


# The most eager limits: every place where a cut is allowed becomes one.
EAGER = (ClauseLimits(1, 1, 1, 1),)


def eager(text: str) -> list[str]:
    chunker = ClauseChunker(EAGER)
    return chunker.feed(text) + chunker.flush()


def test_the_first_clause_is_short_and_later_ones_are_sentences() -> None:
    assert chunk(
        "Sure, let me check that for you. The weather in Paris is sunny and warm today, with a "
        "light breeze from the west. Tomorrow looks cloudy, but it should stay dry."
    ) == [
        "Sure, ",
        "let me check that for you. ",
        "The weather in Paris is sunny and warm today, with a light breeze from the west. ",
        "Tomorrow looks cloudy, but it should stay dry.",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "The capital of France is the beautiful city of Paris which lies on the river Seine.",
        "I found three flights from New York to Los Angeles leaving tomorrow morning before nine.",
        "this text has no marks of any kind and goes on and on without a pause for breath",
        "People love walking slowly beside rivers every warm bright quiet summer evening together.",
    ],
)
def test_a_long_first_sentence_starts_within_ten_words(text: str) -> None:
    chunker = ClauseChunker()
    num_words_fed = 0
    for word in text.split(" "):
        clauses = chunker.feed(word + " ")
        num_words_fed += 1
        if clauses:
            break
    assert num_words_fed <= 11  # ten, and the word that shows where the tenth ends
    assert 2 <= len(clauses[0].split()) <= 10


def test_the_first_clause_comes_with_the_token_behind_its_comma() -> None:
    chunker = ClauseChunker()
    assert chunker.feed("Sure") == []
    assert chunker.feed(",") == []  # "1," could go on with a digit
    assert chunker.feed(" let") == ["Sure, "]


@pytest.mark.parametrize(
    "whole",
    [
        "3.5",
        "1,024",
        "$1,200.50",
        "98.6°F",
        "6:05 a.m.",
        "at 3 p.m. sharp",
        "jo.smith@example.com",
        "https://www.example.com/a.b,c;d",
        "Dr. Smith",
        "Mrs. Jones",
        "e.g. apples",
        "i.e. this",
        "J. K. Rowling",
        "John F. Kennedy",
        "the U.S. Army",
        "No. 5",
        "Dec. 25",
        "July 4, 1776",
        "Tue, 14 Jan",
        "5 - 6",
        "10 to 15",
        "5 km",
        "$3.5 million",
        "+44 20 7946 0958",
        "2 3/4 cups",
        "v3.11.2",
        "St. John",
        "approx. 5",
        "Inc. in",
    ],
)
def test_never_cuts_inside(whole: str) -> None:
    text = f"Hello, it is {whole}, we know. Then we go."
    cuts, position = [], 0
    for clause in eager(text):
        position += len(clause)
        cuts.append(position)
    assert cuts[-1] == len(text)
    start = text.index(whole)
    assert not [cut for cut in cuts if start < cut < start + len(whole)]
    assert len(cuts) > 1


@pytest.mark.parametrize(
    ("text", "clauses"),
    [
        ("No. I will not.", ["No. ", "I will not."]),
        ("We meet at 6 p.m. Then we eat.", ["We meet at 6 p.m. ", "Then we eat."]),
        ("Yes—absolutely.", ["Yes—", "absolutely."]),
        ("Yes - of course.", ["Yes - ", "of course."]),
        ("Well... I see.", ["Well... ", "I see."]),
        ("1. Boil water\n2. Add tea", ["1. Boil water\n", "2. Add tea"]),
        ('He said "Go!" Then left.', ['He said "Go!" ', "Then left."]),
        ("It is 2024. Next.", ["It is 2024. ", "Next."]),
        ("One.\n\nTwo.", ["One.\n\n", "Two."]),
    ],
)
def test_cuts_where_a_speaker_pauses(text: str, clauses: list[str]) -> None:
    limits = (ClauseLimits(1, 1, 50, 60),)
    chunker = ClauseChunker(limits)
    assert chunker.feed(text) + chunker.flush() == clauses


def test_scripts_without_spaces() -> None:
    assert chunk("今天天气很好，我们去公园吧。你觉得怎么样？") == [
        "今天天气很好，",
        "我们去公园吧。",
        "你觉得怎么样？",
    ]
    long = "天" * 300
    assert all(len(clause) <= 60 for clause in chunk(long))
    thai = chunk("สวัสดีครับวันนี้อากาศดีมากเราไปเดินเล่นที่สวนสาธารณะกันเถอะ")
    assert len(thai[0]) < 30


def test_max_chars_bounds_even_a_single_word() -> None:
    clauses = chunk("x" * 1000 + " and more", max_chars=100)
    assert max(map(len, clauses)) <= 101


def test_flush_gives_the_rest_and_begins_a_new_text() -> None:
    chunker = ClauseChunker()
    assert chunker.feed("The time is 10:") == []
    assert chunker.flush() == ["The time is 10:"]
    assert chunker.flush() == []
    assert chunker.feed("Sure, yes") == ["Sure, "]  # again a first clause
    chunker.flush()
    assert chunker.feed("  ") == []
    assert chunker.flush() == ["  "]


def test_refuses_empty_limits() -> None:
    with pytest.raises(ValueError, match="limits"):
        ClauseChunker(())
    with pytest.raises(ValueError, match="max_chars"):
        ClauseChunker(max_chars=0)


texts = st.one_of(
    st.text(max_size=120),
    st.lists(
        st.sampled_from(
            ["word", "Dr.", "3.5", "e.g.", "and", "the", "—", "-", "1,024", "p.m.", "Yes!", "so,"]
            + ["\n", "1.", "with", "人。", "天", "...", '"Hm."', "John", "F."]
        ),
        max_size=60,
    ).map(" ".join),
)


@settings(max_examples=150, deadline=None)
@given(texts, st.lists(st.integers(0, 500), max_size=8))
def test_exact_and_independent_of_the_split(text: str, cuts: list[int]) -> None:
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    chunker = ClauseChunker()
    clauses: list[str] = []
    for start, end in zip(bounds, bounds[1:], strict=False):
        clauses += chunker.feed(text[start:end])
    clauses += chunker.flush()
    assert "".join(clauses) == text
    assert clauses == chunk(text)
    assert all(clause for clause in clauses)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60))
def test_the_most_eager_limits_are_exact_too(text: str) -> None:
    assert "".join(eager(text)) == text
