"""Which words of a transcript in the making will stay: those that two runs in a row agree on.

Each run hears more of the turn than the one before and may change its mind about the end of what it
heard (LocalAgreement-2: Machacek, Dabre, Bojar, "Turning Whisper into Real-Time Transcription
System", 2023). What is given out is never taken back. A run that loops is not listened to, so that
a loop cannot be agreed upon; nothing agreed is fed back to the recogniser as a prompt.
"""

from __future__ import annotations

import re

from audio.asr.hallucination_filter import has_loop, words_of

_WORD = re.compile(r"\S+")


class Agreement:
    """The stable beginning of one turn's words."""

    def __init__(self) -> None:
        self.stable = ""
        """Words that will stay, without the punctuation behind the last one."""
        self._last: list[str] = []

    def feed(self, text: str) -> str:
        """Take the next run's text; returns the words that have become stable, "" for none."""
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
        # The last word of a run may be half a word, however often it is heard so.
        num_agreed = min(num_agreed, len(words) - 1)
        if num_agreed <= num_stable:
            return ""
        if rest_after(self.stable, text) is None:
            return ""  # it has changed its mind about what was given out
        new = " ".join(words[num_stable:num_agreed]).rstrip(".,;:!?\u2026-")
        if not new:
            return ""
        added = f" {new}" if self.stable else new
        self.stable += added
        return added


def rest_after(stable: str, text: str) -> str | None:
    """What of ``text`` follows the words ``stable``; None when it does not begin with them.

    Case and punctuation do not count.
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
