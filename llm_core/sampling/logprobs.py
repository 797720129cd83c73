"""Log-probabilities of a reply's tokens, given out with the text that they make.

Text is held back while it may be the beginning of a stop string or half a character, so a token and
its text can come at different times, and a token may never be shown at all. Each token remembers
where its text begins, and comes with the delta that reaches beyond that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from llm_core.messages import Alternative, TokenLogprob
from llm_core.sampling.sampler import FloatRow


class LogprobTrack:
    """The tokens of one generation whose text is not given out yet (bounded by what a
    detokenizer holds back: one stop string or one character)."""

    def __init__(self, token_bytes: Sequence[bytes], num_top: int) -> None:
        self._token_bytes = token_bytes
        self._num_top = num_top
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()

    def add(self, row: FloatRow, token_id: int, start: int) -> None:
        """A chosen token, its logits float32 [vocab], and the character where its text begins."""
        if self._token_bytes[token_id]:
            entry = token_logprob(row, token_id, self._num_top, self._token_bytes)
            self._waiting.append((start, entry))

    def take(self, given_len: int) -> tuple[TokenLogprob, ...]:
        """Those whose text begins within the first ``given_len`` characters, in order, once."""
        taken = []
        while self._waiting and self._waiting[0][0] < given_len:
            taken.append(self._waiting.popleft()[1])
        return tuple(taken)


def token_logprob(
    row: FloatRow, token_id: int, num_top: int, token_bytes: Sequence[bytes]
) -> TokenLogprob:
    """What the distribution of logits float32 [vocab] says of ``token_id`` and of the best."""
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
