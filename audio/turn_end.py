"""Has the caller finished? How much silence it takes, judged from the words before the pause.

People leave 200 ms between turns and up to a second inside a sentence, so no fixed silence serves
both. What was said tells them apart most of the time: after a whole sentence little silence is
needed; after "to", "and", a filler or in the middle of a number, much more. Pure judgement on text
(English) and on what the voice did last; nobody waits here.

All signs become one probability by logistic regression. The best of them costs nothing: what the
recogniser expects behind the last word. It has heard the melody and knows the words, and tells a
full stop from a comma and from the middle of a phrase.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from audio.asr_guard import EndMarks
from audio.prosody import Prosody
from audio.turn_end_weights import WEIGHTS
from audio.turn_end_words import (
    ALPHABET_WORDS,
    FILLERS,
    LEAD_INS,
    MAY_END_QUESTION,
    MAY_END_STATEMENT,
    NUMBER_WORDS,
    OBJECT_VERBS,
    POLITE_WORDS,
    QUESTION_WORDS,
    REQUEST_VERBS,
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


FINISHED = (Completeness.QUESTION, Completeness.SENTENCE)


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is known at a pause; None for what is not.

    ``text``: transcript of the turn so far. ``prosody``: how the voice ended. ``end_logprob``: the
    language model's natural log-probability that the text ends here (of a full stop, a question or
    exclamation mark, or the end of the message, after the text without its own last mark).
    ``model_probability``: a turn model's probability that the turn is over. ``end_marks``: what the
    recogniser expects behind the last word. ``end_odds``: log-odds of an end by what its encoder
    heard.
    """

    text: str
    prosody: Prosody | None = None
    end_logprob: float | None = None
    model_probability: float | None = None
    end_marks: EndMarks | None = None
    end_odds: float | None = None


@dataclass(frozen=True, slots=True)
class Waits:
    """Silence in ms that ends a turn.

    ``sure``: at a score of ``sure_score`` and above. ``unsure``: at ``unsure_score`` and below;
    between the two it goes in a line. ``trailing``, ``counting``, ``nothing``: at least so much for
    words of that kind. ``unknown``: while the words are not known.
    """

    sure: int
    unsure: int
    sure_score: float
    unsure_score: float
    trailing: int
    counting: int
    nothing: int
    unknown: int


# Chosen on the curve in docs/turn-end.svg (bench/turn_end_curve.py).
WAITS: dict[Eagerness, Waits] = {
    "high": Waits(200, 700, 0.6, 0.4, 800, 900, 480, 1_000),
    "medium": Waits(300, 1_000, 0.7, 0.5, 1_100, 1_200, 640, 1_500),
    "low": Waits(480, 2_000, 0.75, 0.6, 2_500, 2_500, 1_000, 4_000),
}
WAITS["auto"] = WAITS["medium"]

_MIN_LOGPROB = -6.0
_LEAST = 1e-3
_LEAST_HEARD = 5e-3
# Words and melody alone are wrong too often to be believed as easily.
_SURE_WITHOUT_MODEL = 0.9


# What a voice of unknown end counts as: the mean over the recordings.
_USUAL_PROSODY = Prosody((-12.0, -8.0, -8.0), -0.1, -0.1, 0.15, 0.6)


def silence_ms(evidence: Evidence, eagerness: Eagerness = "auto") -> int:
    """How much silence ends the turn, after what ``evidence`` says was said."""
    waits = WAITS[eagerness]
    completeness = judge(evidence.text)
    if completeness is Completeness.NOTHING:
        return waits.nothing
    sure_score = waits.sure_score
    signs = (
        evidence.end_logprob,
        evidence.model_probability,
        evidence.end_marks,
        evidence.end_odds,
    )
    if all(sign is None for sign in signs):
        sure_score = max(sure_score, _SURE_WITHOUT_MODEL)
    return wait_ms(score(evidence), completeness, waits, sure_score)


def wait_ms(probability: float, completeness: Completeness, waits: Waits, sure_score: float) -> int:
    """The silence that ends a turn of which ``probability`` says that it is over."""
    share = (probability - waits.unsure_score) / (sure_score - waits.unsure_score)
    wait = round(waits.unsure + min(max(share, 0.0), 1.0) * (waits.sure - waits.unsure))
    if completeness is Completeness.TRAILING:
        return max(wait, waits.trailing)
    if completeness is Completeness.COUNTING:
        return max(wait, waits.counting)
    return wait


def score(evidence: Evidence) -> float:
    """How much speaks for the end of the turn, in (0, 1): the fitted probability."""
    logprob, marks = evidence.end_logprob, evidence.end_marks
    odds, heard = evidence.end_odds, evidence.model_probability
    signs = [*words_signs(evidence.text), *prosody_signs(evidence.prosody or _USUAL_PROSODY)]
    if logprob is not None:
        signs.append(logprob_sign(logprob))
    if marks is not None:
        signs += mark_signs(marks)
    if odds is not None:
        signs.append(odds)
    if heard is not None:
        signs.append(heard_sign(heard))
    known = (logprob is not None, marks is not None, odds is not None, heard is not None)
    bias, weights = WEIGHTS[known]
    total = bias + sum(w * sign for w, sign in zip(weights, signs, strict=True))
    return 1.0 / (1.0 + math.exp(-total))


def words_signs(text: str) -> tuple[float, float, float, float]:
    """What the words amount to, as the regression sees it; so do the three below."""
    kind = judge(text)
    return (
        float(kind is Completeness.QUESTION),
        float(kind is Completeness.SENTENCE),
        float(kind is Completeness.COUNTING),
        float(kind is Completeness.TRAILING),
    )


def prosody_signs(prosody: Prosody) -> tuple[float, ...]:
    """How the voice ended."""
    melody = (prosody.pitch_drop, prosody.pitch_slope)
    return (*prosody.levels_db, *melody, prosody.last_run_s, prosody.pitched_share)


def logprob_sign(end_logprob: float) -> float:
    """What the language model says; below e**-6 it does not matter any more how little."""
    return max(end_logprob, _MIN_LOGPROB)


def mark_signs(marks: EndMarks) -> tuple[float, ...]:
    """What the recogniser expects: the log-odds of a sentence's end, and single log-probabilities,
    both with a floor of a thousandth."""
    ends = math.exp(marks.period) + math.exp(marks.question) + math.exp(marks.exclamation)
    odds = math.log(ends + _LEAST) - math.log(max(0.0, 1.0 - ends) + _LEAST)
    single = (marks.question, marks.comma, marks.ellipsis, marks.nothing)
    return (odds, *(math.log(math.exp(value) + _LEAST) for value in single))


def heard_sign(probability: float) -> float:
    """What the turn model says: log-odds, with a floor of half a percent."""
    return math.log(probability + _LEAST_HEARD) - math.log(1.0 - probability + _LEAST_HEARD)


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
    request = [word for word in _words(_last_sentence(end)) if word not in POLITE_WORDS]
    if len(request) == 1 and request[0] in REQUEST_VERBS and not asks:  # "Please name"
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
