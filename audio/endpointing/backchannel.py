"""Classify words spoken over a reply: barge-in, backchannel, or an echo of the reply."""

from __future__ import annotations

from audio.asr import words_of
from audio.text import word_set

_BACKCHANNELS = word_set(
    "mhm mm mmm mmhm mmhmm hm hmm hmmm uh huh um ah aha oh ooh wow yeah yes yep yup ya ok okay "
    "right sure exactly true indeed nice great good cool fine really gotcha alright absolutely "
    "totally definitely interesting i see of course got it all"
)
# Words of the phrases below that carry meaning of their own outside of them.
_ONLY_IN_PHRASES = word_set("i see of course got it all")
_PHRASES = ("i see", "of course", "got it", "all right", "i got it", "oh i see", "uh huh")
_MAX_WORDS = 4
_MIN_ECHO_WORDS = 2
_ECHO_SHARE = 0.75


def is_barge_in(text: str, reply: str) -> bool:
    """True when ``text``, heard while ``reply`` was playing, should interrupt it."""
    return not (is_backchannel(text) or is_echo_of(text, reply))


def is_backchannel(text: str) -> bool:
    """True when ``text`` only acknowledges ("mhm", "I see"), or has no words at all."""
    words = words_of(text)
    if len(words) > _MAX_WORDS or not all(word in _BACKCHANNELS for word in words):
        return not words
    rest = f" {' '.join(words)} "
    for phrase in _PHRASES:
        rest = rest.replace(f" {phrase} ", " ")
    return not any(word in _ONLY_IN_PHRASES for word in rest.split())


def is_echo_of(text: str, reply: str) -> bool:
    """True when ``text`` repeats ``reply``: our own voice, picked up by the caller's microphone.

    At least three in four of its words (and two at least) occur in the order of the reply, within a
    span of the reply of at most twice as many words.
    """
    words, said = words_of(text), words_of(reply)
    if len(words) < _MIN_ECHO_WORDS:
        return False
    for begin in [i for i, word in enumerate(said) if word in words[:2]]:
        window, at, num_found = said[begin : begin + 2 * len(words)], 0, 0
        for word in words:
            if word in window[at:]:
                at += window[at:].index(word) + 1
                num_found += 1
        if num_found >= max(_MIN_ECHO_WORDS, _ECHO_SHARE * len(words)):
            return True
    return False
