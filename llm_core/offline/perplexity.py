"""Perplexity: exp of the mean negative log-likelihood of a text's tokens.

The text is cut into windows that are evaluated independently; the first token of each is not
predicted. The figure therefore depends on the window length: compare only equal ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from llm_core.batch import ForwardBatch, Segment
from llm_core.errors import InvalidRequestError
from llm_core.model import ModelRunner

_CHUNK_LEN = 128  # tokens whose logits are in memory at once


@dataclass(frozen=True, slots=True)
class Likelihood:
    """``nll`` is in nats, summed over ``num_tokens`` tokens."""

    nll: float
    num_tokens: int

    @property
    def perplexity(self) -> float:
        """Infinite where the mean exceeds the range of exp."""
        mean = self.nll / self.num_tokens
        return math.exp(mean) if mean < 700 else math.inf


def windows_of(token_ids: list[int], window_len: int) -> torch.Tensor:
    """int64 [S, window_len]: the text in windows, without an incomplete one at the end.

    Raises InvalidRequestError when there is no complete window.
    """
    num_windows = len(token_ids) // window_len
    if num_windows == 0:
        raise InvalidRequestError(
            f"the text has {len(token_ids)} tokens, at least {window_len} (one window) are needed"
        )
    kept = token_ids[: num_windows * window_len]
    return torch.tensor(kept, dtype=torch.int64).view(num_windows, window_len)


def likelihood(
    runner: ModelRunner, windows: torch.Tensor, on_window: Callable[[int, int], None]
) -> Likelihood:
    """The likelihood of int64 windows [S, T], with T from 2 to ``runner.max_context``.

    ``on_window(done, total)`` is called after each.
    """
    num_windows, length = windows.shape
    nll = 0.0
    for index, ids in enumerate(windows):
        nll += sum(float(part.sum()) for part in surprisals(runner, ids))
        on_window(index + 1, num_windows)
    return Likelihood(nll, num_windows * (length - 1))


def surprisals(runner: ModelRunner, ids: torch.Tensor) -> Iterator[torch.Tensor]:
    """-ln p of each token of int64 ids [T] but the first, given all before it: float32 [T - 1] in
    chunks. T is at most ``runner.max_context``."""
    blocks = tuple(range(-(-len(ids) // runner.block_size)))
    for start in range(0, len(ids) - 1, _CHUNK_LEN):
        end = min(start + _CHUNK_LEN, len(ids) - 1)
        segment = Segment(blocks, start, end - start)
        batch = ForwardBatch(ids[start:end], (segment,), torch.arange(end - start))
        logits = runner.forward(batch).logits
        yield torch.nn.functional.cross_entropy(logits, ids[start + 1 : end + 1], reduction="none")
