"""Semantic endpointing: the silence that ends a turn, given the transcript and acoustic features.

People leave 200 ms between turns and pause for up to a second inside a sentence, so no fixed delay
serves both. After a complete sentence a short delay is enough; after "to", "and", a filler or in
the middle of a number it must be longer.

Logistic regression combines all features into one probability. The strongest single feature costs
nothing: the punctuation that the speech recogniser expects after the last word. The recogniser has
heard the intonation and knows the words, and distinguishes a full stop from a comma and from the
middle of a phrase.

In declarative utterances, sentence-final intonation often does not end the turn; in requests it
does. The acoustic end-of-turn score therefore weighs less when the transcript is declarative.

English only. Pure functions.
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
    """Syntactic completeness of the words before a pause."""

    QUESTION = "question"
    """A complete question."""
    SENTENCE = "sentence"
    """A complete sentence, or an answer that can stand alone."""
    OPEN = "open"
    """Could end here or continue."""
    COUNTING = "counting"
    """In the middle of digits, spelling or a list."""
    TRAILING = "trailing"
    """Cannot end here: the last words need a continuation."""
    NOTHING = "nothing"
    """No words: noise, or speech that was not understood."""


FINISHED = (Completeness.QUESTION, Completeness.SENTENCE)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Features known at a pause; None where a feature is not available.

    ``text``: transcript of the turn so far. ``prosody``: of the last speech before the pause.
    ``end_logprob``: the language model's natural log-probability that the text ends here (a full
    stop, question or exclamation mark, or the end of the message, after the text without its own
    last mark). ``smart_turn_probability``: from an acoustic end-of-turn model. ``punctuation``:
    what the recogniser expects after the last word. ``end_of_turn_logit``: from the linear probe on
    the recogniser's encoder (`audio.asr.turn_end_probe`).
    """

    text: str
    prosody: Prosody | None = None
    end_logprob: float | None = None
    smart_turn_probability: float | None = None
    punctuation: PunctuationLogprobs | None = None
    end_of_turn_logit: float | None = None


@dataclass(frozen=True, slots=True)
class EndpointingDelays:
    """Silence in ms that ends a turn, from the speech offset on, and the probabilities that choose.

    ``min_ms`` applies from an end-of-turn probability of ``confident_from`` on, ``likely_ms`` from
    ``likely_from`` on, ``max_ms`` below. ``trailing_ms``: minimum after words that cannot end a
    turn, unless the acoustic probe finds the end likely. ``counting_ms``: minimum inside numbers
    and spelling. ``no_words_ms``: where nothing was understood. ``no_transcript_ms``: until the
    transcript is known.
    """

    min_ms: int
    likely_ms: int
    max_ms: int
    confident_from: float
    likely_from: float
    trailing_ms: int
    counting_ms: int
    no_words_ms: int
    no_transcript_ms: int


# Chosen on the curve in docs/turn-end.svg (bench/endpointing/curve.py).
ENDPOINTING_DELAYS: dict[Eagerness, EndpointingDelays] = {
    "high": EndpointingDelays(200, 400, 700, 0.6, 0.4, 800, 900, 480, 1_000),
    "medium": EndpointingDelays(300, 660, 1_000, 0.85, 0.5, 1_100, 1_200, 640, 1_500),
    "low": EndpointingDelays(480, 1_200, 2_000, 0.85, 0.6, 2_500, 2_500, 1_000, 4_000),
}
ENDPOINTING_DELAYS["auto"] = ENDPOINTING_DELAYS["medium"]

_MIN_LOGPROB = -6.0
_MIN_PUNCTUATION_PROB = 1e-3
_MIN_SMART_TURN_PROB = 5e-3
# The probe's logit is clipped here: above it the probe's confidence means nothing.
_MAX_LOGIT = 2.0
# Text and prosody alone are wrong too often to be trusted at the usual probability.
_CONFIDENT_WITHOUT_MODELS = 0.9
# Shorter declarative utterances are usually answers: "My name is John."
_MIN_DECLARATIVE_WORDS = 5


# In place of a missing prosody: the mean over the recordings.
_MEAN_PROSODY = Prosody((-12.0, -8.0, -8.0), -0.1, -0.1, 0.15, 0.6)


def endpointing_delay_ms(evidence: Evidence, eagerness: Eagerness = "auto") -> int:
    """Silence in ms that ends the turn, given ``evidence``."""
    delays = ENDPOINTING_DELAYS[eagerness]
    if classify_completeness(evidence.text) is Completeness.NOTHING:
        return delays.no_words_ms
    model_features = (
        evidence.end_logprob,
        evidence.smart_turn_probability,
        evidence.punctuation,
        evidence.end_of_turn_logit,
    )
    if all(feature is None for feature in model_features):
        confident_from = max(delays.confident_from, _CONFIDENT_WITHOUT_MODELS)
        delays = replace(delays, confident_from=confident_from)
    has_probe = evidence.end_of_turn_logit is not None
    probability = end_of_turn_probability(evidence)
    return choose_delay_ms(probability, evidence.text, delays, has_probe=has_probe)


def choose_delay_ms(
    probability: float, text: str, delays: EndpointingDelays, *, has_probe: bool
) -> int:
    """Silence in ms that ends a turn of ``text`` with this end-of-turn ``probability``.

    ``has_probe``: the probability includes the acoustic probe, which may overrule words that
    usually cannot end a turn.
    """
    completeness = classify_completeness(text)
    if probability >= delays.confident_from:
        delay = delays.min_ms
    elif probability >= delays.likely_from:
        delay = delays.likely_ms
    else:
        delay = delays.max_ms
    if completeness is Completeness.COUNTING:
        return max(delay, delays.counting_ms)
    if completeness is Completeness.TRAILING:
        is_likely = has_probe and probability >= delays.likely_from
        return max(delay, delays.likely_ms if is_likely else delays.trailing_ms)
    return delay


def end_of_turn_probability(evidence: Evidence) -> float:
    """Probability in (0, 1) that the turn is over: logistic regression over what is known."""
    logprob, punctuation = evidence.end_logprob, evidence.punctuation
    logit, smart_turn = evidence.end_of_turn_logit, evidence.smart_turn_probability
    features = [
        *text_features(evidence.text),
        *prosody_features(evidence.prosody or _MEAN_PROSODY),
    ]
    if logprob is not None:
        features.append(logprob_feature(logprob))
    if punctuation is not None:
        features += punctuation_features(punctuation)
    if logit is not None:
        features += probe_features(logit, evidence.text, logprob)
    if smart_turn is not None:
        features.append(smart_turn_feature(smart_turn))
    known = (
        logprob is not None,
        punctuation is not None,
        logit is not None,
        smart_turn is not None,
    )
    bias, weights = WEIGHTS[known]
    total = bias + sum(w * feature for w, feature in zip(weights, features, strict=True))
    return 1.0 / (1.0 + math.exp(-total))


def text_features(text: str) -> tuple[float, ...]:
    """Completeness one-hot (question, sentence, counting, trailing), then declarative or not."""
    kind = classify_completeness(text)
    return (
        float(kind is Completeness.QUESTION),
        float(kind is Completeness.SENTENCE),
        float(kind is Completeness.COUNTING),
        float(kind is Completeness.TRAILING),
        float(is_declarative(text)),
    )


def prosody_features(prosody: Prosody) -> tuple[float, ...]:
    """Levels, pitch and length of the last sound."""
    pitch = (prosody.pitch_drop, prosody.pitch_slope)
    return (*prosody.levels_db, *pitch, prosody.last_run_s, prosody.pitched_share)


def logprob_feature(end_logprob: float) -> float:
    """The language model's log-probability of an end, with a floor at e**-6."""
    return max(end_logprob, _MIN_LOGPROB)


def punctuation_features(punctuation: PunctuationLogprobs) -> tuple[float, ...]:
    """Log-odds of sentence-final punctuation, then single log-probabilities; floor 1e-3."""
    ends = (
        math.exp(punctuation.period)
        + math.exp(punctuation.question)
        + math.exp(punctuation.exclamation)
    )
    odds = math.log(ends + _MIN_PUNCTUATION_PROB) - math.log(
        max(0.0, 1.0 - ends) + _MIN_PUNCTUATION_PROB
    )
    single = (
        punctuation.question,
        punctuation.comma,
        punctuation.ellipsis,
        punctuation.nothing,
    )
    return (odds, *(math.log(math.exp(value) + _MIN_PUNCTUATION_PROB) for value in single))


def probe_features(
    end_of_turn_logit: float, text: str, end_logprob: float | None
) -> tuple[float, ...]:
    """The probe's logit, its interaction with declarative text, and, where the language model's
    log-probability is known, with that."""
    logit = min(end_of_turn_logit, _MAX_LOGIT)
    features = (logit, logit * is_declarative(text))
    return features if end_logprob is None else (*features, logit * logprob_feature(end_logprob))


def smart_turn_feature(probability: float) -> float:
    """Log-odds of the acoustic model's probability, with a floor of half a percent."""
    return math.log(probability + _MIN_SMART_TURN_PROB) - math.log(
        1.0 - probability + _MIN_SMART_TURN_PROB
    )


def classify_completeness(text: str) -> Completeness:
    """Syntactic completeness of the transcript of a turn so far."""
    words = _words(text)
    if not words:
        return Completeness.NOTHING
    end = _without_closing(text)
    is_question = end.endswith("?")
    if _is_trailing(words, end, is_question=is_question):
        return Completeness.TRAILING
    if _is_counting(words, end):
        return Completeness.COUNTING
    if is_question:
        return Completeness.QUESTION
    if " ".join(words) in WHOLE_ANSWERS:
        return Completeness.SENTENCE
    sentence = _words(_last_sentence(end))
    if not end.endswith((".", "!")) or _lacks_something(sentence, end):
        return Completeness.OPEN
    return Completeness.SENTENCE


def is_declarative(text: str) -> bool:
    """True when the last sentence is a statement of at least five words, not a request."""
    end = _without_closing(text)
    if end.endswith("?"):
        return False
    last = _last_sentence(end)
    sentence = list(itertools.dropwhile(OPENERS.__contains__, _words(last)))
    if len(sentence) < _MIN_DECLARATIVE_WORDS:
        return False
    if sentence[0] in SUBORDINATORS and "," in last:  # "If you ask me, it was ..."
        sentence = _words(last.split(",", 1)[1]) or sentence
    if sentence[0] not in SUBJECTS:
        return False
    return not WISHES.intersection(sentence[:4])


def _without_closing(text: str) -> str:
    """Strip quotes and brackets after the last punctuation mark."""
    return text.rstrip("\"'\u201d)] ")


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+(?:['.\-][^\W_]+)*", text.lower().replace("\u2019", "'"))


def _last_sentence(end: str) -> str:
    return re.split(r"(?<=[.!?])\s+", end)[-1]


def _is_trailing(words: list[str], end: str, *, is_question: bool) -> bool:
    """True when the transcript breaks off, or ends in a word that cannot end a sentence."""
    if end.endswith(("-", "\u2013", "\u2014", "...", "\u2026", ",", ":", ";")):
        return True
    last = words[-1]
    if last in FILLERS and len(words) > 1:
        return not is_question
    if last in FILLERS and end[-1:] not in "?":
        return True
    if any(_ends_with(words, phrase) for phrase in TRAILING_PHRASES):
        return True
    request = [word for word in _words(_last_sentence(end)) if word not in POLITE_WORDS]
    if len(request) == 1 and request[0] in REQUEST_VERBS and not is_question:  # "Please name"
        return True
    if last not in TRAILING_WORDS:
        return False
    if is_question:
        return last not in MAY_END_QUESTION
    return not (end.endswith((".", "!")) and last in MAY_END_STATEMENT)


def _is_counting(words: list[str], end: str) -> bool:
    """True when digits, letters or alphabet words at the end look like dictation."""
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
    """True for an incomplete sentence: the recogniser sets a full stop at every long pause."""
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
