"""Tokens drawn in compiled code, by the rule of ``sampler``, in a third to a half of numpy's time.

The same token is drawn but where the running sum passes the random number within the rounding of
single precision, once in thousands; all of a reply's tokens are drawn in one way.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from kernels.native import Library
from kernels.native import library as native
from llm_core.batch import MAXIMUM_LEN
from llm_core.sampling.sampler import FloatRow, SamplerState

_NUM_SCRATCH = 6  # rows of numbers


class NativeSampler:
    """See ``sampler.TokenDrawer``. For one thread."""

    def __init__(self, library: Library, vocab_size: int) -> None:
        """``vocab_size``: of all rows that will be drawn from."""
        self._draw_token = library.functions.pn_draw_token
        self._vocab_size = vocab_size
        self._scratch = np.empty(_NUM_SCRATCH * (vocab_size + MAXIMUM_LEN), dtype=np.float32)
        self._scratch_address = self._scratch.ctypes.data
        self._draws: WeakKeyDictionary[SamplerState, native.Draw] = WeakKeyDictionary()

    def draw(self, row: FloatRow, maxima: FloatRow, state: SamplerState, fraction: float) -> int:
        """See ``sampler.TokenDrawer``."""
        assert row.flags.carray and maxima.flags.carray and len(row) == self._vocab_size
        assert len(maxima) == -(-len(row) // MAXIMUM_LEN)
        draw = self._draws.get(state)
        if draw is None:
            draw = self._draws[state] = _draw_of(state, self._vocab_size)
        draw.fraction = fraction
        if state.seen is not None:
            draw.seen, draw.num_seen = state.seen.ids_address, len(state.seen)
        if state.counted is not None:
            draw.counted, draw.counts = state.counted.ids_address, state.counted.counts_address
            draw.num_counted = len(state.counted)
        address, pieces = row.__array_interface__["data"][0], maxima.__array_interface__["data"][0]
        token: int = self._draw_token(
            address, pieces, self._vocab_size, draw, self._scratch_address
        )
        return token


def _draw_of(state: SamplerState, vocab_size: int) -> native.Draw:
    """What stays the same for all of a request's tokens."""
    params = state.params
    return native.Draw(
        biased=state.bias_ids.ctypes.data,
        biases=state.biases.ctypes.data,
        num_biased=len(state.bias_ids),
        repetition=params.repetition_penalty,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
        temperature=params.temperature,
        top_p=params.top_p,
        min_p=params.min_p,
        top_k=min(params.top_k, vocab_size),  # of 32 bits, and more is none
        is_greedy=state.is_greedy,
    )
