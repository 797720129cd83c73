"""Cuts a stream of text into clauses to speak, and re-exports the other two text stages.

The order on the way to the voice is SpokenText (no Markdown), ClauseChunker (clauses), normalize
(words instead of figures and signs).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from audio.text.clause_rules import (
    CLOSERS,
    Boundary,
    boundary_between,
    can_break_between,
    cjk_boundary,
    is_cjk_stop,
    is_soft_break,
    is_unspaced_letter,
    may_begin_clause,
)
from audio.text.markdown import SpokenText, strip_markdown
from audio.text.normalize.english import normalize

__all__ = [
    "DEFAULT_LIMITS",
    "ClauseChunker",
    "ClauseLimits",
    "SpokenText",
    "normalize",
    "strip_markdown",
]

_HAS_SPEECH = re.compile(r"[^\W_]")
_WORDS_PER_UNSPACED_LETTER = 0.5


@dataclass(frozen=True)
class ClauseLimits:
    """When a clause is long enough, in words.

    A clause ends at a sentence end once it has ``min_sentence_words``, at a comma, dash or the
    like once it has ``min_comma_words``, before a conjunction or preposition once it has
    ``min_soft_words``, and at ``max_words`` at the best place seen.
    """

    min_sentence_words: int
    min_comma_words: int
    min_soft_words: int
    max_words: int


# First audio waits for the first clause, so that one is short. Its sound (about 0.3 s a word)
# covers the making of the next, which may be longer; from the third on whole sentences sound best.
DEFAULT_LIMITS = (
    ClauseLimits(min_sentence_words=1, min_comma_words=1, min_soft_words=4, max_words=6),
    ClauseLimits(min_sentence_words=2, min_comma_words=4, min_soft_words=9, max_words=15),
    ClauseLimits(min_sentence_words=3, min_comma_words=14, min_soft_words=20, max_words=28),
)


class ClauseChunker:
    """Cuts a text that arrives in pieces into clauses that can be spoken one after the other.

    The clauses joined are exactly the text fed. White space goes with the clause before it, so a
    clause after the first begins with its first word; white space alone can only come out of
    ``flush``. Where the text is cut does not depend on how it was split over the calls.

    No cut falls inside a number, a sum of money, a time, an abbreviation, an e-mail address, a URL
    or a name with initials. ``limits`` are those of the first clause, the second, and so on; the
    last entry serves all that follow. ``max_chars`` bounds a clause whatever it holds.
    """

    def __init__(
        self, limits: tuple[ClauseLimits, ...] = DEFAULT_LIMITS, *, max_chars: int = 400
    ) -> None:
        if not limits or max_chars < 1:
            raise ValueError("limits must not be empty and max_chars must be positive")
        self._all_limits = limits
        self._max_chars = max_chars
        self._begin_text()

    def _begin_text(self) -> None:
        self._num_clauses = 0
        self._begin_clause(at_line_start=True)

    def _begin_clause(self, *, at_line_start: bool) -> None:
        self._limits = self._all_limits[min(self._num_clauses, len(self._all_limits) - 1)]
        self._text = ""
        self._word_start = 0  # of the word at hand
        self._word = ""  # the last complete word
        self._prev_word = ""  # the one before it
        self._in_word = False
        self._num_words = 0.0  # begun in this clause
        self._gap_has_newline = False
        self._word_at_line_start = at_line_start
        self._best_cut = 0  # where to cut for length, 0 for nowhere
        self._best_is_comma = False

    def feed(self, text: str) -> list[str]:
        """Adds ``text``; returns the clauses that are now complete, usually none or one."""
        clauses: list[str] = []
        queue, index = text, 0
        while index < len(queue):
            cut = self._add(queue[index])
            index += 1
            if cut:
                clause, rest = self._text[:cut], self._text[cut:]
                clauses.append(clause)
                self._num_clauses += 1
                self._begin_clause(at_line_start="\n" in clause[len(clause.rstrip()) :])
                queue, index = rest + queue[index:], 0
        return clauses

    def flush(self) -> list[str]:
        """Ends the text and returns what is left of it. The next ``feed`` begins a new text."""
        rest = [self._text] if self._text else []
        self._begin_text()
        return rest

    # --- one character ------------------------------------------------------------------------

    def _add(self, char: str) -> int:
        """Takes one character; the position where the clause ends now, or 0."""
        position = len(self._text)
        self._text += char
        if char.isspace():
            cut = self._end_word(position) if self._in_word else 0
            self._gap_has_newline |= char == "\n"
        elif self._in_word:
            cut = self._inside_word(char, position)
        else:
            cut = self._begin_word(char, position)
        if not cut and position >= self._max_chars:
            cut = self._best_cut or self._word_start or position
        return cut

    def _end_word(self, position: int) -> int:
        """A word is complete: it may open a phrase, and then the clause ends before it."""
        self._in_word = False
        self._prev_word, self._word = self._word, self._text[self._word_start : position]
        self._gap_has_newline = False
        if not self._prev_word or not is_soft_break(self._prev_word, self._word):
            return 0
        if self._num_words - 1 >= self._limits.min_soft_words:
            return self._word_start
        if not self._best_is_comma:
            self._best_cut = self._word_start
        return 0

    def _begin_word(self, char: str, position: int) -> int:
        cut = 0
        if self._word:
            boundary = boundary_between(
                self._word,
                self._prev_word,
                char,
                has_newline=self._gap_has_newline,
                at_line_start=self._word_at_line_start,
            )
            cut = self._judge(boundary, position) or self._cut_for_length(char, position)
            self._word_at_line_start = self._gap_has_newline
        self._word_start = position
        self._in_word = True
        self._num_words += 1
        return cut

    def _inside_word(self, char: str, position: int) -> int:
        """Text that needs no spaces: dashes between words, and scripts without spaces."""
        before = self._text[position - 1]
        if before == "—" and char not in CLOSERS and char != "—":
            self._num_words += 1
            return self._judge(Boundary.COMMA, position)
        if not is_unspaced_letter(char) and not is_unspaced_letter(before):
            stop = before if is_cjk_stop(before) else ""
        else:
            self._num_words += _WORDS_PER_UNSPACED_LETTER
            opener = self._text[:position].rstrip(CLOSERS)[-1:]
            stop = opener if opener and is_cjk_stop(opener) else ""
        if stop and may_begin_clause(char):
            return self._judge(cjk_boundary(stop), position)
        too_long = self._num_words >= self._limits.max_words and is_unspaced_letter(before)
        if too_long and is_unspaced_letter(char) and may_begin_clause(char):
            return position
        return 0

    def _judge(self, boundary: Boundary, position: int) -> int:
        if boundary is Boundary.NONE or not _HAS_SPEECH.search(self._text, 0, position):
            return 0
        limits = self._limits
        is_sentence = boundary is Boundary.SENTENCE
        needed = limits.min_sentence_words if is_sentence else limits.min_comma_words
        if self._num_words >= needed:
            return position
        self._best_cut, self._best_is_comma = position, True
        return 0

    def _cut_for_length(self, char: str, position: int) -> int:
        if self._num_words < self._limits.max_words:
            return 0
        if self._best_cut:
            return self._best_cut
        return position if can_break_between(self._word, char) else 0
