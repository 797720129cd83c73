"""Percentages, degrees, units of measure, feet and inches, dimensions: ``5-10%``, ``12 kg``."""

from __future__ import annotations

import re
from re import Match

from audio.text.normalize.numbers import cardinal, number_words, pairs
from audio.text.normalize.values import NUM, SINGLE, START, VALUE, takes_singular, value_words

# symbol -> (one, many). Units that are also words ("in", "a") are handled by patterns below.
_UNITS: dict[str, tuple[str, str]] = {}


def _unit(symbols: str, one: str, many: str | None = None) -> None:
    for symbol in symbols.split():
        _UNITS[symbol] = (one, many if many is not None else one + "s")


_unit("nm", "nanometer")
_unit("µm μm", "micrometer")
_unit("mm", "millimeter")
_unit("cm", "centimeter")
_unit("m", "meter")
_unit("km kms", "kilometer")
_unit("ft", "foot", "feet")
_unit("yd yds", "yard")
_unit("mi", "mile")
_unit("mg", "milligram")
_unit("µg μg mcg", "microgram")
_unit("g", "gram")
_unit("kg kgs", "kilogram")
_unit("lb lbs", "pound")
_unit("oz", "ounce")
_unit("ml mL", "milliliter")
_unit("cl cL", "centiliter")
_unit("dl dL", "deciliter")
_unit("l L", "liter")
_unit("gal", "gallon")
_unit("qt", "quart")
_unit("pt", "pint")
_unit("tbsp tbsps Tbsp", "tablespoon")
_unit("tsp tsps", "teaspoon")
_unit("ha", "hectare")
_unit("sqft", "square foot", "square feet")
_unit("ns", "nanosecond")
_unit("µs μs", "microsecond")
_unit("ms msec", "millisecond")
_unit("s sec secs", "second")
_unit("min mins", "minute")
_unit("h hr hrs", "hour")
_unit("wk wks", "week")
_unit("mo mos", "month")
_unit("yr yrs", "year")
_unit("bit", "bit")
_unit("kB KB", "kilobyte")
_unit("MB", "megabyte")
_unit("GB", "gigabyte")
_unit("TB", "terabyte")
_unit("PB", "petabyte")
_unit("KiB", "kibibyte")
_unit("MiB", "mebibyte")
_unit("GiB", "gibibyte")
_unit("kb Kb", "kilobit")
_unit("Mb", "megabit")
_unit("Gb", "gigabit")
_unit("kbps Kbps kbit/s", "kilobit per second", "kilobits per second")
_unit("Mbps Mbit/s", "megabit per second", "megabits per second")
_unit("Gbps Gbit/s", "gigabit per second", "gigabits per second")
_unit("mph MPH", "mile per hour", "miles per hour")
_unit("kph kmh", "kilometer per hour", "kilometers per hour")
_unit("mpg MPG", "mile per gallon", "miles per gallon")
_unit("rpm RPM", "R P M", "R P M")
_unit("bpm BPM", "beat per minute", "beats per minute")
_unit("fps FPS", "frame per second", "frames per second")
_unit("ppm", "part per million", "parts per million")
_unit("psi PSI", "P S I", "P S I")
_unit("Hz", "hertz", "hertz")
_unit("kHz", "kilohertz", "kilohertz")
_unit("MHz", "megahertz", "megahertz")
_unit("GHz", "gigahertz", "gigahertz")
_unit("W", "watt")
_unit("kW", "kilowatt")
_unit("MW", "megawatt")
_unit("GW", "gigawatt")
_unit("Wh", "watt hour")
_unit("kWh", "kilowatt hour")
_unit("V", "volt")
_unit("mV", "millivolt")
_unit("kV", "kilovolt")
_unit("mA", "milliamp")
_unit("mAh", "milliamp hour")
_unit("Ah", "amp hour")
_unit("Ω", "ohm")
_unit("kΩ", "kiloohm")
_unit("J", "joule")
_unit("kJ", "kilojoule")
_unit("cal", "calorie")
_unit("kcal", "kilocalorie")
_unit("N", "newton")
_unit("Pa", "pascal")
_unit("hPa", "hectopascal")
_unit("kPa", "kilopascal")
_unit("dB", "decibel")
_unit("hp HP", "horsepower", "horsepower")
_unit("px", "pixel")
_unit("MP", "megapixel")
_unit("dpi DPI", "D P I", "D P I")
_unit("lm", "lumen")
_unit("mol", "mole")

_SQUARE_CUBIC = {"²": "square ", "³": "cubic ", "^2": "square ", "^3": "cubic "}
_PER = {
    "s": "second", "sec": "second", "min": "minute", "h": "hour", "hr": "hour", "day": "day",
    "d": "day", "wk": "week", "week": "week", "month": "month", "mo": "month", "yr": "year",
    "year": "year", "s²": "second squared", "L": "liter", "l": "liter", "dL": "deciliter",
    "ml": "milliliter", "mL": "milliliter", "kg": "kilogram", "km": "kilometer", "m": "meter",
    "m²": "square meter", "m³": "cubic meter", "cm³": "cubic centimeter",
    "100km": "hundred kilometers",
    "gal": "gallon", "mile": "mile", "mi": "mile", "hour": "hour", "second": "second",
    "minute": "minute", "lb": "pound", "person": "person", "serving": "serving",
}  # fmt: skip

_SYMBOLS = "|".join(re.escape(s) for s in sorted(_UNITS, key=len, reverse=True))
_PERS = "|".join(re.escape(s) for s in sorted(_PER, key=len, reverse=True))
_MEASURE = re.compile(
    rf"{START}(?P<value>{VALUE})(?P<gap>[ -]?)(?:(?P<square>sq|cu)\.? ?)?(?P<unit>{_SYMBOLS})"
    rf"(?P<power>[²³]|\^[23])?(?:/(?P<per>{_PERS}))?(?![\w²³/^'])"
    r"(?:\.(?= [a-z(]|[,;:)]))?"
)
_PERCENT = re.compile(
    rf"{START}({SINGLE}) ?%? ?(?:[-–—]|to) ?({SINGLE}) ?%|{START}({VALUE}) ?([%‰])"
)
_DEGREES = re.compile(
    rf"(?:{START}(?P<value>{VALUE}))? ?(?:(?P<sign>[°º])(?: ?(?P<scale>[CFKNSEW])\b)?|"
    rf"(?P<one>[℃℉]))"
    r"(?: ?[-–—] ?(?=\d))?"
)
_DEGREES_WORD = re.compile(r"\bdegrees (C|F)\b")
_ATTACHED_DEGREES = re.compile(rf"{START}([-−]?{NUM})([CF])(?![\w°])")
_SCALES = {
    "C": " Celsius", "F": " Fahrenheit", "K": " kelvin", "℃": " Celsius", "℉": " Fahrenheit",
    "N": " north", "S": " south", "E": " east", "W": " west",
}  # fmt: skip
_FEET_INCHES = re.compile(
    r"(?<![\w.'])(\d+) ?['′] ?(\d+(?:\.\d+)?(?: \d/\d|[½¼¾])?)(?: ?(?:[\"″]|''))?(?!\w)"
)
_FT_IN = re.compile(
    r"(?<![\w.])(\d+) ?(?:ft\b\.?|feet|foot),? (\d+(?:\.\d+)?) ?in\b(?:\.(?! [A-Z]|$))?"
)
_FEET_PRIME = re.compile(rf"{START}({VALUE}) ?(′|'(?!\w))")
_INCH_PRIME = re.compile(rf"{START}({VALUE})(?: ?″|\"|'')")
_INCHES = re.compile(
    rf"{START}({VALUE})[ -]?in\b(?:\.(?= [a-z]|[,;)])|(?=[,;).]| ?[x×]| (?:wide|long|tall|high"
    rf"|deep|thick|by|of "
    r"(?:rain|snow))\b))"
)
_NOUN_BEHIND = re.compile(
    r" (?!(?:tall|wide|long|deep|high|thick|apart|away|above|below|across|by|x|and|or|of|in|to"
    r"|from|"
    r"is|are|was|per|at|on|for|with|but|so|than|each|or)\b)[a-z]"
)
_DIMENSIONS = re.compile(
    rf"{START}({NUM})(?: ?[xX] ?|×)({NUM})(?:(?: ?[xX] ?|×)({NUM}))?(?![\w.]*\d)(?! ?=)"
)
_BY = re.compile(r"(?<=[a-z]) [x×] (?=\d)")
_TIMES_FASTER = re.compile(rf"{START}({NUM})[x×](?![\w]| ?[-+=*/^])")
_HMS = re.compile(
    r"(?<![\w.])(\d+) ?h(?:rs?|ours?)?,? ?(\d{1,2}) ?m(?:ins?|inutes?)?(?:,? ?(\d{1,2}) ?s"
    r"(?:ecs?)?)?\b"
)
_MS = re.compile(r"(?<![\w.])(\d+) ?m(?:in)?,? ?(\d{1,2}) ?s(?:ecs?)?\b")
_HAS_DIGIT = re.compile(r"[\d½⅓⅔¼¾⅛°℃℉]")


def counted(number: int, one: str) -> str:
    """``2`` and "hour" is "two hours"."""
    return f"{cardinal(number)} {one if number == 1 else one + 's'}"


def _say_measure(match: Match[str]) -> str:
    value, unit, gap = match["value"], match["unit"], match["gap"]
    one, many = _UNITS[unit]
    is_attributive = gap == "-"
    name = one if takes_singular(value) or is_attributive else many
    if match["power"]:
        name = _SQUARE_CUBIC[match["power"]] + name
    elif match["square"]:
        name = ("square " if match["square"] == "sq" else "cubic ") + name
    if match["per"]:
        name += f" per {_PER[match['per']]}"
    return f"{value_words(value)} {name}"


def _say_percent(match: Match[str]) -> str:
    if match[1]:
        return f"{value_words(match[1])} to {value_words(match[2])} percent"
    return f"{value_words(match[3])} {'percent' if match[4] == '%' else 'per mille'}"


def _say_degrees(match: Match[str]) -> str:
    scale = _SCALES.get(match["scale"] or match["one"] or "", "")
    tail = " to " if match[0].rstrip()[-1] in "-–—" else ""
    if not match["value"]:
        return f" degrees{scale}{tail}"
    singular = match["value"].lstrip("-−") == "1"
    return f"{value_words(match['value'])} {'degree' if singular else 'degrees'}{scale}{tail}"


def _say_feet_inches(match: Match[str]) -> str:
    return f"{number_words(match[1])} foot {value_words(match[2])}"


def _say_ft_in(match: Match[str]) -> str:
    feet = "foot" if match[1] == "1" else "feet"
    inches = "inch" if match[2] == "1" else "inches"
    return f"{number_words(match[1])} {feet} {number_words(match[2])} {inches}"


def _is_attributive(match: Match[str]) -> bool:
    """``12" pizza``: a noun follows, so the unit stays in the singular."""
    return _NOUN_BEHIND.match(match.string, match.end()) is not None


def _say_feet(match: Match[str]) -> str:
    is_one = takes_singular(match[1]) or _is_attributive(match)
    return f"{value_words(match[1])} {'foot' if is_one else 'feet'}"


def _say_inches(match: Match[str]) -> str:
    is_one = takes_singular(match[1]) or _is_attributive(match)
    return f"{value_words(match[1])} {'inch' if is_one else 'inches'}"


def _side(text: str) -> str:
    return pairs(int(text)) if text.isdigit() and len(text) == 4 else number_words(text)


def _say_dimensions(match: Match[str]) -> str:
    return " by ".join(_side(side) for side in match.groups() if side)


def _say_hms(match: Match[str]) -> str:
    words = f"{counted(int(match[1]), 'hour')} {counted(int(match[2]), 'minute')}"
    return f"{words} and {counted(int(match[3]), 'second')}" if match[3] else words


def _say_ms(match: Match[str]) -> str:
    return f"{counted(int(match[1]), 'minute')} {counted(int(match[2]), 'second')}"


def _expand_primes(text: str) -> str:
    """Feet and inches, unless the sign closes a quotation that was opened before."""
    text = _FEET_INCHES.sub(_say_feet_inches, text)
    if "″" in text or '"' in text or "''" in text:

        def say(match: Match[str]) -> str:
            is_quote = match[0].endswith('"') and match.string.count('"', 0, match.end()) % 2 == 0
            return match[0] if is_quote else _say_inches(match)

        text = _INCH_PRIME.sub(say, text)

    def say_feet(match: Match[str]) -> str:
        opened = re.search(r"(?:^|[\s(])'\w", match.string[: match.start()])
        return match[0] if match[2] == "'" and opened else _say_feet(match)

    return _FEET_PRIME.sub(say_feet, text)


def expand_measures(text: str) -> str:
    """``text`` with its percentages, temperatures, units and dimensions in words."""
    if not _HAS_DIGIT.search(text):
        return text
    if "'" in text or "′" in text or "″" in text or '"' in text:
        text = _expand_primes(text)
    if "%" in text or "‰" in text:
        text = _PERCENT.sub(_say_percent, text)
    if not text.isascii():
        text = _DEGREES.sub(_say_degrees, text)
    text = _DEGREES_WORD.sub(lambda m: "degrees" + _SCALES[m[1]], text)
    text = _ATTACHED_DEGREES.sub(lambda m: f"{value_words(m[1])} degrees{_SCALES[m[2]]}", text)
    text = _HMS.sub(_say_hms, text)
    text = _MS.sub(_say_ms, text)
    text = _FT_IN.sub(_say_ft_in, text)
    text = _INCHES.sub(_say_inches, text)
    if "x" in text or "×" in text or "X" in text:
        text = _DIMENSIONS.sub(_expand_dimension_units, text)
    text = _MEASURE.sub(_say_measure, text)
    text = _TIMES_FASTER.sub(lambda m: f"{number_words(m[1])} times", text)
    return _BY.sub(" by ", text)


def _expand_dimension_units(match: Match[str]) -> str:
    """The unit behind the last side belongs to the whole: leave that side as a figure for it."""
    rest = match.string[match.end() :]
    if re.match(rf" ?(?:{_SYMBOLS}|in)\b", rest) and not rest.startswith(" in "):
        sides = [side for side in match.groups() if side]
        return " by ".join([*(_side(side) for side in sides[:-1]), sides[-1]])
    return _say_dimensions(match)
