"""What the voice should read: figures, units, signs and abbreviations of English text in words.

The text goes through passes, each of which turns one kind of expression into plain words that no
later pass will touch. Their order is the grammar: addresses first, because they hold dots and
digits; phone numbers before dates, dates before ranges, money and units before plain numbers.
"""

from __future__ import annotations

from audio.text.normalize.codes import expand_codes, expand_mixed, expand_phones
from audio.text.normalize.measures import expand_measures
from audio.text.normalize.money import expand_money
from audio.text.normalize.symbols import (
    clean,
    expand_fractions,
    expand_math,
    expand_numbers,
    expand_signs,
    tidy,
)
from audio.text.normalize.time import expand_dates_and_times
from audio.text.normalize.web import expand_addresses
from audio.text.normalize.words import (
    expand_abbreviations,
    expand_addresses_on_streets,
    expand_letters,
    expand_roman,
)

_PASSES = (
    clean,
    expand_addresses,
    expand_addresses_on_streets,
    expand_phones,
    expand_dates_and_times,
    expand_money,
    expand_codes,
    expand_abbreviations,
    expand_measures,
    expand_roman,
    expand_math,
    expand_fractions,
    expand_mixed,
    expand_numbers,
    expand_signs,
    expand_letters,
    tidy,
)


def normalize(text: str) -> str:
    """Words and pauses for ``text``, one clause or many; "" when nothing in it can be spoken.

    The result holds letters, apostrophes and ``. , ; : ! ?`` only, on one line, and no digits.
    Letters to be read one by one stand alone in capitals ("A P I"). The text is taken for English;
    letters of other scripts are kept. Markdown should be gone (SpokenText), though what little of
    it is left is not read out.
    """
    for expand in _PASSES:
        text = expand(text)
    return text
