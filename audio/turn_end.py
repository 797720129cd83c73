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
    words = re.findall(r"[^\W_]+(?:['’.][^\W_]+)*", text.lower().replace("’", "'"))  # noqa: RUF001
    if not words:
        return Completeness.NOTHING
    end = text.rstrip("\"'”)] ")  # noqa: RUF001
    if _is_trailing(words, end):
        return Completeness.TRAILING
    if end.endswith("?"):
        return Completeness.QUESTION
    if _is_counting(words, end):
        return Completeness.COUNTING
    sentence = _last_sentence(text)
    if end.endswith((".", "!")) and not end.endswith(".."):
        return Completeness.OPEN if _lacks_something(sentence) else Completeness.SENTENCE
    if " ".join(words) in WHOLE_ANSWERS:
        return Completeness.SENTENCE
    return Completeness.OPEN
