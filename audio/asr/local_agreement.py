"""LocalAgreement-2: the words of a partial transcript that two consecutive hypotheses agree on.

Each hypothesis covers more of the turn than the one before and may revise its own end (Machacek,
Dabre, Bojar, "Turning Whisper into Real-Time Transcription System", 2023). Stable words are never
taken back. Hypotheses with a repetition loop are ignored, so that a loop cannot become stable, and
stable text is not fed back to the recogniser as a prompt.
"""

from __future__ import annotations

import re

from audio.asr.hallucination_filter import has_loop, words_of

_WORD = re.compile(r"\S+")


class LocalAgreement:
    """The stable prefix of one turn's transcript."""

    def __init__(self) -> None:
        self.stable = ""
        """Stable words, without punctuation after the last one."""
        self._last: list[str] = []

    def add_hypothesis(self, text: str) -> str:
        """Add the next hypothesis; returns the words that have become stable, "" for none."""
        if has_loop(text):
            return ""
        words = _WORD.findall(text)
        keys = [" ".join(words_of(word)) for word in words]
        num_agreed = 0
        for key, last in zip(keys, self._last, strict=False):
            if key != last:
                break
            num_agreed += 1
        self._last = keys
        num_stable = len(_WORD.findall(self.stable))
        # The last word may be cut off, even if two hypotheses agree on it.
        num_agreed = min(num_agreed, len(words) - 1)
        if num_agreed <= num_stable:
            return ""
        if text_after(self.stable, text) is None:
            return ""  # it contradicts the stable words
        new = " ".join(words[num_stable:num_agreed]).rstrip(".,;:!?\u2026-")
        if not new:
            return ""
        added = f" {new}" if self.stable else new
        self.stable += added
        return added


def text_after(stable: str, text: str) -> str | None:
    """The part of ``text`` after the words ``stable``; None when it does not begin with them.

    Case and punctuation are ignored.
    """
    position = 0
    for word in _WORD.findall(stable):
        match = _WORD.search(text, position)
        if match is None or words_of(match[0]) != words_of(word):
            return None
        position = match.end()
        trailing = re.search(r"[^\w]*$", match[0])
        rest_at = position - (len(trailing[0]) if trailing else 0)
    return text[rest_at:] if stable else text
