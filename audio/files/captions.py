"""Captions from word timestamps, as SubRip and WebVTT files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from audio.asr import WordTime

# A line ends with a sentence, at a pause, or at the length of two rows of a screen; a long line
# also ends at a comma.
_PAUSE_S = 0.8
_MAX_CHARS = 84
_COMMA_CHARS = 56
_ENDS = (".", "?", "!", "。", "？", "！")
_COMMAS = (",", ";", ":", "、", "，", "；")
_TITLES = frozenset(("mr.", "mrs.", "ms.", "dr.", "st."))
_CLOSERS = "\"'”’)]»」』"


@dataclass(frozen=True, slots=True)
class CaptionLine:
    """Consecutive words of one caption."""

    words: tuple[WordTime, ...]
    joint: str = " "

    @property
    def text(self) -> str:
        """Displayed text."""
        return self.joint.join(word.word for word in self.words)

    @property
    def start_s(self) -> float:
        """Start of the first word."""
        return self.words[0].start_s

    @property
    def end_s(self) -> float:
        """End of the last word."""
        return self.words[-1].end_s

    @property
    def tokens(self) -> list[int]:
        """Token ids of the words."""
        return [token for word in self.words for token in word.tokens]


def split_into_lines(words: Sequence[WordTime], *, joint: str = " ") -> list[CaptionLine]:
    """Split ``words`` into lines; ``joint`` separates the words of a line."""
    lines: list[CaptionLine] = []
    line: list[WordTime] = []
    num_chars = 0
    for word in words:
        is_after_pause = line and word.start_s - line[-1].end_s >= _PAUSE_S
        is_too_long = line and num_chars + len(joint) + len(word.word) > _MAX_CHARS
        if is_after_pause or is_too_long:
            lines.append(CaptionLine(tuple(line), joint))
            line, num_chars = [], 0
        num_chars += len(word.word) + (len(joint) if line else 0)
        line.append(word)
        bare = word.word.rstrip(_CLOSERS)
        is_end = bare.endswith(_ENDS) and bare.lower() not in _TITLES
        if is_end or (num_chars >= _COMMA_CHARS and bare.endswith(_COMMAS)):
            lines.append(CaptionLine(tuple(line), joint))
            line, num_chars = [], 0
    if line:
        lines.append(CaptionLine(tuple(line), joint))
    return lines


def to_srt(lines: Iterable[CaptionLine]) -> str:
    """Render a SubRip file."""
    return "".join(
        f"{number}\n{_clock(line.start_s, ',')} --> {_clock(line.end_s, ',')}\n{line.text}\n\n"
        for number, line in enumerate(lines, 1)
    )


def to_vtt(lines: Iterable[CaptionLine]) -> str:
    """Render a WebVTT file (W3C), with markup characters escaped."""
    return "WEBVTT\n\n" + "".join(
        f"{_clock(line.start_s, '.')} --> {_clock(line.end_s, '.')}\n{_escaped(line.text)}\n\n"
        for line in lines
    )


def _clock(second: float, separator: str) -> str:
    total_ms = round(second * 1000)
    minutes, ms = divmod(total_ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{ms // 1000:02}{separator}{ms % 1000:03}"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
