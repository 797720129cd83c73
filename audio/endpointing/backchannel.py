"""Words said while somebody else speaks: "go on" or "let me speak"?"""

from __future__ import annotations

from audio.asr import words_of
from audio.text import word_set

_BACKCHANNELS = word_set(
    "mhm mm mmm mmhm mmhmm hm hmm hmmm uh huh um ah aha oh ooh wow yeah yes yep yup ya ok okay "
    "right sure exactly true indeed nice great good cool fine really gotcha alright absolutely "
    "totally definitely interesting i see of course got it all"
)
# Single words above that make a phrase, but say something alone or in other company.
_ONLY_IN_PHRASES = word_set("i see of course got it all")
_PHRASES = ("i see", "of course", "got it", "all right", "i got it", "oh i see", "uh huh")
_MAX_WORDS = 4
_MIN_ECHO_WORDS = 2
_ECHO_SHARE = 0.75


def means_to_stop(text: str, reply: str) -> bool:
    """Whether ``text``, heard while ``reply`` was spoken, is meant to stop it."""
    return not (is_backchannel(text) or is_repeated(text, reply))


def is_backchannel(text: str) -> bool:
    """Whether ``text`` only shows that somebody listens; True also for no words at all."""
    words = words_of(text)
    if len(words) > _MAX_WORDS or not all(word in _BACKCHANNELS for word in words):
        return not words
    rest = f" {' '.join(words)} "
    for phrase in _PHRASES:
        rest = rest.replace(f" {phrase} ", " ")
    return not any(word in _ONLY_IN_PHRASES for word in rest.split())


def is_repeated(text: str, reply: str) -> bool:
    """Whether ``text`` is what ``reply`` says: our own voice, heard in the caller's microphone.

    Three of four of its words, two at least, in the order of the reply, with no more than twice as
    many words of the reply from the first to the last.
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
