"""Fields of multipart forms, as clients write them and as nobody should."""

from __future__ import annotations

import pytest

from app.api.http.multipart import FormField, form_fields
from app.errors import ClientError

KIND = 'multipart/form-data; boundary="x y"'


def form(*parts: bytes, end: bytes = b"--x y--\r\n") -> bytes:
    return b"".join(b"--x y\r\n" + part + b"\r\n" for part in parts) + end


def part(name: str, value: bytes = b"v", extra: str = "") -> bytes:
    head = f'Content-Disposition: form-data; name="{name}"{extra}\r\n\r\n'
    return head.encode() + value


def test_fields_come_in_order_and_may_repeat() -> None:
    body = form(part("a[]", b"1"), part("a[]", b"2"), part("f", b"\0\r\n--x", '; filename="a.wav"'))
    assert form_fields(KIND, body) == [
        FormField("a[]", b"1"),
        FormField("a[]", b"2"),
        FormField("f", b"\0\r\n--x", "a.wav"),
    ]


def test_a_preamble_is_skipped_and_what_is_behind_the_end() -> None:
    body = b"hello\r\n" + form(part("a")) + b"--x y\r\n" + part("b")
    assert [field.name for field in form_fields(KIND, body)] == ["a"]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("multipart/form-data", form(part("a"))),
        (KIND, b""),
        (KIND, b"no boundary in here"),
        (KIND, b"--x y--"),
        (KIND, form(b"\r\n\r\nv", b"Content-Disposition: form-data\r\n\r\nv")),
    ],
)
def test_where_there_is_nothing(kind: str, body: bytes) -> None:
    assert form_fields(kind, body) == []


def test_a_form_that_breaks_off_has_what_came() -> None:
    assert form_fields(KIND, form(part("a"), part("b", b"12"), end=b"")[:-1]) == [
        FormField("a", b"v"),
        FormField("b", b"12\r"),
    ]


def test_sixteen_fields_and_no_more() -> None:
    parts = [part(f"n{number}") for number in range(16)]
    assert len(form_fields(KIND, form(*parts))) == 16
    with pytest.raises(ClientError, match="too many"):
        form_fields(KIND, form(*parts, part("last")))
    with pytest.raises(ClientError, match="too many"):
        form_fields(KIND, form(*[b"X: y\r\n\r\nv"] * 1000))
    with pytest.raises(ClientError, match="too large"):
        form_fields(KIND, form(part("a" * 5000)))
