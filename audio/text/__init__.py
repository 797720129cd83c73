"""Text for speech: clauses, Markdown removal, normalisation."""

from audio.text.clause_rules import CLOSERS
from audio.text.clauses import DEFAULT_LIMITS, ClauseChunker, ClauseLimits
from audio.text.markdown import SpokenText
from audio.text.normalize.english import normalize
from audio.text.word_set import word_set

__all__ = [
    "CLOSERS",
    "ClauseChunker",
    "ClauseLimits",
    "DEFAULT_LIMITS",
    "SpokenText",
    "normalize",
    "word_set",
]
