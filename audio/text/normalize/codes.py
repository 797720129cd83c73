"""Figures that are names rather than amounts: phone numbers, codes, order numbers, versions."""

from __future__ import annotations

import re
from re import Match

from audio.text.normalize.numbers import cardinal, digits, pairs, to_int

_LONG = r"(?<![\w.,:/+-])"
_PHONE = re.compile(
    r"(?<![\w.,:/+-])(?:"
    r"\+\d{1,3}(?:[\s.-]?\(?\d{1,4}\)?){2,6}"
    r"|(?:1[\s.-]?)?\(\d{3}\)\s?\d{3}[\s.-]\d{4}"
    r"|(?:1[\s.-])?\d{3}([\s.-])\d{3}[\s.-]\d{4}"
    r"|\d{3}-\d{4}"
    r"|0\d{1,4}(?:[ -]\d{2,4}){2,4}"
    r")(?![\w-]|[.,:]\d)"
)
_VANITY = re.compile(r"(?<![\w+-])1-(8\d\d|900)-([A-Z]{4,}(?:-[A-Z]+)*)\b")
_IP = re.compile(rf"{_LONG}(\d{{1,3}}(?:\.\d{{1,3}}){{3}})(?![\w.]\d|\w)")
_GROUPS = re.compile(
    rf"{_LONG}(?:\d+(?:-\d+){{2,}}[Xx]?|\d{{4}}([ -])\d{{4}}(?:\1\d{{4}}){{1,3}}"
    rf"|\d{{3}}-\d{{2}}-\d{{4}})(?![\w-])"
)
_VERSION = re.compile(r"(?<![\w.])[vV](?:\. ?)?(\d+(?:\.\d+)*)(?:-?([a-z]+)\.?(\d+)?)?(?![\w])")
_DOTTED = re.compile(rf"{_LONG}(\d+(?:\.\d+){{2,}})(?![\w]|\.\d)")
_NAMED_VERSION = re.compile(
    r"\b((?i:version|release|python|node|java|php|ruby|ios|ipados|android|macos|ubuntu|debian|"
    r"fedora|gpt|bluetooth|usb|http|wi-fi|kernel|update to) )(\d+\.\d+)(?![\d.]\d|\w|%)"
)
_ZERO_LED = re.compile(rf"{_LONG}0\d+(?![\w:/-]|[.,]\d)")
_CUED = re.compile(
    r"\b((?i:(?:(?:zip|area|postal|access|verification|security|confirmation|dial|discount|promo"
    r"|entry|"
    r"door|gate|booking|tracking) )?code|pin|passcode|password|otp|zip|extension|ext\.|"
    r"(?:account|order|booking|invoice|ticket|confirmation|tracking|reference|serial|case|phone|"
    r"card|policy|member|customer)(?: number| no\.| id)|id|digits|(?:ending|ends) (?:in|with)|"
    r"(?:dial|call|text)(?= (?:[2-9]11|988|999|112|000|\d{5,})\b))"
    r"(?:,? (?:is|are|was|of|to))?[:#]? ?(?:is )?)(\d{3,})(?![\w/-]|[.,:]\d)"
)
_NAMED_PLACE = re.compile(
    r"\b((?i:room|suite|flight|gate|highway|route|interstate|apartment|unit|bus|train) )"
    r"([1-9]\d{2,3})(?![\w/-]|[.,:]\d)"
)
_HASH_CODE = re.compile(r"(?i:\bnumber )?#\s?([A-Z]{1,5})?[- ]?(\d+(?:-\d+)*)([A-Z]{0,3})\b")
_HASH_TAG = re.compile(r"(?<![\w&])#([A-Za-z]\w*)")
_NUMERO = re.compile(r"(?:\b[Nn]o\.|\bNr\.|№) ?(?=\d)")
_ALNUM = re.compile(
    r"(?<![\w.,'])(?=[A-Za-z0-9-]*\d)(?=[A-Za-z0-9-]*[A-Za-z])"
    r"(?![A-Za-z]?\d+(?:st|nd|rd|th|s)\b)[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*(?![\w])"
)
_PART = re.compile(r"\d+|[A-Z]+(?![a-z])|[A-Za-z][a-z]*")
_THOUSANDS = re.compile(
    rf"{_LONG}(\d+(?:\.\d{{1,3}})?)[kK]\b(?! (?:run|race|resolution|video|display|monitor|tv|TV"
    rf"|screen))"
)
_MILLIONS = re.compile(rf"{_LONG}(\d+(?:\.\d+)?) ?(M|bn|mn)\b(?= [a-z])")
_BILLIONS = re.compile(
    rf"{_LONG}(\d+(?:\.\d+)?)B\b(?=-?[ ](?:people|users|parameters?|model|views|years|downloads)\b)"
)
_SCAN_LINES = re.compile(r"\b(\d{3,4})([pi])\b")
_HOUSE = re.compile(
    r"(?<![\w.,:$-])(\d{3,5})(?= (?:[NSEW]\.? |[NS][EW] )?(?:(?:[A-Z][a-z]+\.?|\d+(?:st|nd|rd"
    r"|th)) ){1,3}"
    r"(?:St|Street|Ave|Avenue|Rd|Road|Blvd|Boulevard|Dr|Drive|Ln|Lane|Ct|Court|Pl|Place|Way|Hwy|"
    r"Pkwy|Parkway|Terrace|Square|Sq)\b)"
)
_ZIP = re.compile(
    r"\b([A-Z][A-Za-z]+,? )(\d{5})(?:-(\d{4}))?(?![\w,]|\.\d)(?= ?(?:[.,;!?)]|$|USA))"
)
_LONG_NUMBER = re.compile(rf"{_LONG}\d{{11,}}(?![\w]|[.,]\d)")
_TOLL_FREE = re.compile(r"8\d\d|900")
_MIN_SPELLED_DIGITS = 3


def _say_phone(match: Match[str]) -> str:
    text = match[0]
    groups = re.findall(r"\d+", text)
    if match.re is _PHONE and len(groups) == 1 and not text.startswith("+"):
        return text
    words = [digits(group) for group in groups]
    if len(groups) > 2 and groups[0] == "1" and _TOLL_FREE.fullmatch(groups[1]):
        words[1] = cardinal(int(groups[1])) if groups[1].endswith("00") else words[1]
        words[:2] = [f"one {words[1]}"]
    return ("plus " if text.startswith("+") else "") + ", ".join(words)


def _say_vanity(match: Match[str]) -> str:
    area = cardinal(int(match[1])) if match[1].endswith("00") else digits(match[1])
    return f"one {area} {match[2].replace('-', ' ').lower()}"


def _say_ip(match: Match[str]) -> str:
    return " dot ".join(digits(part) for part in match[1].split("."))


def _say_groups(match: Match[str]) -> str:
    words = ", ".join(digits(group) for group in re.findall(r"\d+", match[0]))
    return words + (" X" if match[0][-1] in "Xx" else "")


def _version_words(text: str) -> str:
    return " point ".join(
        digits(part) if len(part) > 1 and part[0] == "0" else cardinal(int(part))
        for part in text.split(".")
    )


def _say_version(match: Match[str]) -> str:
    words = f"version {_version_words(match[1])}"
    if re.search(r"(?i)version $", match.string[: match.start()]):
        words = words.removeprefix("version ")
    if match[2]:
        words += f" {match[2]}" + (f" {cardinal(int(match[3]))}" if match[3] else "")
    return words


def _code_digits(text: str) -> str:
    """Short figures in codes are numbers ("B twelve"), longer ones are read digit by digit."""
    if len(text) >= _MIN_SPELLED_DIGITS or text[0] == "0":
        return digits(text)
    return cardinal(int(text))


def code_words(text: str) -> str:
    """``A-7731`` "A seven seven three one", ``MP3`` "M P three", ``COVID-19`` "COVID nineteen"."""
    words = []
    for part in _PART.findall(text):
        if part.isdigit():
            words.append(_code_digits(part))
        elif (
            len(part) >= 4
            or (part[0].isupper() and part[1:].islower() and len(part) > 1)
            or part.islower()
            and len(part) > 2
            and re.search("[aeiou]", part)
        ):
            words.append(part)
        else:
            words.append(" ".join(part.upper()))
    return " ".join(words)


def _say_hash(match: Match[str]) -> str:
    letters = " ".join(match[1]) + " " if match[1] else ""
    tail = " " + " ".join(match[3]) if match[3] else ""
    figures = match[2]
    words = _code_digits(figures) if figures.isdigit() else digits(figures)
    return f"number {letters}{words}{tail}"


def _say_alnum(match: Match[str]) -> str:
    text = match[0]
    head, dash, tail = text.partition("-")
    if dash and head.isdigit() and tail.replace("-", "").isalpha() and tail.islower():
        return f"{cardinal(int(head))} {tail.replace('-', ' ')}"  # 18-year-old
    if text.islower() and text[0].isdigit() and len(re.findall(r"\d+", text)) == 1:
        number, letters = re.fullmatch(r"(\d+)-?([a-z-]+)", text).groups()  # type: ignore[union-attr]
        if len(letters) > 2:
            return f"{cardinal(int(number))} {letters}"
    return code_words(text)


def _say_thousands(match: Match[str]) -> str:
    whole, _, part = match[1].partition(".")
    number = int(whole) * 1000 + int((part or "0").ljust(3, "0"))
    if match[0].endswith("K") and not part and len(whole) == 1:
        return f"{cardinal(int(whole))} K"
    return cardinal(number)


def _scaled(match: Match[str], word: str) -> str:
    whole, dot, part = match[1].partition(".")
    return cardinal(int(whole)) + (f" point {digits(part)}" if dot else "") + f" {word}"


def _say_zip(match: Match[str]) -> str:
    words = digits(match[2])
    return f"{match[1]}{words}, {digits(match[3])}" if match[3] else f"{match[1]}{words}"


def expand_phones(text: str) -> str:
    """Telephone numbers, IP addresses and ZIP codes, before dates and ranges take their parts."""
    if "/" not in text and not any(char.isdigit() for char in text):
        return text
    text = _VANITY.sub(_say_vanity, text)
    text = _PHONE.sub(_say_phone, text)
    text = _IP.sub(_say_ip, text)
    return _ZIP.sub(_say_zip, text)


def expand_codes(text: str) -> str:
    """Codes, order numbers, versions and house numbers."""
    text = _HASH_CODE.sub(_say_hash, text)
    text = _HASH_TAG.sub(lambda m: f"hashtag {m[1]}", text)
    if not any(char.isdigit() for char in text):
        return text
    text = _NUMERO.sub("number ", text)
    text = _GROUPS.sub(_say_groups, text)
    text = _NAMED_VERSION.sub(lambda m: m[1] + _version_words(m[2]), text)
    text = _VERSION.sub(_say_version, text)
    text = _DOTTED.sub(lambda m: _version_words(m[1]), text)
    text = _CUED.sub(lambda m: m[1] + digits(m[2]), text)
    text = _NAMED_PLACE.sub(lambda m: m[1] + pairs(int(m[2])), text)
    text = _ZERO_LED.sub(lambda m: digits(m[0]), text)
    return _HOUSE.sub(lambda m: digits(m[1]) if len(m[1]) == 5 else pairs(to_int(m[1])), text)


def expand_mixed(text: str) -> str:
    """Tokens of letters and digits that no unit has claimed: ``MP3``, ``4K``, ``18-year-old``."""
    if not any(char.isdigit() for char in text):
        return text
    text = _SCAN_LINES.sub(lambda m: f"{pairs(int(m[1]))} {m[2].upper()}", text)
    text = _THOUSANDS.sub(_say_thousands, text)
    text = _MILLIONS.sub(lambda m: _scaled(m, "billion" if m[2] == "bn" else "million"), text)
    text = _BILLIONS.sub(lambda m: _scaled(m, "billion"), text)
    text = _LONG_NUMBER.sub(lambda m: digits(m[0]), text)
    return _ALNUM.sub(_say_alnum, text)
