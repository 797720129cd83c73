"""Values as they stand in front of a unit: numbers, mixed fractions, ranges, and their words."""

from __future__ import annotations

import re

from audio.text.normalize.numbers import fraction_words, is_one, number_words

NUM = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
VULGAR = {
    "½": (1, 2), "⅓": (1, 3), "⅔": (2, 3), "¼": (1, 4), "¾": (3, 4), "⅕": (1, 5), "⅖": (2, 5),
    "⅗": (3, 5), "⅘": (4, 5), "⅙": (1, 6), "⅚": (5, 6), "⅐": (1, 7), "⅛": (1, 8), "⅜": (3, 8),
    "⅝": (5, 8), "⅞": (7, 8), "⅑": (1, 9), "⅒": (1, 10),
}  # fmt: skip
_VULGAR_CLASS = "[" + "".join(VULGAR) + "]"
SINGLE = rf"[-+−]?(?:\d+[ -]\d{{1,2}}/\d{{1,3}}(?![\d/])|\d* ?{_VULGAR_CLASS}|\d+/\d+|{NUM})"
START = r"(?<![\w.,/:'-])"
"""In front of a value: nothing that would make it part of something longer."""
VALUE = rf"{SINGLE}(?: ?(?:-|–|—| to ) ?{SINGLE})?"
"""A value or a range of two."""

_SINGLE_RE = re.compile(SINGLE)
_RANGE = re.compile(rf"({SINGLE}) ?(?:-|–|—| to ) ?({SINGLE})")
_MIXED = re.compile(r"(?:(\d+)[ -])?(\d+)/(\d+)")
_WITH_VULGAR = re.compile(rf"(\d*) ?({_VULGAR_CLASS})")


def _mixed(whole: str | None, numerator: int, denominator: int) -> str:
    part = fraction_words(numerator, denominator)
    if not whole:
        return part
    if numerator == 1 and denominator in (2, 3, 4):
        part = "a " + part.removeprefix("one ")
    return f"{number_words(whole)} and {part}"


def _single_words(text: str) -> str:
    sign = ""
    if text[0] in "-−+":
        sign, text = ("plus " if text[0] == "+" else "minus "), text[1:]
    mixed = _MIXED.fullmatch(text)
    if mixed:
        return sign + _mixed(mixed.group(1), int(mixed.group(2)), int(mixed.group(3)))
    vulgar = _WITH_VULGAR.fullmatch(text)
    if vulgar:
        return sign + _mixed(vulgar.group(1), *VULGAR[vulgar.group(2)])
    return sign + number_words(text)


def value_words(text: str) -> str:
    """Words for what VALUE matches: ``5-10`` "five to ten", ``2 3/4`` "two and three quarters"."""
    text = text.strip()
    if not _SINGLE_RE.fullmatch(text):
        span = _RANGE.fullmatch(text)
        if span:
            return f"{_single_words(span.group(1))} to {_single_words(span.group(2))}"
    return _single_words(text)


def takes_singular(text: str) -> bool:
    """Whether a unit behind this value stands in the singular: 1, and fractions below one."""
    text = text.strip()
    return is_one(text) or text in VULGAR or re.fullmatch(r"\d+/\d+", text) is not None
