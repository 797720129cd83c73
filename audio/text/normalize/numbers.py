"""English number words: cardinals, ordinals, years, decimals, digits one by one.

Written out here rather than taken from num2words because that says "one thousand and four", puts
commas and hyphens in, and takes 60 us a number and 470 us a sum of money; the tests hold these
functions against it.
"""

from __future__ import annotations

from functools import lru_cache

_ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = [
    "zero",
    "ten",
    "twenty",
    "thirty",
    "forty",
    "fifty",
    "sixty",
    "seventy",
    "eighty",
    "ninety",
]
_SCALES = (
    "",
    "thousand",
    "million",
    "billion",
    "trillion",
    "quadrillion",
    "quintillion",
)
_IRREGULAR_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}
_LONGEST_CARDINAL = 3 * len(_SCALES)


def _below_thousand(number: int) -> list[str]:
    words: list[str] = []
    if number >= 100:
        words += [_ONES[number // 100], "hundred"]
        number %= 100
    if number >= 20:
        words.append(_TENS[number // 10])
        number %= 10
        if number:
            words.append(_ONES[number])
    elif number or not words:
        words.append(_ONES[number])
    return words


@lru_cache(maxsize=4096)
def cardinal(number: int) -> str:
    """``1024`` is "one thousand twenty four". From 10^21 on the digits are read one by one."""
    if number < 0:
        return "minus " + cardinal(-number)
    if number < 1000:
        return " ".join(_below_thousand(number))
    if len(str(number)) > _LONGEST_CARDINAL:
        return digits(str(number))
    groups: list[str] = []
    for scale in _SCALES:
        number, group = divmod(number, 1000)
        if group:
            groups.append(" ".join([*_below_thousand(group), scale]).rstrip())
        if not number:
            break
    return " ".join(reversed(groups))


def ordinal(number: int) -> str:
    """``21`` is "twenty first"."""
    head, _, last = cardinal(number).rpartition(" ")
    if last in _IRREGULAR_ORDINALS:
        last = _IRREGULAR_ORDINALS[last]
    elif last.endswith("y"):
        last = last[:-1] + "ieth"
    else:
        last += "th"
    return f"{head} {last}".lstrip()


def plural(word: str) -> str:
    """The plural of a number word: "sixties", "halves", "quarters"."""
    if word == "half":
        return "halves"
    return word[:-1] + "ies" if word.endswith("y") else word + ("es" if word == "six" else "s")


def digits(text: str) -> str:
    """Each digit of ``text`` as a word; other characters are passed over."""
    return " ".join(_ONES[int(char)] for char in text if char.isdecimal())


def pairs(number: int) -> str:
    """As years and house numbers are read: 1776 "seventeen seventy six", 405 "four oh five"."""
    if number < 100 or number > 9999 or (number < 1000 and number % 100 == 0):
        return cardinal(number)
    high, low = divmod(number, 100)
    if low == 0:
        return cardinal(number) if high % 10 == 0 else cardinal(high) + " hundred"
    low_words = "oh " + _ONES[low] if low < 10 else cardinal(low)
    return f"{cardinal(high)} {low_words}"


def year(number: int) -> str:
    """2008 "two thousand eight", 2025 "twenty twenty five", 1905 "nineteen oh five"."""
    if number < 1000 or number > 9999 or 2000 <= number <= 2009:
        return cardinal(number)
    return pairs(number)


def decade(number: int) -> str:
    """1990 "nineteen nineties", 90 "nineties", 2000 "two thousands"."""
    head, _, last = year(number).rpartition(" ")
    return f"{head} {plural(last)}".lstrip()


def to_int(text: str) -> int:
    """The whole number written as ``1,024`` or ``1024``."""
    return int(text.replace(",", ""))


def number_words(text: str) -> str:
    """A plain number: ``1,024``, ``0.004``, ``.5``, ``-3``, ``+7``."""
    sign = ""
    if text[:1] in ("-", "−"):
        sign, text = "minus ", text[1:]
    elif text[:1] == "+":
        sign, text = "plus ", text[1:]
    whole, dot, fraction = text.replace(",", "").partition(".")
    if not dot:
        return sign + cardinal(int(whole))
    words = f"{cardinal(int(whole))} point" if whole else "point"
    return f"{sign}{words} {digits(fraction)}"


def is_one(text: str) -> bool:
    """Whether the number takes the singular."""
    return text.lstrip("-−+") in ("1", "1.0")


def fraction_words(numerator: int, denominator: int) -> str:
    """3/4 "three quarters", 1/2 "one half", 22/7 "twenty two over seven"."""
    if denominator == 0 or numerator == 0 or numerator > denominator or denominator > 100:
        return f"{cardinal(numerator)} over {cardinal(denominator)}"
    if denominator == 1:
        return f"{cardinal(numerator)} over one"
    part = {2: "half", 4: "quarter"}.get(denominator) or ordinal(denominator)
    return f"{cardinal(numerator)} {part if numerator == 1 else plural(part)}"


_ROMAN_VALUES = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}
_ROMAN_PARTS = (
    (1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"),
    (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"),
)  # fmt: skip


def roman_value(text: str) -> int | None:
    """The value of a well-formed Roman numeral in capitals, else None."""
    value = 0
    for char, following in zip(text, text[1:] + " ", strict=True):
        part = _ROMAN_VALUES.get(char)
        if part is None:
            return None
        value += -part if _ROMAN_VALUES.get(following, 0) > part else part
    rest, canonical = value, ""
    for amount, letters in _ROMAN_PARTS:
        while rest >= amount:
            canonical += letters
            rest -= amount
    return value if canonical == text and value > 0 else None
