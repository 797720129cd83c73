"""Which words of a reply have been heard: pure arithmetic on sample positions.

A reply is spoken clause by clause; each clause is a segment with the text that is displayed (not
the words that the voice was given) and the number of samples it lasts. Positions are samples from
the beginning of the reply, intervals are half open: a word whose sound is [start, end) has been
heard once ``end`` samples have been played.
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

# In letters of sound. A figure is read as a word or two ("7" seven, "20" twenty), a sign as a word.
_LETTERS_PER_DIGIT = 4.0
_LETTERS_PER_SIGN = 6.0
_LETTERS_PER_UNSPACED = 3.0
_LETTERS_PER_PAUSE = 2.0
_LETTERS_PER_WORD = 1.0


@dataclass(frozen=True)
class _Segment:
    text: str
    start: int  # characters before it
    word_ends: tuple[int, ...]  # characters into the text, white space behind the word included
    word_end_samples: tuple[int, ...]  # samples into the reply, one for each word


def speaking_weight(word: str) -> float:
    """How long ``word`` takes to say, in letters; 0 when nothing in it is said."""
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
    """Words with the white space behind them; scripts without spaces go letter by letter."""
    words: list[str] = []
    for match in _WORD.finditer(text):
        word = match[0]
        if not words and match.start():
            word = text[: match.start()] + word  # white space in front
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
    """The text and the audio of one reply, side by side.

    ``append`` adds a clause. ``heard_text`` gives the text whose audio lies wholly in [0, played);
    inside a clause the words share its samples in proportion to their letters, figures and pauses.
    Audio is never split over clauses, so the boundaries between clauses are exact.
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
        """Adds a clause that is displayed as ``text`` and lasts ``num_samples`` (may be 0).

        Raises ValueError for a negative length.
        """
        if num_samples < 0:
            raise ValueError(f"num_samples is {num_samples}; it cannot be negative")
        self._segments.append(_segment(text, self._num_chars, self._num_samples, num_samples))
        self._starts.append(self._num_samples)
        self._num_chars += len(text)
        self._num_samples += num_samples

    def resize_last(self, num_samples: int) -> None:
        """The clause that was added last lasts ``num_samples``, as is known better now.

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
        # The last segment that begins before the position; those before it are heard whole.
        index = bisect_right(self._starts, played_samples - 1) - 1
        segment = self._segments[index]
        num_words = bisect_right(segment.word_end_samples, played_samples)
        return segment.start + (segment.word_ends[num_words - 1] if num_words else 0)

    def heard_text(self, played_samples: int) -> str:
        """The text whose audio lies wholly in [0, ``played_samples``), to the word."""
        return self.text[: self.num_heard_chars(played_samples)]
