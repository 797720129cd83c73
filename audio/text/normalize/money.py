"""Sums of money: ``$47.50``, ``€9,99``, ``$10k-$15k``, ``50¢``, ``20 USD``, ``$5/hr``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from re import Match

from audio.text.normalize.numbers import cardinal, is_one, number_words
from audio.text.normalize.values import NUM


@dataclass(frozen=True)
class Currency:
    """Names of a currency; ``cent`` is empty where no smaller unit is in use."""

    one: str
    many: str
    cent: str = ""
    cents: str = ""


_DOLLAR = Currency("dollar", "dollars", "cent", "cents")
_POUND = Currency("pound", "pounds", "penny", "pence")
_EURO = Currency("euro", "euros", "cent", "cents")
_YEN = Currency("yen", "yen")
_YUAN = Currency("yuan", "yuan")
_RUPEE = Currency("rupee", "rupees", "paisa", "paise")
_FRANC = Currency("Swiss franc", "Swiss francs", "centime", "centimes")


def _dollars_of(country: str) -> Currency:
    return Currency(f"{country} dollar", f"{country} dollars", "cent", "cents")


_BY_SYMBOL = {
    "$": _DOLLAR,
    "US$": _dollars_of("U S"),
    "A$": _dollars_of("Australian"),
    "AU$": _dollars_of("Australian"),
    "C$": _dollars_of("Canadian"),
    "CA$": _dollars_of("Canadian"),
    "NZ$": _dollars_of("New Zealand"),
    "HK$": _dollars_of("Hong Kong"),
    "S$": _dollars_of("Singapore"),
    "R$": Currency("real", "reais", "centavo", "centavos"),
    "£": _POUND,
    "€": _EURO,
    "¥": _YEN,
    "￥": _YEN,
    "₹": _RUPEE,
    "₩": Currency("won", "won"),
    "₽": Currency("ruble", "rubles", "kopek", "kopeks"),
    "₺": Currency("lira", "lira"),
    "₪": Currency("shekel", "shekels"),
    "₫": Currency("dong", "dong"),
    "฿": Currency("baht", "baht"),
    "₱": Currency("peso", "pesos"),
    "₴": Currency("hryvnia", "hryvnias"),
    "₦": Currency("naira", "naira"),
    "₿": Currency("bitcoin", "bitcoins"),
}
_BY_CODE = {
    "USD": _dollars_of("U S"),
    "EUR": _EURO,
    "GBP": _POUND,
    "JPY": _YEN,
    "CNY": _YUAN,
    "RMB": _YUAN,
    "CAD": _dollars_of("Canadian"),
    "AUD": _dollars_of("Australian"),
    "NZD": _dollars_of("New Zealand"),
    "CHF": _FRANC,
    "INR": _RUPEE,
    "SEK": Currency("Swedish krona", "Swedish kronor"),
    "NOK": Currency("Norwegian krone", "Norwegian kroner"),
    "DKK": Currency("Danish krone", "Danish kroner"),
    "PLN": Currency("zloty", "zlotys"),
    "MXN": Currency("Mexican peso", "Mexican pesos"),
    "BTC": Currency("bitcoin", "bitcoins"),
}
_MAGNITUDES = {
    "k": "thousand", "K": "thousand", "thousand": "thousand", "hundred": "hundred",
    "m": "million", "M": "million", "mn": "million", "mm": "million", "MM": "million",
    "million": "million", "mil": "million", "b": "billion", "B": "billion", "bn": "billion",
    "Bn": "billion", "billion": "billion", "t": "trillion", "T": "trillion", "tn": "trillion",
    "trillion": "trillion",
}  # fmt: skip
_PER = {
    "hr": "hour", "h": "hour", "mo": "month", "yr": "year", "wk": "week", "min": "minute",
    "sec": "second", "s": "second", "d": "day", "lb": "pound", "kg": "kilogram", "oz": "ounce",
    "gal": "gallon", "mi": "mile", "km": "kilometer", "sqft": "square foot",
    "GB": "gigabyte", "kWh": "kilowatt hour", "pp": "person",
}  # fmt: skip

_AMOUNT = rf"(?:\d{{1,3}}(?:\.\d{{3}})+,\d{{2}}(?!\d)|\d+,\d{{2}}(?![\d,])|{NUM})"
_MAGNITUDE = "(?:" + "|".join(sorted(_MAGNITUDES, key=len, reverse=True)) + r")(?![\w])"
_SYMBOL = "(?:" + "|".join(re.escape(s) for s in sorted(_BY_SYMBOL, key=len, reverse=True)) + ")"
_PLAIN_SYMBOL = "[" + "".join(s for s in _BY_SYMBOL if len(s) == 1) + "]"
_CODE = "(?:" + "|".join(_BY_CODE) + ")"
_TAIL = (
    rf"(?: ?(?P<mag>{_MAGNITUDE}))?"
    rf"(?: ?[-–—] ?(?P<cur2>{_SYMBOL})?(?P<num2>{_AMOUNT})(?: ?(?P<mag2>{_MAGNITUDE}))?)?"
    r"(?P<plus>\+)?(?:/(?P<per>[a-zA-Z]+))?"
    r"(?P<noun>(?= (?:bill|note|coin|voucher|gift|fee|tip|fine|ticket|coupon|deposit|budget|"
    r"discount|credit|meal|item|deal)\b))?"
)
_PREFIXED = re.compile(
    rf"(?P<sign>(?<![\w)])[-−+] ?)?(?<![\w])(?P<cur>{_SYMBOL}) ?(?P<neg>[-−])?"
    rf"(?P<num>{_AMOUNT}){_TAIL}"
)
_PREFIX_CODE = re.compile(rf"(?P<sign>)\b(?P<cur>{_CODE}) ?(?P<neg>[-−])?(?P<num>{_AMOUNT}){_TAIL}")
_SUFFIXED = re.compile(
    rf"(?<![\w.,])(?P<sign>[-−+])?(?P<num>{_AMOUNT})(?: ?(?P<mag>{_MAGNITUDE}))?"
    rf" ?(?P<cur>{_PLAIN_SYMBOL}(?!\d)|{_CODE}\b)"
)
_CENTS = re.compile(rf"(?<![\w.,])(?P<num>{NUM}) ?¢")
_MAY_HOLD_MONEY = re.compile(rf"[¢{''.join(s for s in _BY_SYMBOL if len(s) == 1)}]|\b{_CODE}\b")


def _plain(amount: str) -> str:
    """``1.234,56`` and ``9,99`` in the writing with a decimal point."""
    if re.fullmatch(r"[\d.]+,\d{2}", amount):
        return amount.replace(".", "").replace(",", ".")
    return amount


def _scaled(amount: str, magnitude: str) -> str:
    """``1.5k`` "one thousand five hundred", ``3.5 million`` "three point five million"."""
    word = _MAGNITUDES[magnitude]
    if word == "thousand":
        whole, _, part = amount.replace(",", "").partition(".")
        if len(part) <= 3:
            return cardinal(int(whole or "0") * 1000 + int((part or "0").ljust(3, "0")))
    return f"{number_words(amount)} {word}"


def _sum_words(amount: str, magnitude: str | None, currency: Currency, *, attributive: bool) -> str:
    amount = _plain(amount)
    if magnitude:
        return f"{_scaled(amount, magnitude)} {currency.one if attributive else currency.many}"
    whole, dot, part = amount.replace(",", "").partition(".")
    if not dot or not currency.cent or len(part) > 2:
        name = currency.one if attributive or is_one(amount) else currency.many
        return f"{number_words(amount)} {name}"
    num_whole, num_cents = int(whole or "0"), int(part.ljust(2, "0"))
    words = []
    if num_whole or not num_cents:
        name = currency.one if num_whole == 1 or attributive else currency.many
        words.append(f"{cardinal(num_whole)} {name}")
    if num_cents:
        words.append(f"{cardinal(num_cents)} {currency.cent if num_cents == 1 else currency.cents}")
    return " and ".join(words)


def _currency(name: str) -> Currency:
    return _BY_SYMBOL.get(name) or _BY_CODE[name]


def _say(match: Match[str]) -> str:
    currency = _currency(match["cur"])
    sign = (match["sign"] or match["neg"] or "").strip()
    attributive = match["noun"] is not None
    words = {"": "", "+": "plus "}.get(sign, "minus ")
    if match["num2"]:
        # "$10-15k" is ten to fifteen thousand; "$900-1.2k" keeps both magnitudes apart.
        low = _plain(match["num"])
        if match["mag"] is None and match["mag2"] is None and "." in low:
            words += _sum_words(low, None, currency, attributive=False)
        elif match["mag"] and match["mag"] != match["mag2"]:
            words += _scaled(low, match["mag"])
        else:
            words += number_words(low)
        words += " to "
        amount, magnitude = match["num2"], match["mag2"]
    else:
        amount, magnitude = match["num"], match["mag"]
    words += _sum_words(amount, magnitude, currency, attributive=attributive)
    if match["plus"]:
        words += " plus"
    if match["per"]:
        words += f" per {_PER.get(match['per'], match['per'])}"
    return words


def _say_suffixed(match: Match[str]) -> str:
    sign = {"": "", "+": "plus "}.get(match["sign"] or "", "minus ")
    return sign + _sum_words(match["num"], match["mag"], _currency(match["cur"]), attributive=False)


def _say_cents(match: Match[str]) -> str:
    return f"{number_words(match['num'])} {'cent' if is_one(match['num']) else 'cents'}"


def expand_money(text: str) -> str:
    """``text`` with every sum of money in words."""
    if not _MAY_HOLD_MONEY.search(text):
        return text
    text = _PREFIXED.sub(_say, text)
    text = _PREFIX_CODE.sub(_say, text)
    text = _SUFFIXED.sub(_say_suffixed, text)
    return _CENTS.sub(_say_cents, text)
