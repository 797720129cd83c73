"""Streaming text: whole characters, nothing of a stop string, the same however it is cut."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from llm_core.tokenizer.detokenizer import Detokenizer

BYTES = [bytes((value,)) for value in range(256)]


def run(pieces: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    detokenizer = Detokenizer(pieces, stop)
    texts = [detokenizer.feed(index) for index in range(len(pieces))]
    return [*texts, detokenizer.flush()], detokenizer.stopped


def test_a_character_over_several_tokens_comes_whole() -> None:
    texts, _ = run([b"a", b"\xf0\x9f", b"\x99", b"\x82b", b"\xc3", b"\xa9"])
    assert texts == ["a", "", "", "🙂b", "", "é", ""]


def test_replacement_only_for_bytes_that_are_really_invalid() -> None:
    texts, _ = run([b"a", b"\xe2\x82", b"x", b"\xff", b"\xac"])
    assert texts == ["a", "", "\N{REPLACEMENT CHARACTER}x", *"\N{REPLACEMENT CHARACTER}" * 2, ""]


def test_a_reply_cut_inside_a_character_ends_before_it() -> None:
    assert run([b"ok", b"\xf0\x9f\x99"])[0] == ["ok", "", ""]


def test_a_stop_string_over_tokens_never_leaks() -> None:
    texts, stopped = run([b"Hi", b" En", b"d", b" of", b" it"], stop=("End of",))
    assert texts == ["Hi", " ", "", "", "", ""]
    assert stopped


def test_what_only_looked_like_a_stop_string_is_given_back() -> None:
    texts, stopped = run([b"x\n", b"\n", b"User", b"s: go"], stop=("\n\nUser:",))
    assert texts == ["x", "", "", "\n\nUsers: go", ""]
    assert not stopped


def test_flush_gives_the_beginning_of_a_stop_string_that_never_came() -> None:
    assert run([b"a", b"##"], stop=("###",))[0] == ["a", "", "##"]


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert run([b"xabcd"], stop=("abcd", "bc"))[0][0] == "xa"
    assert run([b"xabc"], stop=("bc", "abc"))[0][0] == "x"


def test_text_after_the_stop_in_the_same_token_is_dropped() -> None:
    detokenizer = Detokenizer([b"a. STOP more", b"never"], ("STOP",))
    assert detokenizer.feed(0) == "a. "
    assert detokenizer.feed(1) == ""
    assert detokenizer.flush() == ""


def test_stop_strings_hold_multi_byte_characters() -> None:
    texts, stopped = run([b"a\xe2", b"\x80", b"\xa6", b"b"], stop=("…",))
    assert ("".join(texts), stopped) == ("a", True)


def expected(text: str, stop: tuple[str, ...]) -> str:
    """Character by character: at the first moment that a stop string is complete, cut before it."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


@given(
    text=st.text(alphabet="abé🙂", max_size=24),
    stop=st.lists(st.text(alphabet="abé🙂", min_size=1, max_size=4), max_size=3).map(tuple),
    cuts=st.lists(st.integers(0, 100), max_size=12),
)
@settings(deadline=None)
def test_any_cut_gives_the_same_text(text: str, stop: tuple[str, ...], cuts: list[int]) -> None:
    data = text.encode()
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    pieces = [data[a:b] for a, b in zip(places, places[1:], strict=False)]
    texts, stopped = run(pieces, stop)
    assert "".join(texts) == expected(text, stop)
    assert stopped == any(s in text for s in stop)
    so_far = ""
    for part in texts:
        so_far += part
        assert expected(text, stop).startswith(so_far)


@given(st.binary(max_size=20))
@settings(deadline=None)
def test_any_bytes_equal_pythons_decoding(data: bytes) -> None:
    detokenizer = Detokenizer(BYTES)
    text = "".join(detokenizer.feed(byte) for byte in data)
    assert data.decode(errors="replace").rstrip("\ufffd") == text.rstrip("\ufffd")
