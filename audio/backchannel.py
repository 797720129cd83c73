"""Words said while somebody else speaks: "go on" or "let me speak"?"""

from __future__ import annotations

from audio.asr_guard import words_of
from audio.word_set import word_set

_BACKCHANNELS = word_set(
    "mhm mm mmm mmhm mmhmm hm hmm hmmm uh huh um ah aha oh ooh wow yeah yes yep yup ya ok okay "
    "right sure exactly true indeed nice great good cool fine really gotcha alright absolutely "
    "totally definitely interesting i see of course got it all"
)
# Single words above that make a phrase, but say something alone or in other company.
_ONLY_IN_PHRASES = word_set("i see of course got it all")
_PHRASES = ("i see", "of course", "got it", "all right", "i got it", "oh i see", "uh huh")
_MAX_WORDS = 4


def is_backchannel(text: str) -> bool:
    """Whether ``text`` only shows that somebody listens; True also for no words at all."""
    words = words_of(text)
    if len(words) > _MAX_WORDS or not all(word in _BACKCHANNELS for word in words):
        return not words
    rest = f" {' '.join(words)} "
    for phrase in _PHRASES:
        rest = rest.replace(f" {phrase} ", " ")
    return not any(word in _ONLY_IN_PHRASES for word in rest.split())
