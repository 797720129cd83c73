"""Dates, times of day, durations: ``2025-03-07``, ``Tue, 14 Jan``, ``6:05 am``, ``1:02:33``."""

from __future__ import annotations

import re
from re import Match

from audio.text.normalize.measures import counted
from audio.text.normalize.numbers import cardinal, decade, ordinal, year

_MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
_MONTH_ABBR = {name[:3]: name for name in _MONTHS} | {"Sept": "September"}
_DAYS = {
    "Mon": "Monday", "Tue": "Tuesday", "Tues": "Tuesday", "Wed": "Wednesday", "Thu": "Thursday",
    "Thur": "Thursday", "Thurs": "Thursday", "Fri": "Friday", "Sat": "Saturday", "Sun": "Sunday",
}  # fmt: skip
_MONTH = r"(?:" + "|".join(_MONTHS) + "|(?:" + "|".join(["Sept", *_MONTH_ABBR]) + r")\b\.?)"
_DAY_NAME = "(?:" + "|".join(sorted(_DAYS, key=len, reverse=True)) + ")"
_YEAR = r"(?:1[0-9]|20|21)\d{2}"

_ISO = re.compile(r"(?<![\w.-])(\d{4})[-/](\d{1,2})[-/](\d{1,2})(?:T(?=\d)|(?![\w-]))")
_NUMERIC = re.compile(r"(?<![\w./-])(\d{1,2})([/.-])(\d{1,2})\2(\d{4}|\d{2})(?![\w/-]|\.\d)")
_ON_NUMERIC = re.compile(
    r"(?i)(\b(?:on|by|until|till|since|before|after|from|due|through) )(\d{1,2})/(\d{1,2})(?![\d/])"
)
_MONTH_DAY = re.compile(
    rf"\b({_MONTH}) ?(\d{{1,2}})(?:st|nd|rd|th)?(?! ?[ap]\.?m\b)(?: ?[-–—] ?(\d{{1,2}})(?:st|nd"
    rf"|rd|th)?)?(?![\w:%]|[.,]\d)"
    rf"(?:(,?) ?({_YEAR})(?!\d|[.,:]\d))?"
)
_DAY_MONTH = re.compile(
    rf"(?<![\w.,:/$-])(\d{{1,2}})(st|nd|rd|th)?(?: ?[-–—] ?(\d{{1,2}})(?:st|nd|rd|th)?)? (of )?"
    rf"({_MONTH})(?!\w)"
    rf"(?:(,?) ?({_YEAR})(?!\d|[.,:]\d))?"
)
_MONTH_YEAR = re.compile(rf"\b({_MONTH}),? ({_YEAR})(?!\d|[.,:]\d)")
_MONTH_ALONE = re.compile(
    r"\b(?:(Feb|Apr|Jul|Aug|Sept|Sep|Oct|Nov|Dec)\b(\.?)"
    r"|(?<=\b[io]n )(Jan|Mar|Jun)\b(\.?)|(?<=\bsince )(Jan|Mar|Jun)\b(\.?))(?! [A-Z][a-z]+ "
    r"(?:said|is|was))"
)
_DAY_RANGE = re.compile(rf"\b({_DAY_NAME})\.? ?[-–—] ?({_DAY_NAME})\b\.?")
_DAY_ALONE = re.compile(
    rf"\b(?:({_DAY_NAME})\b\.?(?=,? (?:\d|{_MONTH}|at \d)|,? the \d)|(Tues|Tue|Thurs|Thur"
    rf"|Thu)\b\.?(?!')"
    rf"|(?<=\b[Oo]n )({_DAY_NAME})\b\.?|(?:(?<=very )|(?<=this )|(?<=next )|(?<=last )|"
    rf"(?<=[Yy]ou ))(Mon|Wed|Fri|Sat|Sun)\b\.?(?=[,.;]|$))"
)
_DECADE = re.compile(r"(?<![\w$£€.])'?((?:1[0-9]|20)\d0)'?s\b")
_SHORT_DECADE = re.compile(
    r"(?<![\w$£€.])'([1-9]0)'?s\b|\b((?i:the|his|her|my|their|your|our|early|mid|late)[ -])"
    r"([2-9]0)'?s\b"
)

_MERIDIEM = r"(?P<half>[aApP])(?:\. ?[mM]\.|\.?[mM]\b)"
_CLOCK = re.compile(
    rf"(?<![\w.:,])(?P<h>\d{{1,2}}):(?P<m>\d{{2}})(?::(?P<s>\d{{2}}))?(?: ?{_MERIDIEM})?"
    rf"(?![\d:]\d?)"
)
_HOUR = re.compile(rf"(?<![\w.:,/])(?P<h>\d{{1,2}}) ?{_MERIDIEM}(?!\w)")
_SPAN = re.compile(
    r"(?<![\w.:-])(\d{1,2}(?::\d{2})?(?: ?[aApP]\.?[mM]\.?)?) ?[-–—] ?"
    r"(?=\d{1,2}(?::\d{2})(?!\d)|\d{1,2}(?::\d{2})? ?[aApP]\.?[mM]\b)"
)
_FULL_TIME = re.compile(r"\d{1,2}(?::\d{2})? ?[aApP]\.?[mM]\b")
_NOON = re.compile(r"(?<![\w:.])12:00(?= (?:noon|midnight)\b)")
_RATIO = re.compile(r"(?<![\w.:,])(\d{1,4}):(\d{1,4})(?![\w:])")
_MAY_HOLD_DATE = re.compile(rf"\d|{_DAY_NAME}|{_MONTH}")


def _month_name(text: str) -> str:
    text = text.rstrip(".")
    return _MONTH_ABBR.get(text, text)


def _expanded_year(text: str) -> str:
    number = int(text)
    if len(text) == 2:
        number += 2000 if number < 70 else 1900
    return year(number)


def _date_words(month: int, day: int) -> str | None:
    """As in "March seventh"; None where no month has such a day, or there is no such month."""
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return None
    return f"{_MONTHS[month - 1]} {ordinal(day)}"


def _numeric_date_words(first: int, second: int) -> str | None:
    """Of two figures the month comes first, unless it cannot be one."""
    return _date_words(second, first) if first > 12 else _date_words(first, second)


def _say_iso(match: Match[str]) -> str:
    words = _date_words(int(match[2]), int(match[3]))
    tail = ", " if match[0].endswith("T") else ""
    return f"{words}, {year(int(match[1]))}{tail}" if words else match[0]


def _say_numeric(match: Match[str]) -> str:
    words = _numeric_date_words(int(match[1]), int(match[3]))
    return f"{words}, {_expanded_year(match[4])}" if words else match[0]


def _say_on_numeric(match: Match[str]) -> str:
    words = _numeric_date_words(int(match[2]), int(match[3]))
    return f"{match[1]}{words}" if words else match[0]


def _say_month_day(match: Match[str]) -> str:
    day = int(match[2])
    if not 1 <= day <= 31:
        return match[0]
    words = f"{_month_name(match[1])} {ordinal(day)}"
    if match[3]:
        words += f" to {ordinal(int(match[3]))}"
    return f"{words}, {year(int(match[5]))}" if match[5] else words


def _say_day_month(match: Match[str]) -> str:
    day = int(match[1])
    if not 1 <= day <= 31:
        return match[0]
    words = ordinal(day)
    if match[3]:
        words += f" to {ordinal(int(match[3]))}"
    words += f" of {_month_name(match[5])}"
    return f"{words}{match[6]} {year(int(match[7]))}" if match[7] else words


def _say_month_alone(match: Match[str]) -> str:
    name = next(group for group in match.groups() if group)
    return _keep_stop(match, _MONTH_ABBR[name])


def _say_day_alone(match: Match[str]) -> str:
    return _keep_stop(match, _DAYS[next(group for group in match.groups() if group)])


def _keep_stop(match: Match[str], words: str) -> str:
    """Gives back the period that also ended the sentence."""
    rest = match.string[match.end() :].lstrip()
    ends = match[0].endswith(".") and (not rest or rest[0].isupper() or rest[0] in "\"')")
    return words + ("." if ends else "")


def _say_short_decade(match: Match[str]) -> str:
    return decade(int(match[1])) if match[1] else match[2] + decade(int(match[3]))


def _meridiem(match: Match[str]) -> str:
    return f" {match['half'].upper()} M" if match["half"] else ""


def _say_clock(match: Match[str]) -> str:
    hour, minute = int(match["h"]), int(match["m"])
    half = _meridiem(match)
    if minute > 59 or (hour > 24 and not match["s"]):
        return match[0]
    if match["s"] and not half:
        return _duration(hour, minute, int(match["s"]))
    if not half and hour == 0:
        hour, half = 12, " A M"
    if minute == 0:
        if half:
            words = cardinal(hour)
        else:
            words = f"{cardinal(hour)} o'clock" if hour <= 12 else f"{cardinal(hour)} hundred"
    else:
        low = f"oh {cardinal(minute)}" if minute < 10 else cardinal(minute)
        words = f"{cardinal(hour)} {low}"
    if match["s"]:
        words += f" and {counted(int(match['s']), 'second')}"
    return _keep_stop(match, words + half)


def _duration(hours: int, minutes: int, seconds: int) -> str:
    parts = [
        counted(number, name)
        for number, name in ((hours, "hour"), (minutes, "minute"), (seconds, "second"))
        if number
    ]
    if len(parts) < 2:
        return parts[0] if parts else "zero seconds"
    return f"{' '.join(parts[:-1])} and {parts[-1]}"


def _say_span(match: Match[str]) -> str:
    """``3:00-4:30 pm``: the first hour leaves its zeros out, as the second says what it is."""
    start = (
        match[1].removesuffix(":00") if _FULL_TIME.match(match.string, match.end()) else match[1]
    )
    return f"{start} to "


def _say_hour(match: Match[str]) -> str:
    return _keep_stop(match, cardinal(int(match["h"])) + _meridiem(match))


def expand_dates_and_times(text: str) -> str:
    """``text`` with its dates, weekdays, decades and times in words."""
    if not _MAY_HOLD_DATE.search(text):
        return text
    text = _DAY_RANGE.sub(lambda m: f"{_DAYS[m[1]]} to {_DAYS[m[2]]}", text)
    text = _DAY_ALONE.sub(_say_day_alone, text)
    if any(char.isdigit() for char in text):
        text = _ISO.sub(_say_iso, text)
        text = _NUMERIC.sub(_say_numeric, text)
        text = _ON_NUMERIC.sub(_say_on_numeric, text)
        text = _DAY_MONTH.sub(_say_day_month, text)
        text = _MONTH_DAY.sub(_say_month_day, text)
        text = _MONTH_YEAR.sub(lambda m: f"{_month_name(m[1])} {year(int(m[2]))}", text)
        text = _DECADE.sub(lambda m: decade(int(m[1])), text)
        text = _SHORT_DECADE.sub(_say_short_decade, text)
        text = _NOON.sub("twelve", text)
        text = _SPAN.sub(_say_span, text)
        text = _CLOCK.sub(_say_clock, text)
        text = _HOUR.sub(_say_hour, text)
        text = _RATIO.sub(lambda m: f"{cardinal(int(m[1]))} to {cardinal(int(m[2]))}", text)
    return _MONTH_ALONE.sub(_say_month_alone, text)
