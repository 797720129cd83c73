"""Text position of a playout position: which words of a reply have been heard.

A reply is synthesized clause by clause. Each clause is a segment with its displayed text (not the
normalised text given to the voice) and its length in samples. Positions are samples from the start
of the reply; a word whose audio is [start, end) has been heard once ``end`` samples have played.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from math import ceil

_WORD = re.compile(r"\S+\s*")
_UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")
_LETTER = re.compile(r"[^\W\d_]")
_DIGIT = re.compile(r"\d")
_SPOKEN_SIGN = re.compile(r"[$£€¥%&@+=°]")
_PAUSE = re.compile(r"[.!?…]+|[,;:—]")

# Durations in letters. A digit is read as a word or two ("7" seven, "20" twenty), a sign as a word.
_LETTERS_PER_DIGIT = 4.0
_LETTERS_PER_SIGN = 6.0
_LETTERS_PER_UNSPACED = 3.0
_LETTERS_PER_PAUSE = 2.0
_LETTERS_PER_WORD = 1.0


@dataclass(frozen=True)
class _Segment:
    text: str
    start: int  # characters before it
    word_ends: tuple[int, ...]  # characters into the text, with the white space after the word
    word_end_samples: tuple[int, ...]  # samples into the reply, one for each word


def speaking_weight(word: str) -> float:
    """Estimated duration of ``word`` in letters; 0 for a word without sound."""
    num_unspaced = len(_UNSPACED.findall(word))
    num_letters = len(_LETTER.findall(word)) - num_unspaced
    weight = (
        max(num_letters, 0)
        + _LETTERS_PER_UNSPACED * num_unspaced
        + _LETTERS_PER_DIGIT * len(_DIGIT.findall(word))
        + _LETTERS_PER_SIGN * len(_SPOKEN_SIGN.findall(word))
    )
    if weight == 0:
        return 0.0
    return weight + _LETTERS_PER_WORD + _LETTERS_PER_PAUSE * len(_PAUSE.findall(word))


def _words(text: str) -> list[str]:
    """Words with the white space after them; single letters in scripts without spaces."""
    words: list[str] = []
    for match in _WORD.finditer(text):
        word = match[0]
        if not words and match.start():
            word = text[: match.start()] + word  # leading white space
        if _UNSPACED.search(word):
            words += [part for part in re.split(f"(?={_UNSPACED.pattern})", word) if part]
        else:
            words.append(word)
    return words if words or not text else [text]


def _segment(text: str, start_char: int, start_sample: int, num_samples: int) -> _Segment:
    words = _words(text)
    weights = [speaking_weight(word) for word in words]
    total = sum(weights)
    char_ends: list[int] = []
    sample_ends: list[int] = []
    num_chars, spoken = 0, 0.0
    for index, (word, weight) in enumerate(zip(words, weights, strict=True)):
        num_chars += len(word)
        spoken += weight
        is_last = index == len(words) - 1
        share = num_samples if is_last or not total else ceil(num_samples * (spoken / total))
        char_ends.append(num_chars)
        sample_ends.append(start_sample + min(share, num_samples))
    return _Segment(text, start_char, tuple(char_ends), tuple(sample_ends))


class PlayoutTimeline:
    """Alignment of the text and the audio of one reply.

    Inside a clause, words share its samples in proportion to their letters, digits and pauses.
    Boundaries between clauses are exact.
    """

    def __init__(self) -> None:
        self._segments: list[_Segment] = []
        self._starts: list[int] = []  # samples, one for each segment
        self._num_samples = 0
        self._num_chars = 0

    @property
    def total_samples(self) -> int:
        """Length of all audio."""
        return self._num_samples

    @property
    def text(self) -> str:
        """All text appended so far."""
        return "".join(segment.text for segment in self._segments)

    def append(self, text: str, num_samples: int) -> None:
        """Add a clause that is displayed as ``text`` and lasts ``num_samples`` (may be 0).

        Raises ValueError for a negative length.
        """
        if num_samples < 0:
            raise ValueError(f"num_samples is {num_samples}; it cannot be negative")
        self._segments.append(_segment(text, self._num_chars, self._num_samples, num_samples))
        self._starts.append(self._num_samples)
        self._num_chars += len(text)
        self._num_samples += num_samples

    def resize_last(self, num_samples: int) -> None:
        """Correct the length of the last clause to ``num_samples``.

        Raises ValueError for a negative length, and when there is no clause.
        """
        if not self._segments:
            raise ValueError("there is no clause yet")
        segment, start = self._segments.pop(), self._starts.pop()
        self._num_chars, self._num_samples = segment.start, start
        self.append(segment.text, num_samples)

    def num_heard_chars(self, played_samples: int) -> int:
        """Length of the text heard when ``played_samples`` have been played; 0 at 0."""
        if played_samples <= 0:
            return 0
        if played_samples >= self._num_samples:
            return self._num_chars
        # The last segment that begins before the position; those before it were heard in full.
        index = bisect_right(self._starts, played_samples - 1) - 1
        segment = self._segments[index]
        num_words = bisect_right(segment.word_end_samples, played_samples)
        return segment.start + (segment.word_ends[num_words - 1] if num_words else 0)

    def heard_text(self, played_samples: int) -> str:
        """The text whose audio lies wholly in [0, ``played_samples``), to the word."""
        return self.text[: self.num_heard_chars(played_samples)]
