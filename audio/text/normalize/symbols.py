"""Mathematics, signs, fractions, plain numbers, and the clean-up before and after everything."""

from __future__ import annotations

import re
import unicodedata
from re import Match

from audio.text.markdown_rules import strip_emoji
from audio.text.normalize.numbers import (
    cardinal,
    digits,
    fraction_words,
    number_words,
    ordinal,
    to_int,
    year,
)
from audio.text.normalize.values import NUM, START, VULGAR, value_words

_TRANSLATION = str.maketrans(
    {
        "‘": "'", "’": "'", "‛": "'", "ʼ": "'", "“": '"', "”": '"', "„": '"', "«": '"', "»": '"',
        "‐": "-", "‑": "-", "‒": "–", "―": "—", "…": "...", "\u00a0": " ", "\u2009": " ",
        "\u202f": " ", "\u2007": " ", "\u3000": " ", "⁄": "/", "∕": "/",
        "\u200b": None, "\u2060": None, "\ufeff": None, "\u00ad": None, "\u200e": None,
        "\u200f": None, "⋅": "·", "∙": "·", "∗": "*", "％": "%", "＋": "+", "＝": "=",
    }
)  # fmt: skip
_LIST_NUMBER = re.compile(r"(^|\n)[ \t]*(\d{1,3})[.)](?=\s)[ \t]*")
_LEFT_OVER_LINK = re.compile(r"!?\[([^\]\n]+)\]\((?:[^()\s]|\([^()\s]*\))*\)")
_LEFT_OVER_MARK = re.compile(
    r"`+|~~|(?<!\S)\*\*(?=\S)|\*\*(?!\S)|\*\*(?=[^\s\w])|(?<!\w)__|__(?!\w)"
)
_HEADING = re.compile(r"(^|\n)#{1,6} +|#{2,}")
_SPACE_RUN = re.compile(r" {2,}")
_ENDLESS_NUMBER = re.compile(r"\d(?:,?\d){39,}")
_LEFT_OVER_CITATION = re.compile(r" ?\[\d{1,3}(?:, ?\d{1,3})*\]")

_FRACTION = re.compile(rf"{START}(\d{{1,3}}) ?/ ?(\d{{1,3}})(?![\w/]|[.,]\d)")
_MIXED = re.compile(rf"{START}(?:\d+[ -]\d{{1,2}}/\d{{1,3}}(?![\d/])|\d* ?[{''.join(VULGAR)}])")
_FRACTION_DENOMINATORS = frozenset((2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 32, 64))
_SCORE_DENOMINATORS = frozenset((10, 20, 100))
_ORDINAL = re.compile(r"(?<![\w.,$-])(\d{1,3}(?:,\d{3})+|\d+) ?(?:st|nd|rd|th|ST|ND|RD|TH)\b")
_ORDINAL_SIGN = re.compile(r"(?<![\w.,$-])(\d+)[ºª](?![CF])")
_RANGE = re.compile(rf"(?<![\w.,/:'-])({NUM})[-–—]({NUM})(?![\w/]|[-.,:]\d)")
_SPACED_RANGE = re.compile(rf"{START}({NUM}) [-–—] ({NUM})(?![\w/])")
_YEAR_CUE = (
    r"(?i:\b(?:in|since|year|years|by|until|till|from|before|after|around|circa|to|and|during"
    r"|early|"
    r"late|mid|of|between|class of|spring|summer|fall|autumn|winter|copyright) )"
)
_CUED_YEAR = re.compile(
    rf"({_YEAR_CUE})(1\d\d\d|20\d\d)(?!\d|[.,:]\d|%| (?:people|percent|dollars|miles|feet|times"
    rf"|meters|seats|points|words|pounds|kilo))(?! [a-z]+s\b)"
)
_BARE_YEAR = re.compile(
    r"(?<![\w.,/:$-])(19\d\d|20[0-9]\d)(?![\w/]|[.,:-]\d)(?! (?:people|[a-z]+[^s\W]s\b))"
)
_ERA_YEAR = re.compile(r"(?<![\w.,])(\d{3,4})(?= (?:AD|BC|BCE|CE|A\.D|B\.C)\b)")
_LEADING_SIGN = re.compile(rf"(?:(?<=^)|(?<=[\s(\"'=×÷*/+<>]))[-−+](?={NUM})")
_PLAIN = re.compile(NUM)

_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")  # line breaks tell of lists
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_SUPERSCRIPT = re.compile(r"([⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹ⁿ]+)")
_SUBSCRIPT = re.compile(r"(?<=\w)([₀-₉]+)")
_CARET = re.compile(r"(?<=[\w)]) ?(?:\^|\*\*) ?(?:\{([^{}]+)\}|\(([^()]+)\)|([-−]?\w+))")
_SQUARE_ROOT = re.compile(r"√ ?\(?([\w.]+)\)?")
_GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "θ": "theta",
    "λ": "lambda", "μ": "mu", "µ": "mu", "π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau",
    "φ": "phi", "χ": "chi",
    "ψ": "psi", "ω": "omega", "Δ": "delta", "Σ": "sigma", "Ω": "omega", "Π": "pi", "Φ": "phi",
}  # fmt: skip
_GREEK_RE = re.compile(
    rf"(?<![\u0370-\u03ff\u1f00-\u1fff])([{''.join(_GREEK)}])(?![\u0370-\u03ff\u1f00-\u1fff])"
)
_SIGNS = {
    "≠": "is not equal to", "≈": "is approximately", "≅": "is approximately",
    "≤": "is less than or equal to",
    "≥": "is greater than or equal to", "×": "times", "·": "times", "÷": "divided by",
    "±": "plus or minus",
    "∞": "infinity", "∑": "sum of", "∫": "integral of", "∂": "partial", "√": "square root of",
    "∈": "in", "∪": "union", "∩": "intersection", "∝": "is proportional to", "∴": "therefore",
    "°": "degrees", "§": "section", "¶": "paragraph", "©": "copyright", "€": "euros", "£": "pounds",
    "¥": "yen", "¢": "cents", "%": "percent", "‰": "per mille", "→": "to", "⇒": "implies",
    "⟶": "to", "↔": "to", "№": "number", "−": "minus", "…": "...",
}  # fmt: skip
_SIGN = re.compile("[" + "".join(_SIGNS) + "]")
_WORDY_OPERATORS = (
    (re.compile(r" ?(?:!=|/=|<>) ?"), " is not equal to "),
    (re.compile(r" ?(?:===?) ?"), " equals "),
    (re.compile(r" ?<= ?(?=\S)"), " is less than or equal to "),
    (re.compile(r" ?>= ?(?=\S)"), " is greater than or equal to "),
    (re.compile(r"\s?(?:-{1,2}>|=>)\s?"), " to "),
    (re.compile(r"(?<=[\w)])\s?<\s?(?=[\w(.])"), " is less than "),
    (re.compile(r"(?<=[\w)])\s?>\s?(?=[\w(.])"), " is greater than "),
    (re.compile(r"^\s*[<](?=\s?\d)|(?<=\s)<(?=\s?\d)"), " less than "),
    (re.compile(r"^\s*[>](?=\s?\d)|(?<=\s)>(?=\s?\d)"), " more than "),
)
_FUNCTION = re.compile(r"\b([a-zA-Z])\(([a-z0-9]|[a-z] ?[-+] ?\w)\)")
_EQUATION_MINUS = re.compile(r"(?<=[\w)]) [-–−] (?=[\w(.])|(?<=[\d)])[-–−](?=[\d.(])")
_EQUATION_OVER = re.compile(r"(?<=[\d)]) ?/ ?(?=[\d(][\d.,]*\)? ?(?:=|equals))")
_TIMES = re.compile(
    r"(?<=[\d)]) ?\* ?(?=[\w(.$])|(?<=\w) \* (?=\w)|(?<=\b\w)\*(?=\w\b)|(?<=[a-z])\*(?=[a-z])|"
    r"(?<=\d) [xX] (?=\d)"
)
_PLUS = re.compile(r"(?<=[\w)]) ?\+ ?(?=[\w(.])|(?<=\s)\+(?=\s)")
_PLUS_BEHIND = re.compile(r"(?<=\w)\+(?![\w+])")
_EQUALS = re.compile(r" ?= ?(?=\S)")
_DIVIDED = re.compile(rf"({NUM}) / ({NUM})")
_ABOUT = re.compile(r"(?<![\w/])~ ?(?=[$£€]?[\d.])")
_PER_WORD = re.compile(
    r"(?<=[a-z])/(hour|hr|day|night|week|month|year|person|second|minute|mile|gallon|kg|unit"
    r"|each)\b"
)
_SLASH = re.compile(r"(?<=[A-Za-z]) ?/ ?(?=[A-Za-z])")


def clean(text: str) -> str:
    """Plain quotes and spaces, no emoji, no invisible characters, no remains of Markdown."""
    if not text.isascii():
        text = strip_emoji(unicodedata.normalize("NFC", text)).translate(_TRANSLATION)
    if not text.isprintable():  # espeak-ng fails at a zero byte
        text = _CONTROL.sub(" ", text)
    if "[" in text:
        text = _LEFT_OVER_LINK.sub(r"\1", text)
        text = _LEFT_OVER_CITATION.sub("", text)
    if "`" in text or "**" in text or "~~" in text or "__" in text:
        text = _LEFT_OVER_MARK.sub("", text)
    if "#" in text:
        text = _HEADING.sub(r"\1", text)
    if "~" in text:
        text = _ABOUT.sub("about ", text)
    if "  " in text:
        text = _SPACE_RUN.sub(" ", text)
    if len(text) > 40:
        text = _ENDLESS_NUMBER.sub(lambda m: digits(m[0]), text)
    return _LIST_NUMBER.sub(lambda m: f"{m[1]}{cardinal(int(m[2]))}, ", text)


def _say_fraction(match: Match[str]) -> str:
    numerator, denominator = int(match[1]), int(match[2])
    if denominator in _SCORE_DENOMINATORS and numerator <= denominator and numerator != 1:
        return f"{cardinal(numerator)} out of {cardinal(denominator)}"
    if numerator < denominator and (denominator in _FRACTION_DENOMINATORS or numerator == 1):
        return fraction_words(numerator, denominator)
    return f"{cardinal(numerator)} over {cardinal(denominator)}"


def _range_side(text: str, other: str) -> str:
    both_years = all(re.fullmatch(r"1[1-9]\d\d|20\d\d", side) for side in (text, other))
    return year(int(text)) if both_years else number_words(text)


def _say_range(match: Match[str]) -> str:
    low, high = match[1], match[2]
    if re.fullmatch(r"1[1-9]\d\d|20\d\d", low) and re.fullmatch(r"\d\d", high):
        return f"{year(int(low))} to {cardinal(int(high))}"
    return f"{_range_side(low, high)} to {_range_side(high, low)}"


def _say_spaced(match: Match[str]) -> str:
    falls = float(match[1].replace(",", "")) > float(match[2].replace(",", ""))
    word = "minus" if falls else "to"
    return f"{_range_side(match[1], match[2])} {word} {_range_side(match[2], match[1])}"


def _power(text: str) -> str:
    text = text.strip().replace("−", "-")
    if text in ("2", "3"):
        return " squared" if text == "2" else " cubed"
    sign = "minus " if text.startswith("-") else ""
    return f" to the power of {sign}{text.lstrip('-+')} "


def expand_math(text: str) -> str:
    """Powers, roots, operators and relations in words; figures stay for the passes behind."""
    if not text.isascii():
        text = _SUBSCRIPT.sub(lambda m: m[1].translate(_SUBSCRIPTS), text)
        text = _GREEK_RE.sub(lambda m: f" {_GREEK[m[1]]} ", text)
        text = _SUPERSCRIPT.sub(lambda m: _power(m[1].translate(_SUPERSCRIPTS)), text)
        text = _SQUARE_ROOT.sub(r"square root of \1", text)
    if "^" in text or "**" in text:
        text = _CARET.sub(lambda m: _power(m[1] or m[2] or m[3]), text)
    is_equation = "=" in text or " equals" in text or "×" in text or "÷" in text
    if any(char in text for char in "=<>-"):
        for pattern, words in _WORDY_OPERATORS:
            text = pattern.sub(words, text)
    if is_equation:
        text = _EQUATION_MINUS.sub(" minus ", text)
        text = _EQUATION_OVER.sub(" divided by ", text)
    if "(" in text:
        text = _FUNCTION.sub(r"\1 of \2", text).replace("()", "")
    if "*" in text or "x" in text or "X" in text:
        text = _TIMES.sub(" times ", text)
    if "+" in text:
        text = _PLUS.sub(" plus ", text)
        text = _PLUS_BEHIND.sub(" plus", text)
    text = _EQUALS.sub(" equals ", text)
    if "/" in text:
        text = _DIVIDED.sub(r"\1 divided by \2", text)
    return text


def expand_fractions(text: str) -> str:
    """``2 1/2`` and ``3/4``, as far as they are no dates."""
    text = _MIXED.sub(lambda m: value_words(m[0]), text)
    return _FRACTION.sub(_say_fraction, text) if "/" in text else text


def expand_numbers(text: str) -> str:
    """What figures are left: ordinals, ranges, years, signed and plain numbers."""
    if not any(char.isdecimal() for char in text):
        return text
    text = _ORDINAL.sub(lambda m: ordinal(to_int(m[1])), text)
    text = _ORDINAL_SIGN.sub(lambda m: ordinal(int(m[1])), text)
    text = _RANGE.sub(_say_range, text)
    text = _SPACED_RANGE.sub(_say_spaced, text)
    text = _ERA_YEAR.sub(lambda m: year(int(m[1])), text)
    text = _CUED_YEAR.sub(lambda m: m[1] + year(int(m[2])), text)
    text = _BARE_YEAR.sub(lambda m: year(int(m[1])), text)
    text = _LEADING_SIGN.sub(lambda m: "plus " if m[0][-1] == "+" else "minus ", text)
    return _PLAIN.sub(_say_plain, text)


def _say_plain(match: Match[str]) -> str:
    before = match.string[match.start() - 1 : match.start()]
    after = match.string[match.end() : match.end() + 1]
    words = number_words(match[0])
    return (" " if before.isalpha() else "") + words + (" " if after.isalpha() else "")


def expand_signs(text: str) -> str:
    """Single signs that stand for words."""
    if "/" in text:
        text = _PER_WORD.sub(r" per \1", text)
        text = _SLASH.sub(" slash ", text)
    if "&" in text:
        text = text.replace("&", " and ")
    if "@" in text:
        text = text.replace("@", " at ")
    if not text.isascii() or "%" in text:
        text = _SIGN.sub(lambda m: f" {_SIGNS[m[0]]} ", text)
    return text


_LINE_END = re.compile(r"[ \t]*\n\s*")
_BRACKETED = re.compile(r"\s*[(\[{]\s*")
_UNBRACKETED = re.compile(r"\s*[)\]}]")
_DASH = re.compile(r"\s*(?:—|--+)\s*|\s+[-–]\s+|(?<=[a-zA-Z])\s?–\s?(?=[a-zA-Z])")
_HYPHEN = re.compile(r"(?<=\w)-(?=\w)")
_QUOTES = re.compile(r"\"|(?<!\w)'(?=\w)|(?<=[^\Ws])'(?!\w)|(?<!\w)'(?!\w)")
_UNSPOKEN = re.compile(r"[*_|\\^~<>{}`#$=+•†‡®™°/]|(?<!\w)-|-(?!\w)|–")
_STOPS = re.compile(r"([!?])[!?.]+")
_DOTS = re.compile(r"\.{4,}|\.(?: \.)+")
_COMMAS = re.compile(r"[,;:](?:\s*[,;:])+|(?<=[.!?]),|,\s*(?=[.!?;:])")
_SPACE_BEFORE = re.compile(r"\s+(?=[.,;:!?])")
_SPACES = re.compile(r"\s+")
_HAS_SPEECH = re.compile(r"[^\W_]")


def _line_end(match: Match[str]) -> str:
    before = match.string[: match.start()].rstrip()
    return " " if not before or before[-1] in ".,;:!?" else ". "


def tidy(text: str) -> str:
    """Only what is spoken or makes a pause: letters and ``. , ; : ! ?``; "" if nothing is."""
    if "\n" in text:
        text = _LINE_END.sub(_line_end, text.strip())
    text = _BRACKETED.sub(", ", text)
    text = _UNBRACKETED.sub(", ", text)
    text = _DASH.sub(", ", text)
    text = _HYPHEN.sub(" ", text)
    text = _QUOTES.sub("", text)
    text = _UNSPOKEN.sub(" ", text)
    text = _STOPS.sub(lambda m: "?" if "?" in m[0] else "!", text)
    text = _DOTS.sub("...", text)
    text = _SPACES.sub(" ", text)
    text = _SPACE_BEFORE.sub("", text)
    text = _COMMAS.sub(
        lambda m: "," if m[0].strip()[:1] in ",;:" and len(m[0].strip()) > 1 else "", text
    )
    text = _SPACES.sub(" ", text).strip(" ,;:-")
    text = text.lstrip(".!? ")
    return text if _HAS_SPEECH.search(text) else ""
