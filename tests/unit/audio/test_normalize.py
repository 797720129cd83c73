"""normalize: figures, units, signs and abbreviations in words."""

from __future__ import annotations

import csv
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audio.text.clauses import ClauseChunker, strip_markdown
from audio.text.normalize.english import normalize
from audio.text.normalize.numbers import cardinal, ordinal, roman_value, year
from tests.support.paths import SHARED_DATA

SHARED_CASES = SHARED_DATA / "tts_text" / "tts_cases.tsv"


def words(text: str) -> str:
    """Lower case, no punctuation, single spaces."""
    return " ".join(re.sub(r"[^\w\s]", " ", text.lower().replace("'", "")).split())


CASES = {
    "money": [
        ("It costs $1,200.", "it costs one thousand two hundred dollars"),
        ("Only €9.99!", "only nine euros and ninety nine cents"),
        ("just €9,99", "just nine euros and ninety nine cents"),
        ("€1.299,00", "one thousand two hundred ninety nine euros"),
        ("£1.01 or £0.50", "one pound and one penny or fifty pence"),
        ("$1 and 50¢", "one dollar and fifty cents"),
        ("worth $3.5 million", "worth three point five million dollars"),
        ("$2.5bn from $900M", "two point five billion dollars from nine hundred million dollars"),
        ("$20-$30 or $5–10k", "twenty to thirty dollars or five to ten thousand dollars"),
        ("a $20 bill", "a twenty dollar bill"),
        ("-$40", "minus forty dollars"),
        ("$15/hr", "fifteen dollars per hour"),
        ("20 USD, EUR 15", "twenty u s dollars fifteen euros"),
        ("₹500 and ₩1000", "five hundred rupees and one thousand won"),
    ],
    "number": [
        ("3,000,000 people", "three million people"),
        ("It is -5 outside", "it is minus five outside"),
        ("1000 and 10000", "one thousand and ten thousand"),
        ("pi is 3.1416", "pi is three point one four one six"),
        ("0.5 and .75", "zero point five and point seven five"),
        ("10k users", "ten thousand users"),
    ],
    "version": [
        ("Python 3.12", "python three point twelve"),
        ("v1.2.3-beta", "version one point two point three beta"),
        ("192.168.0.1", "one nine two dot one six eight dot zero dot one"),
    ],
    "fraction": [
        ("1/2 a cup, 2/3 full", "one half a cup two thirds full"),
        ("1½ or 3 1/4", "one and a half or three and a quarter"),
        ("5/8 inch", "five eighths inch"),
        ("he got 8/10", "he got eight out of ten"),
    ],
    "percent": [
        ("50% off, 0.5%", "fifty percent off zero point five percent"),
        ("20%–30%", "twenty to thirty percent"),
    ],
    "ordinal": [
        ("1st, 2nd, 3rd, 21st", "first second third twenty first"),
        ("the 112th", "the one hundred twelfth"),
        ("Louis XIV, Elizabeth II", "louis the fourteenth elizabeth the second"),
        ("King George V", "king george the fifth"),
        ("World War II, Chapter IV", "world war two chapter four"),
        ("I am; Malcolm X", "i am malcolm x"),
    ],
    "range": [
        ("pages 10–20", "pages ten to twenty"),
        ("3-5 days", "three to five days"),
        ("2019-2021", "twenty nineteen to twenty twenty one"),
        ("Mon-Fri", "monday to friday"),
        ("9am-5pm", "nine a m to five p m"),
    ],
    "date": [
        ("3/7/2025", "march seventh twenty twenty five"),
        ("25/12/2024", "december twenty fifth twenty twenty four"),
        ("July 4, 1776", "july fourth seventeen seventy six"),
        ("14 January 2025", "fourteenth of january twenty twenty five"),
        ("Dec. 25 and Sept 5-7", "december twenty fifth and september fifth to seventh"),
        ("the 1990s, the '80s", "the nineteen nineties the eighties"),
        ("in 1905 and 2010", "in nineteen oh five and twenty ten"),
        ("2030-11-30", "november thirtieth twenty thirty"),
        ("about 1500 people", "about one thousand five hundred people"),
    ],
    "time": [
        ("10:30 AM", "ten thirty a m"),
        ("at 14:30", "at fourteen thirty"),
        ("at 7:00", "at seven oclock"),
        ("3:00-4:30 pm", "three to four thirty p m"),
        ("2h 30m", "two hours thirty minutes"),
        ("2:05:09", "two hours five minutes and nine seconds"),
        ("the ratio is 3:1", "the ratio is three to one"),
        ("It is 6 p.m. Then", "it is six p m then"),
    ],
    "measure": [
        ("60 mph, 100 km/h", "sixty miles per hour one hundred kilometers per hour"),
        ("1 kg, 1.5 L", "one kilogram one point five liters"),
        ("16GB of RAM", "sixteen gigabytes of ram"),
        ("5 ft 10 in", "five feet ten inches"),
        ("she is 5'10\"", "she is five foot ten"),
        ('a 12" pizza', "a twelve inch pizza"),
        ("he said “page 12”", "he said page twelve"),
        ("9.8 m/s²", "nine point eight meters per second squared"),
        ("50 m²", "fifty square meters"),
        ("a 5-kg bag", "a five kilogram bag"),
        ("8x10, 10 x 12 ft", "eight by ten ten by twelve feet"),
        ("-40°C", "minus forty degrees celsius"),
        ("2x faster", "two times faster"),
        ("250ml, 2.4 GHz", "two hundred fifty milliliters two point four gigahertz"),
    ],
    "phone": [
        ("(555) 123-4567", "five five five one two three four five six seven"),
        ("1-800-555-0199", "one eight hundred five five five zero one nine nine"),
        ("555-0123", "five five five zero one two three"),
        ("Dial 911", "dial nine one one"),
        ("call 20 people", "call twenty people"),
    ],
    "code": [
        ("PIN 4821", "pin four eight two one"),
        ("ending in 4242", "ending in four two four two"),
        ("#10023", "number one zero zero two three"),
        ("item #5", "item number five"),
        ("AB12-CD345", "a b twelve c d three four five"),
        ("MP3, H2O, 4K", "m p three h two o four k"),
        ("COVID-19", "covid nineteen"),
        ("an 18-year-old", "an eighteen year old"),
    ],
    "address": [
        ("St. Patrick on 5th St.", "saint patrick on fifth street"),
        ("Mount St. Helens", "mount saint helens"),
        ("Dr. Lee lives on Elm Dr.", "doctor lee lives on elm drive"),
        (
            "123 Oak Ave, Apt 4B, Reno, NV 89501",
            "one twenty three oak avenue apartment four b reno nevada eight nine five zero one",
        ),
        ("1600 Pine St NW", "sixteen hundred pine street northwest"),
    ],
    "web": [
        ("info@my-site.co.uk", "info at my dash site dot co dot u k"),
        ("a_b@gmail.com.", "a underscore b at gmail dot com"),
        ("github.com/user/repo", "github dot com slash user slash repo"),
        ("http://localhost:8080/api", "localhost colon eight zero eight zero slash api"),
        ("edit main.py", "edit main dot p y"),
        ("/etc/hosts", "slash etc slash hosts"),
        (r"C:\Users\me", "c colon backslash users backslash me"),
        ("It ended.So it goes", "it ended so it goes"),
    ],
    "abbreviation": [
        ("i.e. this vs. that", "that is this versus that"),
        ("approx. 5", "approximately five"),
        ("Mr. and Mrs. Gray Jr.", "mister and missus gray junior"),
        ("No. 5 is best. No. It is not.", "number five is best no it is not"),
        ("with a.k.a. Bob", "with also known as bob"),
        ("J. K. Rowling", "j k rowling"),
        ("the U.S. economy", "the u s economy"),
    ],
    "acronym": [
        ("FBI, USB, HTML", "f b i u s b h t m l"),
        ("NASA and NATO", "nasa and nato"),
        ("DO NOT TOUCH THIS", "do not touch this"),
        ("AT&T and R&D", "a t and t and r and d"),
        ("I work in IT", "i work in i t"),
    ],
    "mathematics": [
        ("9 - 4 = 5", "nine minus four equals five"),
        ("48-24=24", "forty eight minus twenty four equals twenty four"),
        ("10 / 2 = 5", "ten divided by two equals five"),
        ("6*7 or 6 * 7", "six times seven or six times seven"),
        ("x^2 + y³ = z", "x squared plus y cubed equals z"),
        ("10^6", "ten to the power of six"),
        ("√16", "square root of sixteen"),
        ("5 < 10, 7 > 3", "five is less than ten seven is greater than three"),
        ("a <= b, x != y", "a is less than or equal to b x is not equal to y"),
        ("f(x) = 2x + 1", "f of x equals two x plus one"),
    ],
    "symbol": [
        ("salt & pepper", "salt and pepper"),
        ("~5 minutes", "about five minutes"),
        ("A → B", "a to b"),
        ("C++ and C#", "c plus plus and c sharp"),
        ("© 2024 Acme™", "copyright twenty twenty four acme"),
        ("and/or he/she", "and or he or she"),
        ("snake_case", "snake case"),
    ],
    "punctuation": [
        ("“Hi” — ‘there’…", "hi there"),
        ("Really?!!", "really"),
        ("naïve café", "naïve café"),
        ("well-known", "well known"),
        ("the dogs’ bowls aren’t", "the dogs bowls arent"),
    ],
    "nothing": [("", ""), ("...", ""), ("\U0001f642", ""), ("***", ""), (" \n", "")],
}


@pytest.mark.parametrize(
    ("text", "spoken"), [case for cases in CASES.values() for case in cases], ids=repr
)
def test_cases(text: str, spoken: str) -> None:
    assert words(normalize(text)) == spoken


def shared_rows() -> list[dict[str, str]]:
    if not SHARED_CASES.is_file():
        return []
    with SHARED_CASES.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


@pytest.mark.skipif(not SHARED_CASES.is_file(), reason=f"{SHARED_CASES} is missing")
@pytest.mark.parametrize("row", shared_rows(), ids=lambda row: row["id"])
def test_shared_cases(row: dict[str, str]) -> None:
    spoken = normalize(strip_markdown(row["input"].replace("\\n", "\n")))
    heard = words(spoken)
    others = [words(other) for other in row["also_ok"].split("|") if other]
    assert heard == words(row["spoken"]) or any(f" {o} " in f" {heard} " for o in others if o)
    for forbidden in filter(None, row["must_not_contain"].split("|")):
        assert forbidden.lower() not in spoken.lower()


def test_pauses_are_kept() -> None:
    assert normalize("Well... I think — maybe — yes!") == "Well... I think, maybe, yes!"
    assert normalize("Plan\n\n1. Boil water\n2. Add tea") == "Plan. one, Boil water. two, Add tea"
    assert normalize("It is 6 p.m. Then we go.") == "It is six P M. Then we go."
    assert normalize("Fruit, e.g. apples, etc.") == "Fruit, for example apples, et cetera."
    assert normalize("one (two) three.") == "one, two, three."


def test_letters_stand_alone_in_capitals() -> None:
    assert normalize("the API at 5 am") == "the A P I at five A M"


PROSE = [
    "I read it yesterday, but you read it now.",
    "May I ask what you may do in March, or on a sunny Sunday?",
    "He sat in the sun and will wed in the spring, said Jan.",
    "Come in. I am no saint, so be it.",
    "It is us against them, and that is that.",
    "Mix it well and dim the light; I like it mild.",
]


@pytest.mark.parametrize("text", PROSE)
def test_prose_is_left_alone(text: str) -> None:
    assert normalize(text) == text


@pytest.mark.parametrize("char", [*map(chr, {*range(32)} - {10}), "\x7f", "\x85", "\x9b"])
def test_control_characters_are_white_space(char: str) -> None:
    """The voice takes a C string."""
    assert normalize(f"Go{char}on.") == "Go on."
    assert normalize(f"Café{char}au lait.") == "Café au lait."


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(
        st.text(max_size=80), st.text("0123456789,.:-/$%'\"x()[]*_#@+=<>° aIVXSt\n½²€", max_size=60)
    )
)
def test_nothing_but_words_and_pauses_comes_out(text: str) -> None:
    spoken = normalize(text)
    assert not any(char.isdecimal() for char in spoken)
    assert not set(spoken) & set('*_`~#<>|\\^{}[]()"$%&@=+/\n\t')
    assert spoken.isprintable() or not spoken.isascii()
    assert spoken == spoken.strip()
    assert "  " not in spoken


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**12))
def test_number_words_agree_with_num2words(number: int) -> None:
    num2words = pytest.importorskip("num2words").num2words

    def plain(text: str) -> str:
        return " ".join(re.sub(r"\band\b|[,-]", " ", text).split())

    assert cardinal(number) == plain(num2words(number))
    assert ordinal(number) == plain(num2words(number, to="ordinal"))


@given(st.integers(1010, 2099))
def test_years_agree_with_num2words(number: int) -> None:
    num2words = pytest.importorskip("num2words").num2words
    expected = num2words(number, to="year").replace("-", " ").replace(" and ", " ")
    assert year(number) == expected


@pytest.mark.parametrize(
    ("numeral", "value"),
    [("I", 1), ("IV", 4), ("XIV", 14), ("XCIX", 99), ("IIII", None), ("VX", None), ("A", None)],
)
def test_roman_numerals(numeral: str, value: int | None) -> None:
    assert roman_value(numeral) == value


def test_clauses_of_a_reply_read_the_same_as_the_whole() -> None:
    """The chunker keeps together what normalize needs to see together."""
    reply = (
        "Your total is $1,047.50, due on July 4, 2025, at 6:05 a.m. sharp. Dr. Smith weighs 80 kg, "
        "i.e. 176 lbs, and he is 6'2\" tall. Write to jo.smith@example.com, or call 555-0123. "
        "It is 98.6°F in St. Louis, 5-10% above the 1,024 of 2 3/4 years ago."
    )
    chunker = ClauseChunker()
    clauses = chunker.feed(reply) + chunker.flush()
    assert len(clauses) > 3
    assert words(" ".join(map(normalize, clauses))) == words(normalize(reply))


@pytest.mark.parametrize(
    "text", ["1" * 3000, "1-" * 1500, "[" * 3000, " " * 5000, "a." * 2000, "\\" * 2000, "A " * 1000]
)
def test_no_input_takes_long(text: str) -> None:
    start_s = time.thread_time()
    normalize(text)
    strip_markdown(text)
    assert time.thread_time() - start_s < 1.0
