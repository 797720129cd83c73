"""Where a text may be cut: pure judgements on one word and what stands beside it."""

from __future__ import annotations

import re
import unicodedata
from enum import IntEnum

from audio.text.word_set import word_set

CLOSERS = "\"'”’)]}»」』）】"
_OPENERS = "\"'“‘([{«「『（【"
_DASHES = frozenset({"-", "--", "–", "—"})
_CJK_SENTENCE_STOPS = "。！？｡"
_CJK_COMMAS = "，、；："
_LIST_NUMBER = re.compile(r"\(?(?:\d{1,3}|[a-zA-Z])[.)]")
_DOTTED = re.compile(r"(?:[a-z]\.)+[a-z]")
_MIN_PLAIN_WORD_LEN = 5

# Always followed by what they belong to.
_TITLES = word_set(
    "adm approx apt brig capt ca cf cmdr col dept dr e.g est ext fig fr ft gen gov hon i.e lt maj "
    "messrs mr mrs ms mt pres prof rep rev rm sen sgt sr. st ste supt tel viz vs v"
)
# Abbreviations only in front of a figure; otherwise words, or the end of their sentence.
_BEFORE_FIGURES = word_set(
    "art ch no nos nr p pp par sec vol jan feb mar apr jun jul aug sep sept oct nov dec mon tue "
    "tues wed thu thur thurs fri sat sun"
)
# May end a sentence: only the case of the next letter tells.
_MAY_END = word_set(
    "a.d a.m al ave b.c blvd co corp d.c esq etc hr hrs hwy inc jr lb lbs ln ltd m.d max min misc "
    "oz p.m ph.d pkwy pl plc p.s rd sq sr"
)
_DATE_WORDS = word_set(
    "january february march april may june july august september october november december jan "
    "feb mar apr jun jul aug sep sept oct nov dec monday tuesday wednesday thursday friday "
    "saturday sunday mon tue tues wed thu thur thurs fri sat sun"
)
_BREAK_BEFORE = word_set(
    "about after against although and as at because before beneath beside between but by despite "
    "during except for from if in inside into near on onto or since so than that though through "
    "toward towards under unless until when where whereas whether which while who whose with "
    "within without yet"
)
_CLINGS_TO_NEXT = _BREAK_BEFORE | word_set(
    "a an the this these those my your his her its our their some any no every each of to up out "
    "off over is am are was were be been being do does did has have had will would can could "
    "shall should may might must not very more most less too such just even i you he she it we "
    "they there who what how why it's i'm you're we're they're he's she's that's there's"
)


class Boundary(IntEnum):
    """What ends between two words."""

    NONE = 0
    COMMA = 1
    SENTENCE = 2


def boundary_between(
    word: str, prev_word: str, next_char: str, *, has_newline: bool, at_line_start: bool
) -> Boundary:
    """The boundary behind ``word``, which follows ``prev_word``, before ``next_char``.

    ``has_newline``: there is a line break between ``word`` and ``next_char``; ``at_line_start``:
    ``word`` is the first of its line.
    """
    if at_line_start and _LIST_NUMBER.fullmatch(word):
        return Boundary.NONE
    if has_newline:
        return Boundary.SENTENCE
    if word in _DASHES:
        between_figures = prev_word[-1:].isdigit() and next_char.isdigit()
        return Boundary.NONE if between_figures or not prev_word else Boundary.COMMA
    core = word.rstrip(CLOSERS)
    if not core:
        return Boundary.NONE
    last = core[-1]
    if last in "!?" + _CJK_SENTENCE_STOPS:
        return Boundary.SENTENCE
    if last == "…" or core.endswith(".."):
        return Boundary.COMMA if next_char.islower() else Boundary.SENTENCE
    if last == ".":
        return _behind_period(core[:-1].lstrip(_OPENERS), next_char)
    if last in ",;:" + _CJK_COMMAS:
        stem = core[:-1]
        if next_char.isdigit() and (stem[-1:].isdigit() or stem.rstrip(".").lower() in _DATE_WORDS):
            return Boundary.NONE
        return Boundary.COMMA
    return Boundary.COMMA if last == "—" else Boundary.NONE


def _behind_period(stem: str, next_char: str) -> Boundary:
    lower = stem.lower()
    if lower in _TITLES or not stem:
        return Boundary.NONE
    if next_char.isdigit() and (lower in _BEFORE_FIGURES or stem[-1].isdigit()):
        return Boundary.NONE
    if lower in _MAY_END:
        return Boundary.NONE if next_char.islower() or next_char.isdigit() else Boundary.SENTENCE
    is_initial = len(stem) == 1 and stem.isalpha() and stem != "I"
    if is_initial or _DOTTED.fullmatch(lower):
        return Boundary.NONE
    if next_char.islower():
        # An abbreviation we do not know, or someone who writes without capitals.
        return Boundary.COMMA if len(stem) >= _MIN_PLAIN_WORD_LEN else Boundary.NONE
    return Boundary.SENTENCE


def is_soft_break(prev_word: str, word: str) -> bool:
    """Whether a speaker may breathe between the two: ``word`` opens a new phrase."""
    return word.lower().rstrip(".,;:!?") in _BREAK_BEFORE and can_break_between(prev_word, word[0])


def can_break_between(word: str, next_char: str) -> bool:
    """Whether a cut behind ``word`` tears nothing: no figures beside it, no article, no title."""
    if any(char.isdigit() for char in word) or next_char.isdigit() or next_char in "$£€¥₹#+-–—":
        return False
    if word.endswith(".") or word[-1:] in _OPENERS:
        return False
    if word[:1].isupper() and next_char.isupper():
        return False  # a name of several words
    return word.lower().strip(_OPENERS) not in _CLINGS_TO_NEXT


def is_cjk_stop(char: str) -> bool:
    """Punctuation behind which Chinese and Japanese go on without a space."""
    return char in _CJK_SENTENCE_STOPS or char in _CJK_COMMAS


def cjk_boundary(char: str) -> Boundary:
    """What ``char``, a stop of Chinese or Japanese, ends."""
    return Boundary.SENTENCE if char in _CJK_SENTENCE_STOPS else Boundary.COMMA


def is_unspaced_letter(char: str) -> bool:
    """Whether ``char`` is of a script that is written without spaces between words."""
    code = ord(char)
    return code >= 0x0E00 and (
        code <= 0x0EFF  # Thai, Lao
        or 0x1000 <= code <= 0x109F  # Myanmar
        or 0x1780 <= code <= 0x17FF  # Khmer
        or 0x3040 <= code <= 0x30FF  # kana
        or 0x3400 <= code <= 0x9FFF  # han
        or 0xF900 <= code <= 0xFAFF
        or 0x20000 <= code <= 0x3FFFF
    )


def may_begin_clause(char: str) -> bool:
    """Whether ``char`` can stand first: no combining mark, no closing sign, no stop."""
    if char in CLOSERS or is_cjk_stop(char):
        return False
    return not unicodedata.category(char).startswith("M")
