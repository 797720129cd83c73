"""Has the caller finished? How much silence it takes, judged from the words before the pause.

People leave 200 ms between turns and up to a second inside a sentence, so no fixed silence serves
both. What was said tells them apart most of the time: after a whole sentence little silence is
needed; after "to", "and", a filler or in the middle of a number, much more. Pure judgement on text
(English) and on what the voice did last; nobody waits here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from audio.turn_end_words import (
    ALPHABET_WORDS,
    FILLERS,
    LEAD_INS,
    MAY_END_QUESTION,
    MAY_END_STATEMENT,
    NUMBER_WORDS,
    OBJECT_VERBS,
    QUESTION_WORDS,
    SUBORDINATORS,
    TRAILING_PHRASES,
    TRAILING_WORDS,
    WHOLE_ANSWERS,
)

Eagerness = Literal["low", "medium", "high", "auto"]


class Completeness(Enum):
    """What the words before a pause amount to."""

    QUESTION = "question"
    """A whole question: somebody is expected to answer."""
    SENTENCE = "sentence"
    """A whole sentence, or an answer that can stand alone."""
    OPEN = "open"
    """Could end here or go on: no sign either way."""
    COUNTING = "counting"
    """In the middle of digits, spelling or a list."""
    TRAILING = "trailing"
    """Cannot end here: the last words ask for more."""
    NOTHING = "nothing"
    """No words: a noise, or a voice that was not understood."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is known at a pause; None for what is not.

    ``text``: transcript of the turn so far. ``fall_db``: how far the level of the voice fell over
    its last 0.3 s (see ``audio.voice_end.fall_db``). ``turn_probability``: a turn model's
    probability that the turn is over. ``end_probability``: the language model's, that the user's
    text ends here.
    """

    text: str
    fall_db: float | None = None
    turn_probability: float | None = None
    end_probability: float | None = None


@dataclass(frozen=True, slots=True)
class Waits:
    """Silence in ms that ends a turn, for each completeness, and while the words are unknown."""

    question: int
    sentence: int
    open: int
    counting: int
    trailing: int
    nothing: int
    unknown: int

    def of(self, completeness: Completeness) -> int:
        """The wait for ``completeness``."""
        wait_ms: int = getattr(self, completeness.value)
        return wait_ms


# The curve behind the figures is in docs/turn-end.svg (bench/turn_end_curve.py).
WAITS: dict[Eagerness, Waits] = {
    "high": Waits(128, 160, 320, 800, 800, 480, 1_000),
    "medium": Waits(160, 224, 704, 1_200, 1_200, 640, 1_500),
    "low": Waits(480, 640, 1_500, 2_500, 2_500, 1_000, 4_000),
}
WAITS["auto"] = WAITS["medium"]

# A turn model that is this sure overrules the words.
_SURELY_OVER = 0.9
_SURELY_NOT = 0.15


def silence_ms(evidence: Evidence, eagerness: Eagerness = "auto") -> int:
    """How much silence ends the turn after what ``evidence`` says was said."""
    waits = WAITS[eagerness]
    completeness = judge(evidence.text)
    wait_ms = waits.of(completeness)
    probability = evidence.turn_probability
    if probability is not None and completeness is not Completeness.NOTHING:
        if probability >= _SURELY_OVER and completeness is Completeness.OPEN:
            wait_ms = waits.sentence
        elif probability <= _SURELY_NOT:
            wait_ms = max(wait_ms, waits.open)
    return wait_ms


def judge(text: str) -> Completeness:
    """What the words of a turn so far amount to."""
    words = _words(text)
    if not words:
        return Completeness.NOTHING
    end = text.rstrip("\"'”)] ")
    asks = end.endswith("?")
    if _is_trailing(words, end, asks=asks):
        return Completeness.TRAILING
    if _is_counting(words, end):
        return Completeness.COUNTING
    if asks:
        return Completeness.QUESTION
    if " ".join(words) in WHOLE_ANSWERS:
        return Completeness.SENTENCE
    sentence = _words(_last_sentence(end))
    if not end.endswith((".", "!")) or _lacks_something(sentence, end):
        return Completeness.OPEN
    return Completeness.SENTENCE


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+(?:['.\-][^\W_]+)*", text.lower().replace("\u2019", "'"))


def _last_sentence(end: str) -> str:
    return re.split(r"(?<=[.!?])\s+", end)[-1]


def _is_trailing(words: list[str], end: str, *, asks: bool) -> bool:
    """The recogniser itself heard it break off, or no sentence ends in this word."""
    if end.endswith(("-", "\u2013", "\u2014", "...", "\u2026", ",", ":", ";")):
        return True
    last = words[-1]
    if last in FILLERS and len(words) > 1:
        return not asks
    if last in FILLERS and end[-1:] not in "?":
        return True
    if any(_ends_with(words, phrase) for phrase in TRAILING_PHRASES):
        return True
    if last not in TRAILING_WORDS:
        return False
    if asks:
        return last not in MAY_END_QUESTION
    return not (end.endswith((".", "!")) and last in MAY_END_STATEMENT)


def _is_counting(words: list[str], end: str) -> bool:
    """Digits, letters or alphabet words at the end, and not only as part of a sentence."""
    num_items = 0
    for word in reversed(words):
        if not _is_item(word):
            break
        num_items += sum(map(str.isdigit, word)) if word[0].isdigit() else 1
    if num_items == 0:
        return False
    before = " ".join(words[-8:])
    if any(lead in before for lead in LEAD_INS):
        return True
    # "Set an alarm for 7.", "What is 37.67 minus 75.7?" are sentences; "4, 1, 5." is not.
    return num_items >= 3 if not end.endswith("?") else num_items == len(words) >= 3


def _is_item(word: str) -> bool:
    is_number = word[0].isdigit() and not re.search(r"[a-z]", word)
    return is_number or len(word) == 1 or word in NUMBER_WORDS or word in ALPHABET_WORDS


def _lacks_something(sentence: list[str], end: str) -> bool:
    """A full stop after half a sentence: the recogniser sets one at every long pause."""
    if not sentence:
        return True
    if sentence[-1] in OBJECT_VERBS:
        return True
    if sentence[0] in SUBORDINATORS and "," not in _last_sentence(end):
        return True
    # A question that came out as a statement broke off: "Should I get."
    if sentence[0] in QUESTION_WORDS and len(sentence) < 5:
        return True
    return any(_ends_with(sentence[:-1], lead) for lead in LEAD_INS)


def _ends_with(words: list[str], phrase: str) -> bool:
    parts = phrase.split()
    return words[-len(parts) :] == parts
