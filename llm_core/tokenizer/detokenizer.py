"""Tokens to text while they come: whole characters only, and nothing of a stop string.

A character may be spread over several tokens, and so may a stop string. What could still become
either is held back until the next token decides::

    bytes  [decoded                ][unfinished character]
    text   [given out][could be the beginning of a stop string]
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class Detokenizer:
    """The text of one generation. The result does not depend on how the bytes were cut.

    ``decoded_len`` counts the characters known so far, ``given_len`` those given out.
    """

    def __init__(self, token_bytes: Sequence[bytes], stop: Sequence[str] = ()) -> None:
        """``token_bytes[id]``: what each token adds to the text. ``stop``: non-empty strings."""
        self._token_bytes = token_bytes
        self._stop = tuple(stop)
        # Holds the bytes of an unfinished character; gives U+FFFD for bytes that cannot be one.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped = False
        self.decoded_len = 0
        self.given_len = 0

    def feed(self, token_id: int, *, may_stop: bool = True) -> str:
        """The text that is certain after this token. Sets ``stopped`` at a stop string; its text
        and all that follows is dropped. With ``may_stop`` False stop strings are text like any."""
        if self.stopped:
            return ""
        text = self._decoder.decode(self._token_bytes[token_id])
        self.decoded_len += len(text)
        if self._stop and may_stop:
            text = self._cut(self._held + text)
        self.given_len += len(text)
        return text

    def flush(self) -> str:
        """The text held back, when the generation ends without a stop string.

        Bytes of an unfinished character are dropped: the reply was cut inside it.
        """
        held, self._held = self._held, ""
        self._decoder.reset()
        text = "" if self.stopped else held
        self.given_len += len(text)
        return text

    def _cut(self, text: str) -> str:
        # The stop string that is complete first wins; of two that end together, the longer.
        found = [(at + len(s), at) for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)[1]]
        held_len = max(_overlap(text, s) for s in self._stop)
        self._held = text[len(text) - held_len :]
        return text[: len(text) - held_len]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest beginning of ``stop``, not all of it, that ``text`` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
