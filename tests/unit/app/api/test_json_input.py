"""JSON of strangers: what is counted before it is parsed, and where it is parsed."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from app.api.http import json_input
from app.api.http.json_input import InputTooLargeError, is_light, json_object, parse_aside
from app.errors import ClientError

# Made of what the scan looks at.
WORDS = st.text(alphabet='",[{\\a é漢', max_size=12)
VALUES = st.recursive(
    st.none() | st.integers() | WORDS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(WORDS, inner, max_size=5),
    max_leaves=40,
)
TOO_MANY = "The body may have at most 25000 values (elements of arrays and fields of objects)."


def num_values(text: str) -> int:
    """Commas and opening brackets outside of strings, character by character."""
    count, at, is_in_string = 0, 0, False
    while at < len(text):
        if is_in_string and text[at] == "\\":
            at += 1
        elif text[at] == '"':
            is_in_string = not is_in_string
        elif not is_in_string:
            count += text[at] in ",[{"
        at += 1
    return count


@pytest.mark.parametrize("chunk_chars", [1, 2, 7, 16 * 1024])
@given(value=st.dictionaries(WORDS, VALUES, max_size=5), is_ascii=st.booleans())
def test_values_are_counted_outside_of_strings(
    chunk_chars: int, value: dict[str, Any], is_ascii: bool
) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii)
    count = num_values(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_input, "_CHUNK_CHARS", chunk_chars)
        patch.setattr(json_input, "LIGHT_CHARS", -1)  # short texts are scanned as well
        patch.setattr(json_input, "_MEDIUM_CHARS", -1)
        patch.setattr(json_input, "_VALUES_BESIDE_A_STRING", 0)
        for form in (text, text.encode()):
            patch.setattr(json_input, "MAX_VALUES", count)
            assert json_object(form) == value
            patch.setattr(json_input, "MAX_VALUES", count - 1)
            with pytest.raises(InputTooLargeError):
                json_object(form)


def refused(text: str | bytes, **told: Any) -> ClientError:
    with pytest.raises(ClientError) as caught:
        json_object(text, **told)
    return caught.value


@pytest.mark.parametrize(
    "unit", ["0", "[]", "{}", '""', '{"a":0}', "[[[[[[0]]]]]]", "1.5", '"a,b"', "null"]
)
def test_values_are_as_many_as_the_limit_says(unit: str) -> None:
    tokens = num_values(unit) + 1  # and the comma
    most = (json_input.MAX_VALUES - 1) // tokens
    json_object('{"a":[' + ",".join([unit] * most) + "]}")
    for count in (most + 1, 100 * most):
        error = refused('{"a":[' + ",".join([unit] * count) + "]}")
        assert (error.code, error.message) == ("request_too_large", TOO_MANY)


def test_text_that_is_full_of_commas_is_one_value() -> None:
    prose = 'a, b, c: [1, 2], {"k": "v"}, ' * 20_000
    assert json_object(json.dumps({"text": prose}))["text"] == prose


def test_numbers_and_escapes_are_counted() -> None:
    long_number = "9" * 4300
    json_object('{"a":[' + ",".join([long_number] * 15) + "]}")
    error = refused('{"a":[' + ",".join([long_number] * 100) + "]}")
    assert error.message == "The body may have at most 65536 digits in its longest numbers."
    json_object(json.dumps({"a": long_number * 100}))  # as a string they cost nothing
    json_object(json.dumps({"a": "é" * 400_000}))
    for escapes in ("é" * 600_000, "/" * 600_000, '"' * 600_000):
        text = json.dumps({"a": escapes}).replace("/", "\\/")
        error = refused(text)
        assert error.message == "The body may have at most 500000 escaped characters."


@pytest.mark.parametrize(
    "text",
    [
        "[" * 500_000,
        '{"model": ' + "[" * 100_000,
        '{"a":' * 100_000,
        '"' * 500_000,
        "9" * 500_000,
        '{"a":' + "9" * 500_000,
        "{," + "0," * 500_000,
        '{"a":1}' + ",[]" * 500_000,
        '{"a":[tru' + ",[]" * 500_000,
        '{"a":"\\x' + ",[]" * 500_000,
    ],
)
def test_what_is_malformed_is_told_in_the_words_of_the_parser(text: str) -> None:
    with pytest.raises(ValueError) as wrong:
        from_json(text, allow_inf_nan=False)
    for form in (text, text.encode()):
        error = refused(form, what="The message", param="p")
        assert (error.code, error.param) == ("invalid_json", "p")
        assert error.message == f"The message is not valid JSON: {wrong.value}."


def test_the_refusal_names_what_and_has_the_protocols_code() -> None:
    text = '{"a":[' + "0," * 30_000 + "0]}"
    error = refused(text, what="'session'", param="session", too_large="message_too_large")
    assert (error.code, error.param) == ("message_too_large", "session")
    assert error.message.startswith("'session' may have at most 25000 values")


def test_parsing_leaves_the_search_for_cycles_as_it_was() -> None:
    assert gc.isenabled()
    json_object('{"a":[[],[]]}')
    refused("[" * 1000)
    assert gc.isenabled()
    gc.disable()
    try:
        json_object("{}")
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[]" + "," * 10_000, True),
        ("A" * 60_000, True),  # 0.9 s of audio
        ("A" * 70_000, False),
        ("," * 20_000, False),
        ("[,{" * 400 + "A" * 50_000, True),
        ("A" * 50_000 + "[" * 500, False),
    ],
)
def test_what_is_light(text: str, expected: bool) -> None:
    assert is_light(text) is expected
    assert is_light(text.encode()) is expected


async def test_long_texts_are_parsed_in_a_thread_one_at_a_time() -> None:
    threads, at_once, most = set[int](), 0, 0
    may_end = threading.Event()
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def parse(text: str) -> int:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        threads.add(threading.get_ident())
        loop.call_soon_threadsafe(begun.set)
        assert may_end.wait(10)
        at_once -= 1
        return len(text)

    parsing = [asyncio.create_task(parse_aside(parse, "A" * 100_000)) for _ in range(5)]
    await begun.wait()
    may_end.set()  # the loop runs while the first one is parsed
    assert await asyncio.gather(*parsing) == [100_000] * 5
    assert most == 1
    assert threading.get_ident() not in threads


async def test_short_texts_are_parsed_at_once_and_errors_come_out() -> None:
    assert await parse_aside(lambda text: threading.get_ident(), "{}") == threading.get_ident()
    for text in ("[", "[" * 100_000):
        with pytest.raises(ClientError, match="not valid JSON"):
            await parse_aside(json_object, text)
