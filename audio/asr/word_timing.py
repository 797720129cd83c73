"""Word timestamps from Whisper's cross-attention.

Dynamic time warping over the cross-attention weights gives each token a time (faster-whisper's
``find_alignment``). Punctuation marks are tokens of their own and absorb the silence after a word,
so a word ends before its mark; VAD windows remove the rest of the silence at a word's edges.

With tiny.en alignment takes 7 % of the time of the transcription; starts are off by 30 to 50 ms,
ends by 30 to 100 ms, more inside a sentence (bench/speech/word_times.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from audio.asr.segmentation import AudioSegment
from audio.frame import SPEECH_RATE
from audio.vad import WINDOW_SAMPLES, VadWindows

UNSPACED = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Languages written without spaces: each unit of the tokenizer counts as a word."""
_WINDOW_S = WINDOW_SAMPLES / SPEECH_RATE
_VOICED_FROM = 0.35
# The VAD starts and ends late, most of all at an "s" or an "f".
_LEAD_WINDOWS = 1
# No silence inside a word is as long: plosives close the mouth for 0.1 s.
_PAUSE_WINDOWS = 6


@dataclass(frozen=True, slots=True)
class EncoderOutput:
    """Encoder outputs of a segment; ``num_frames`` of 10 ms are audio, the rest is padding."""

    outputs: Any
    num_frames: int


@dataclass(frozen=True, slots=True)
class TranscribedSegment:
    """A segment of audio and its text. ``encoder_output`` None: it was not kept."""

    segment: AudioSegment
    text: str
    language: str
    encoder_output: EncoderOutput | None


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens, their text, and their start and end in seconds of the segment."""

    text: str
    start_s: float
    end_s: float
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WordTime:
    """A word with its punctuation; start and end in seconds of the audio."""

    word: str
    start_s: float
    end_s: float
    tokens: tuple[int, ...] = ()


def words_of_segment(transcribed: TranscribedSegment, spans: Sequence[TokenSpan]) -> list[WordTime]:
    """Word timestamps of a segment, in order, one for each word of its text.

    ``spans`` are consecutive; joined they give the text, except for white space at the ends.
    """
    split = _split_unspaced if transcribed.language in UNSPACED else _split_at_spaces
    found = [_clip_to_speech(word, transcribed.segment.windows) for word in split(spans)]
    offset_s = transcribed.segment.start_sample / SPEECH_RATE
    return list(_in_order(found, transcribed.segment.duration_s, offset_s))


def _split_at_spaces(spans: Sequence[TokenSpan]) -> Iterable[WordTime]:
    text = "".join(span.text for span in spans)
    owner = [index for index, span in enumerate(spans) for _ in span.text]
    is_taken = [False] * len(spans)
    at = 0
    for word in text.split():
        at = text.index(word, at)
        parts = sorted(set(owner[at : at + len(word)]))
        # A token that spans two words is assigned to the first.
        new = [index for index in parts if not is_taken[index]]
        for index in new:
            is_taken[index] = True
        tokens = tuple(token for index in new for token in spans[index].tokens)
        yield _joined(word, [spans[index] for index in parts], tokens)
        at += len(word)


def _split_unspaced(spans: Sequence[TokenSpan]) -> Iterable[WordTime]:
    group: list[TokenSpan] = []
    for span in spans:
        if _is_spoken(span) and any(map(_is_spoken, group)):
            yield _joined("".join(s.text for s in group).strip(), group)
            group = []
        group.append(span)
    if any(span.text.strip() for span in group):
        yield _joined("".join(s.text for s in group).strip(), group)


def _joined(
    word: str, parts: Sequence[TokenSpan], tokens: tuple[int, ...] | None = None
) -> WordTime:
    heard = [part for part in parts if _is_spoken(part)] or parts
    if tokens is None:
        tokens = tuple(token for part in parts for token in part.tokens)
    return WordTime(word, heard[0].start_s, heard[-1].end_s, tokens)


def _is_spoken(span: TokenSpan) -> bool:
    return any(char.isalnum() for char in span.text)


def _clip_to_speech(word: WordTime, windows: VadWindows) -> WordTime:
    """Remove silence at the ends, and what lies beyond a pause; unchanged without any speech."""
    lead_s = windows.lead / SPEECH_RATE
    first = int((word.start_s + lead_s) / _WINDOW_S)
    last = int(np.ceil((word.end_s + lead_s) / _WINDOW_S))
    voiced = np.flatnonzero(windows.probabilities[first:last] >= _VOICED_FROM) + first
    if not voiced.size:
        return word
    begins = [int(voiced[0])]
    ends = []
    for before, after in pairwise(voiced.tolist()):
        if after - before > _PAUSE_WINDOWS:
            ends.append(before)
            begins.append(after)
    ends.append(int(voiced[-1]))
    # The longest run is the word; of equal ones the last.
    begin, end = max(zip(begins, ends, strict=True), key=lambda run: (run[1] - run[0], run[0]))
    return replace(
        word,
        start_s=max(word.start_s, (begin - _LEAD_WINDOWS) * _WINDOW_S - lead_s),
        end_s=min(word.end_s, (end + 1) * _WINDOW_S - lead_s),
    )


def _in_order(words: Iterable[WordTime], duration_s: float, offset_s: float) -> Iterable[WordTime]:
    """Clip words to the segment and to the end of the word before."""
    at_s = 0.0
    for word in words:
        start_s = min(max(at_s, word.start_s), duration_s)
        at_s = min(max(start_s, word.end_s), duration_s)
        yield replace(word, start_s=offset_s + start_s, end_s=offset_s + at_s)
