"""Words with their times as lines to be shown, in the two usual files: SubRip and WebVTT."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from audio.asr import WordTime

# A line ends with its sentence, at a pause, or when it is as long as two rows of a screen hold; a
# long one at a comma, if its end is near.
_PAUSE_S = 0.8
_MAX_CHARS = 84
_COMMA_CHARS = 56
_ENDS = (".", "?", "!", "。", "？", "！")
_COMMAS = (",", ";", ":", "、", "，", "；")
_TITLES = frozenset(("mr.", "mrs.", "ms.", "dr.", "st."))
_CLOSERS = "\"'”’)]»」』"


@dataclass(frozen=True, slots=True)
class Line:
    """Consecutive words."""

    words: tuple[WordTime, ...]
    joint: str = " "

    @property
    def text(self) -> str:
        """As it is shown."""
        return self.joint.join(word.word for word in self.words)

    @property
    def start_s(self) -> float:
        """When its first word begins."""
        return self.words[0].start_s

    @property
    def end_s(self) -> float:
        """When its last word ends."""
        return self.words[-1].end_s

    @property
    def tokens(self) -> list[int]:
        """The recogniser's, of all its words."""
        return [token for word in self.words for token in word.tokens]


def lines_of(words: Sequence[WordTime], *, joint: str = " ") -> list[Line]:
    """``words``, none left out, in lines; ``joint`` stands between two words."""
    lines: list[Line] = []
    line: list[WordTime] = []
    num_chars = 0
    for word in words:
        is_behind_pause = line and word.start_s - line[-1].end_s >= _PAUSE_S
        is_too_long = line and num_chars + len(joint) + len(word.word) > _MAX_CHARS
        if is_behind_pause or is_too_long:
            lines.append(Line(tuple(line), joint))
            line, num_chars = [], 0
        num_chars += len(word.word) + (len(joint) if line else 0)
        line.append(word)
        bare = word.word.rstrip(_CLOSERS)
        is_end = bare.endswith(_ENDS) and bare.lower() not in _TITLES
        if is_end or (num_chars >= _COMMA_CHARS and bare.endswith(_COMMAS)):
            lines.append(Line(tuple(line), joint))
            line, num_chars = [], 0
    if line:
        lines.append(Line(tuple(line), joint))
    return lines


def to_srt(lines: Iterable[Line]) -> str:
    """A SubRip file."""
    return "".join(
        f"{number}\n{_clock(line.start_s, ',')} --> {_clock(line.end_s, ',')}\n{line.text}\n\n"
        for number, line in enumerate(lines, 1)
    )


def to_vtt(lines: Iterable[Line]) -> str:
    """A WebVTT file (W3C): its text has no markup, so that what would begin some is escaped."""
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
