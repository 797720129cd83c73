"""When each word of a transcript was said.

Whisper's decoder listens to the sound of the token that it writes. A path through where it listened
gives each token a time (faster-whisper's ``find_alignment``, by dynamic time warping). Marks are
tokens of their own and are given the silence behind a word, so a word ends before its mark; what is
left of silence at a word's edges, as before the first one, is found by the voice detector.

With tiny.en it takes 7 % of the time that the transcript took; beginnings are off by 30 to 50 ms,
ends by 30 to 100 ms, the more so inside a sentence (bench/speech/word_times.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from audio.asr.segmentation import AudioSegment
from audio.frame import SPEECH_RATE, Samples
from audio.vad import WINDOW_SAMPLES

UNSPACED = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Languages that are written without spaces: each of the tokenizer's units counts as a word."""
_WINDOW_S = WINDOW_SAMPLES / SPEECH_RATE
_VOICED = 0.35
# The detector lets go late, and begins late, the more so with an "s" or an "f".
_LEAD_WINDOWS = 1
# Inside a word nobody is silent for so long: stops close the mouth for 0.1 s.
_PAUSE_WINDOWS = 6


@dataclass(frozen=True, slots=True)
class EncoderOutput:
    """What the encoder made of a piece; ``num_frames`` of 10 ms are real, the rest is padding."""

    outputs: Any
    num_frames: int


@dataclass(frozen=True, slots=True)
class HeardPart:
    """A piece of the audio and what was said in it. ``sound`` None: it was not kept."""

    piece: AudioSegment
    text: str
    language: str
    sound: EncoderOutput | None


@dataclass(frozen=True, slots=True)
class Span:
    """Some tokens, their text, and the seconds of the piece in which they were heard."""

    text: str
    start_s: float
    end_s: float
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WordTime:
    """A word with its marks, and from when to when it was said: seconds of the audio."""

    word: str
    start_s: float
    end_s: float
    tokens: tuple[int, ...] = ()


def words_in(part: HeardPart, spans: Sequence[Span]) -> list[WordTime]:
    """The words of ``part``, in order and inside it, one for each word of its text.

    ``spans`` follow one another; joined they are its text, but for white space at the ends.
    """
    split = _units if part.language in UNSPACED else _between_spaces
    found = [_within_voice(word, part.piece.probabilities) for word in split(spans)]
    offset_s = part.piece.start_sample / SPEECH_RATE
    return list(_in_order(found, part.piece.duration_s, offset_s))


def _between_spaces(spans: Sequence[Span]) -> Iterable[WordTime]:
    text = "".join(span.text for span in spans)
    owner = [index for index, span in enumerate(spans) for _ in span.text]
    is_taken = [False] * len(spans)
    at = 0
    for word in text.split():
        at = text.index(word, at)
        parts = sorted(set(owner[at : at + len(word)]))
        # Tokens that hold the end of one word and the beginning of the next are told once.
        new = [index for index in parts if not is_taken[index]]
        for index in new:
            is_taken[index] = True
        tokens = tuple(token for index in new for token in spans[index].tokens)
        yield _joined(word, [spans[index] for index in parts], tokens)
        at += len(word)


def _units(spans: Sequence[Span]) -> Iterable[WordTime]:
    group: list[Span] = []
    for span in spans:
        if _sounds(span) and any(map(_sounds, group)):
            yield _joined("".join(s.text for s in group).strip(), group)
            group = []
        group.append(span)
    if any(span.text.strip() for span in group):
        yield _joined("".join(s.text for s in group).strip(), group)


def _joined(word: str, parts: Sequence[Span], tokens: tuple[int, ...] | None = None) -> WordTime:
    heard = [part for part in parts if _sounds(part)] or parts
    if tokens is None:
        tokens = tuple(token for part in parts for token in part.tokens)
    return WordTime(word, heard[0].start_s, heard[-1].end_s, tokens)


def _sounds(span: Span) -> bool:
    return any(char.isalnum() for char in span.text)


def _within_voice(word: WordTime, probabilities: Samples) -> WordTime:
    """Without the silence at its ends, nor what lies beyond a pause; as it is without any voice."""
    first = int(word.start_s / _WINDOW_S)
    last = int(np.ceil(word.end_s / _WINDOW_S))
    voiced = np.flatnonzero(probabilities[first:last] >= _VOICED) + first
    if not voiced.size:
        return word
    begins = [int(voiced[0])]
    ends = []
    for before, after in pairwise(voiced.tolist()):
        if after - before > _PAUSE_WINDOWS:
            ends.append(before)
            begins.append(after)
    ends.append(int(voiced[-1]))
    # Of two the longer one is the word, and of equal ones the later: a word is heard when it ends.
    begin, end = max(zip(begins, ends, strict=True), key=lambda run: (run[1] - run[0], run[0]))
    return replace(
        word,
        start_s=max(word.start_s, (begin - _LEAD_WINDOWS) * _WINDOW_S),
        end_s=min(word.end_s, (end + 1) * _WINDOW_S),
    )


def _in_order(words: Iterable[WordTime], duration_s: float, offset_s: float) -> Iterable[WordTime]:
    """None begins before the one before it has ended, none ends behind the piece."""
    at_s = 0.0
    for word in words:
        start_s = min(max(at_s, word.start_s), duration_s)
        at_s = min(max(start_s, word.end_s), duration_s)
        yield replace(word, start_s=offset_s + start_s, end_s=offset_s + at_s)
