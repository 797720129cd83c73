"""SpokenText: Markdown out of a stream, the same whatever the split of the deltas."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from audio.text.markdown import SpokenText, strip_markdown

CASES = [
    # emphasis
    ("**Hi** there", "Hi there"),
    ("the *ita*lic one and ***both***", "the italic one and both"),
    ("un**believ**able, un*frigging*real", "unbelievable, unfriggingreal"),
    ('**"Quoted"** and (*aside*)', '"Quoted" and (aside)'),
    ("_emph_ and __strong__ text", "emph and strong text"),
    # what only looks like emphasis
    ("snake_case stays, max_num_tokens too", "snake_case stays, max_num_tokens too"),
    ("2 * 3 is 6, 2*3 too, 2**8", "2 * 3 is 6, 2*3 too, 2**8"),
    ("width*height", "width*height"),
    ("a 5* hotel", "a 5* hotel"),
    (r"\*not emphasis\*", "*not emphasis*"),
    ("see https://x.org/_a_/b_c_", "see https://x.org/_a_/b_c_"),
    # signs that are content
    ("5 < 10 and 7 > 3", "5 < 10 and 7 > 3"),
    ("a<b and c>d", "a<b and c>d"),
    ("I <3 it", "I <3 it"),
    ("AT&T, salt & pepper", "AT&T, salt & pepper"),
    ("It costs $3.50, or $4* with tax", "It costs $3.50, or $4* with tax"),
    ("-5 degrees", "-5 degrees"),
    ("#5 and #music", "#5 and #music"),
    ("~/notes is about ~5 MB", "~/notes is about ~5 MB"),
    (r"C:\Users\me", r"C:\Users\me"),
    # blocks
    ("## Title\n\nText", "Title\n\nText"),
    ("- one\n- two\n  * three", "one\ntwo\nthree"),
    ("1. one\n2. two", "1. one\n2. two"),
    ("- [ ] open\n- [x] done", "open\ndone"),
    ("> said\n> twice", "said\ntwice"),
    ("above\n\n---\n\nbelow", "above\n\nbelow"),
    ("| Day | High |\n|-----|:----:|\n| Mon | 20 |\nend", "Day, High\n\nMon, 20\nend"),
    # code
    ("Use `ls -l *.py` here", "Use ls -l *.py here"),
    ("Run:\n```sh\nrm *\n```\nDone.", "Run:\n\nDone."),
    ("Run:\n~~~\nx = 1\n~~~\nDone.", "Run:\n\nDone."),
    ("Here: ```ls``` ok", "Here: ls ok"),
    ("Here: ```python\nx\n```\nok", "Here:\nok"),
    ("- item:\n  ```\n  code\n  ```\n- next", "item:\n\nnext"),
    ("```\nnever closed", ""),
    # links, citations, tags
    ("Click [here](https://a.org/b?c=1&d=(2)) now", "Click here now"),
    ("Read [*this* book](x) and ![a cat](cat.png)", "Read this book and a cat"),
    ("so [the docs][1] say", "so [the docs] say"),
    ("so [the docs][ref] say", "so the docs say"),
    ("It rains [1][2], often[3].", "It rains, often."),
    ("Known【4†source】 fact[^2].", "Known fact."),
    ("[^1]: a note\nText", "Text"),
    ("Dear [Your Name],", "Dear [Your Name],"),
    ("<https://a.org> and <b>bold</b><br>next", "https://a.org and bold\nnext"),
    ("a &amp; b &lt; c", "a & b < c"),
    # struck out
    ("~~old~~ new", "new"),
    ("the ~~$50~~ $40 one", "the $40 one"),
    # emoji
    ("It is sunny \u2600\ufe0f today.", "It is sunny today."),
    ("Great\U0001f389!", "Great!"),
    ("Great!\U0001f389Go \U0001f468\u200d\U0001f469\u200d\U0001f467 now", "Great! Go now"),
    ("1\ufe0f\u20e3 first", "1 first"),
    ("\U0001f642", ""),
    ("\U0001f44d Sure", "Sure"),
    # nothing left
    ("##", ""),
    ("***", ""),
    ("", ""),
]


@pytest.mark.parametrize(("markdown", "expected"), CASES)
def test_strips(markdown: str, expected: str) -> None:
    assert strip_markdown(markdown) == expected


@pytest.mark.parametrize(("markdown", "expected"), CASES)
def test_every_cut_in_two_and_single_characters(markdown: str, expected: str) -> None:
    for cut in range(len(markdown) + 1):
        stripper = SpokenText()
        parts = [stripper.feed(markdown[:cut]), stripper.feed(markdown[cut:]), stripper.flush()]
        assert "".join(parts) == expected, cut
    stripper = SpokenText()
    assert "".join(map(stripper.feed, markdown)) + stripper.flush() == expected


MARKS = "*_`~#>-+|[]()<>!\\&\n \t1.a:/"
markdown_texts = st.one_of(
    st.text(MARKS, max_size=60),
    st.lists(
        st.sampled_from(
            ["**", "*", "_", "```", "`", "~~", "\n", "\n\n", "# ", "- ", "1. ", "[a](b)", "[1]"]
            + ["<b>", "| x | y |", "word ", "snake_case", "3.5", "\U0001f642", "---", "&amp;"]
        ),
        max_size=25,
    ).map("".join),
)


@settings(max_examples=150, deadline=None)
@given(markdown_texts, st.lists(st.integers(0, 200), max_size=8))
@example("*ita*lic*", [4])
@example("~~~\n~~~\n", [3, 5])
def test_any_partition_gives_the_same_text(markdown: str, cuts: list[int]) -> None:
    bounds = [0, *sorted(cut % (len(markdown) + 1) for cut in cuts), len(markdown)]
    stripper = SpokenText()
    pieces = [stripper.feed(markdown[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
    assert "".join(pieces) + stripper.flush() == strip_markdown(markdown)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.from_regex(r"[A-Za-z0-9,.']{1,8}", fullmatch=True), min_size=1, max_size=12))
def test_plain_prose_is_left_as_it_is(words: list[str]) -> None:
    text = " ".join(words)
    assert strip_markdown(text) == text


def test_holds_back_only_what_is_ambiguous() -> None:
    stripper = SpokenText()
    assert stripper.feed("Sure, let me") == "Sure, let me"
    assert stripper.feed(" check *") == " check"  # the space and the mark wait for a word
    assert stripper.feed("that") == " that"
    assert stripper.feed("* now. See [our") == " now. See"
    assert stripper.feed(" guide](http://x") == ""
    assert stripper.feed(".org)! ") == " our guide!"
    assert stripper.flush() == " "


def test_is_ready_for_the_next_text_after_flush() -> None:
    stripper = SpokenText()
    assert stripper.feed("```\ncode") + stripper.flush() == ""
    assert stripper.feed("**next**") + stripper.flush() == "next"


def test_an_unclosed_bracket_does_not_hold_the_text_back_for_ever() -> None:
    stripper = SpokenText()
    out = stripper.feed("[" + "many words " * 100)
    assert out.startswith("[many words")
