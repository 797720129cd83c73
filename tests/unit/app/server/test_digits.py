"""Numbers in texts of strangers: ASCII digits, and as many as are allowed."""

from __future__ import annotations

import re

import pytest

from app.digits import whole_number
from tests.support.paths import ROOT

# Digits for str.isdigit(); int() refuses the first five and reads the others.
ODD_DIGITS = ("²", "³", "①", "⑴", "𑁒", "٣", "५", "３", "𝟗")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("007", 7), ("99999", 99999), ("123456", None), ("", None)]
    + [(text, None) for text in ("-1", "+1", " 1", "1 ", "1_0", "1.0", "1e3", "0x1", "a")]
    + [(text, None) for text in (*ODD_DIGITS, *(f"1{digit}" for digit in ODD_DIGITS))],
)
def test_only_ascii_digits_are_a_number(text: str, expected: int | None) -> None:
    assert whole_number(text, max_digits=5) == expected


def test_nobody_else_asks_whether_text_is_digits() -> None:
    root = ROOT
    users = [
        str(path.relative_to(root))
        for path in (root / "app").rglob("*.py")
        if re.search(r"\.is(digit|decimal|numeric)\b", path.read_text(encoding="utf-8"))
    ]
    assert users == ["app/digits.py"]
