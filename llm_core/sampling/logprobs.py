"""Log-probabilities of generated tokens, released together with their text.

Text is withheld while it may be the start of a stop string or part of a character, so a token is
sampled before its text is released, and some text is never released. Each token remembers where
its text starts, and is released with the first delta that goes beyond that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from llm_core.messages import Alternative, TokenLogprob
from llm_core.sampling.sampler import FloatRow


class LogprobTrack:
    """The tokens of one generation whose text is not yet released (at most what the detokenizer
    withholds: one stop string or one character)."""

    def __init__(self, token_bytes: Sequence[bytes], num_top: int) -> None:
        self._token_bytes = token_bytes
        self._num_top = num_top
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()

    def add(self, row: FloatRow, token_id: int, start: int) -> None:
        """Adds a sampled token, its logits float32 [vocab], and the text offset where it starts."""
        if self._token_bytes[token_id]:
            entry = token_logprob(row, token_id, self._num_top, self._token_bytes)
            self._waiting.append((start, entry))

    def take(self, given_len: int) -> tuple[TokenLogprob, ...]:
        """Removes and returns the tokens whose text starts before offset ``given_len``."""
        taken = []
        while self._waiting and self._waiting[0][0] < given_len:
            taken.append(self._waiting.popleft()[1])
        return tuple(taken)


def token_logprob(
    row: FloatRow, token_id: int, num_top: int, token_bytes: Sequence[bytes]
) -> TokenLogprob:
    """Log-probability of ``token_id`` and of the ``num_top`` best, by logits float32 [vocab]."""
    best = float(row.max())
    total = best + float(np.log(np.exp(row - np.float32(best)).sum(dtype=np.float64)))
    top: list[Alternative] = []
    if num_top:
        num_top = min(num_top, len(row))
        kth = np.partition(row, len(row) - num_top)[len(row) - num_top]
        ids = np.flatnonzero(row >= kth)
        for at in ids[np.argsort(-row[ids], kind="stable")][:num_top].tolist():
            top.append(Alternative(token_bytes[at], float(row[at]) - total))
    return TokenLogprob(token_bytes[token_id], float(row[token_id]) - total, tuple(top))
