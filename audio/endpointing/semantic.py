"""Has the caller finished? How much silence it takes, judged from the words before the pause.

People leave 200 ms between turns and up to a second inside a sentence, so no fixed silence serves
both. What was said tells them apart most of the time: after a whole sentence little silence is
needed; after "to", "and", a filler or in the middle of a number, much more. Pure judgement on text
(English) and on what the voice did last; nobody waits here.

All signs become one probability by logistic regression. The best of them costs nothing: what the
recogniser expects behind the last word. It has heard the melody and knows the words, and tells a
full stop from a comma and from the middle of a phrase.

Who tells something goes on behind whole sentences, whose melody sounds like an end; who asks for
something wants the answer. So what the recogniser's ear makes of the voice counts less in a story.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from audio.asr import PunctuationLogprobs
from audio.endpointing.prosody import Prosody
from audio.endpointing.vocabulary import (
    ALPHABET_WORDS,
    FILLERS,
    LEAD_INS,
    MAY_END_QUESTION,
    MAY_END_STATEMENT,
    NUMBER_WORDS,
    OBJECT_VERBS,
    OPENERS,
    POLITE_WORDS,
    QUESTION_WORDS,
    REQUEST_VERBS,
    SINGLE_DIGITS,
    SUBJECTS,
    SUBORDINATORS,
    TRAILING_PHRASES,
    TRAILING_WORDS,
    WHOLE_ANSWERS,
    WISHES,
)
from audio.endpointing.weights import WEIGHTS

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
    end_marks: PunctuationLogprobs | None = None
    end_odds: float | None = None


@dataclass(frozen=True, slots=True)
class Waits:
    """Silence in ms that ends a turn.

    ``sure``: at a score of ``sure_score`` and above; ``likely``: at ``likely_score`` and above;
    ``unsure``: below. ``trailing``: at least so much for words that cannot end here, unless the
    end is likely by what is heard. ``counting``, ``nothing``: at least so much for words of that
    kind. ``unknown``: while the words are not known.
    """

    sure: int
    likely: int
    unsure: int
    sure_score: float
    likely_score: float
    trailing: int
    counting: int
    nothing: int
    unknown: int


# Chosen on the curve in docs/turn-end.svg (bench/endpointing/curve.py).
WAITS: dict[Eagerness, Waits] = {
    "high": Waits(200, 400, 700, 0.6, 0.4, 800, 900, 480, 1_000),
    "medium": Waits(300, 660, 1_000, 0.85, 0.5, 1_100, 1_200, 640, 1_500),
    "low": Waits(480, 1_200, 2_000, 0.85, 0.6, 2_500, 2_500, 1_000, 4_000),
}
WAITS["auto"] = WAITS["medium"]

_MIN_LOGPROB = -6.0
_LEAST = 1e-3
_LEAST_HEARD = 5e-3
# Log-odds above which the recogniser's ear is not surer, whatever it says.
_SUREST_ODDS = 2.0
# Words and melody alone are wrong too often to be believed as easily.
_SURE_WITHOUT_MODEL = 0.9
# Shorter statements are answers: "My name is John."
_SHORTEST_STORY = 5


# What a voice of unknown end counts as: the mean over the recordings.
_USUAL_PROSODY = Prosody((-12.0, -8.0, -8.0), -0.1, -0.1, 0.15, 0.6)


def silence_ms(evidence: Evidence, eagerness: Eagerness = "auto") -> int:
    """How much silence ends the turn, after what ``evidence`` says was said."""
    waits = WAITS[eagerness]
    if judge(evidence.text) is Completeness.NOTHING:
        return waits.nothing
    signs = (
        evidence.end_logprob,
        evidence.model_probability,
        evidence.end_marks,
        evidence.end_odds,
    )
    if all(sign is None for sign in signs):
        waits = replace(waits, sure_score=max(waits.sure_score, _SURE_WITHOUT_MODEL))
    is_heard = evidence.end_odds is not None
    return wait_ms(score(evidence), evidence.text, waits, is_heard=is_heard)


def wait_ms(probability: float, text: str, waits: Waits, *, is_heard: bool) -> int:
    """The silence that ends a turn with these words, of which ``probability`` says that it is over.
    ``is_heard``: also by the recogniser's ear, which knows when a word is not what it looks
    like."""
    completeness = judge(text)
    if probability >= waits.sure_score:
        wait = waits.sure
    elif probability >= waits.likely_score:
        wait = waits.likely
    else:
        wait = waits.unsure
    if completeness is Completeness.COUNTING:
        return max(wait, waits.counting)
    if completeness is Completeness.TRAILING:
        is_likely = is_heard and probability >= waits.likely_score
        return max(wait, waits.likely if is_likely else waits.trailing)
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
        signs += ear_signs(odds, evidence.text, logprob)
    if heard is not None:
        signs.append(heard_sign(heard))
    known = (logprob is not None, marks is not None, odds is not None, heard is not None)
    bias, weights = WEIGHTS[known]
    total = bias + sum(w * sign for w, sign in zip(weights, signs, strict=True))
    return 1.0 / (1.0 + math.exp(-total))


def words_signs(text: str) -> tuple[float, ...]:
    """What the words amount to, as the regression sees it, like all signs below."""
    kind = judge(text)
    return (
        float(kind is Completeness.QUESTION),
        float(kind is Completeness.SENTENCE),
        float(kind is Completeness.COUNTING),
        float(kind is Completeness.TRAILING),
        float(tells(text)),
    )


def prosody_signs(prosody: Prosody) -> tuple[float, ...]:
    """How the voice ended."""
    melody = (prosody.pitch_drop, prosody.pitch_slope)
    return (*prosody.levels_db, *melody, prosody.last_run_s, prosody.pitched_share)


def logprob_sign(end_logprob: float) -> float:
    """What the language model says; below e**-6 it does not matter any more how little."""
    return max(end_logprob, _MIN_LOGPROB)


def mark_signs(marks: PunctuationLogprobs) -> tuple[float, ...]:
    """What the recogniser expects: the log-odds of a sentence's end, and single log-probabilities,
    both with a floor of a thousandth."""
    ends = math.exp(marks.period) + math.exp(marks.question) + math.exp(marks.exclamation)
    odds = math.log(ends + _LEAST) - math.log(max(0.0, 1.0 - ends) + _LEAST)
    single = (marks.question, marks.comma, marks.ellipsis, marks.nothing)
    return (odds, *(math.log(math.exp(value) + _LEAST) for value in single))


def ear_signs(end_odds: float, text: str, end_logprob: float | None) -> tuple[float, ...]:
    """What the recogniser's ear says: for any words, for a story's, and together with the language
    model, where that is known."""
    odds = min(end_odds, _SUREST_ODDS)
    signs = (odds, odds * tells(text))
    return signs if end_logprob is None else (*signs, odds * logprob_sign(end_logprob))


def heard_sign(probability: float) -> float:
    """What the turn model says: log-odds, with a floor of half a percent."""
    return math.log(probability + _LEAST_HEARD) - math.log(1.0 - probability + _LEAST_HEARD)


def judge(text: str) -> Completeness:
    """What the words of a turn so far amount to."""
    words = _words(text)
    if not words:
        return Completeness.NOTHING
    end = _without_closing(text)
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


def tells(text: str) -> bool:
    """Whether the last sentence says something of somebody, rather than asks for something."""
    end = _without_closing(text)
    if end.endswith("?"):
        return False
    last = _last_sentence(end)
    sentence = list(itertools.dropwhile(OPENERS.__contains__, _words(last)))
    if len(sentence) < _SHORTEST_STORY:
        return False
    if sentence[0] in SUBORDINATORS and "," in last:  # "If you ask me, it was ..."
        sentence = _words(last.split(",", 1)[1]) or sentence
    if sentence[0] not in SUBJECTS:
        return False
    return not WISHES.intersection(sentence[:4])


def _without_closing(text: str) -> str:
    """Up to the last sentence's own mark: quotes and brackets are closed behind it."""
    return text.rstrip("\"'\u201d)] ")


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
    for i, word in reversed(list(enumerate(words))):
        if not _is_item(word) or (word == "november" and num_items and _is_number(words[i + 1])):
            break
        num_items += sum(map(str.isdigit, word)) if word[0].isdigit() else 1
    if num_items == 0:
        return False
    before = " ".join(words[-8:])
    if any(lead in before for lead in LEAD_INS):
        return True
    if len(words) >= 2 and all(len(word) == 1 or word in SINGLE_DIGITS for word in words):
        return True  # "0 1": dictated
    # "Set an alarm for 7.", "What is 37.67 minus 75.7?" are sentences; "4, 1, 5." is not.
    return num_items >= 3 if not end.endswith("?") else num_items == len(words) >= 3


def _is_item(word: str) -> bool:
    return _is_number(word) or len(word) == 1 or word in ALPHABET_WORDS


def _is_number(word: str) -> bool:
    return word in NUMBER_WORDS or (word[0].isdigit() and not re.search(r"[a-z]", word))


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
