"""The sampler in compiled code, in a third to a half of numpy's time.

It samples the same token as ``sampler.sample_row`` unless the running sum passes the random number
within the rounding of single precision, once in thousands.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from kernels.native import Library
from kernels.native import library as native
from llm_core.batch import MAXIMA_BLOCK
from llm_core.sampling.sampler import TAIL_DEPTH, FloatRow, SamplerState

_NUM_SCRATCH = 6  # rows of floats

assert native.TAIL_DEPTH == TAIL_DEPTH and native.MAXIMA_BLOCK == MAXIMA_BLOCK


class NativeSampler:
    """A ``SamplerBackend``, for one thread."""

    def __init__(self, library: Library, vocab_size: int) -> None:
        """``vocab_size``: length of all rows."""
        self._sample_token = library.functions.pn_sample_token
        self._vocab_size = vocab_size
        self._scratch = np.empty(_NUM_SCRATCH * (vocab_size + MAXIMA_BLOCK), dtype=np.float32)
        self._scratch_address = self._scratch.ctypes.data
        self._params: WeakKeyDictionary[SamplerState, native.SampleParams] = WeakKeyDictionary()

    def sample(self, row: FloatRow, block_maxima: FloatRow, state: SamplerState, u: float) -> int:
        """See ``SamplerBackend``."""
        assert row.flags.carray and block_maxima.flags.carray and len(row) == self._vocab_size
        assert len(block_maxima) == -(-len(row) // MAXIMA_BLOCK)
        params = self._params.get(state)
        if params is None:
            params = self._params[state] = _constant_params(state, self._vocab_size)
        params.u = u
        counts = state.repetition_counts
        if counts is not None:
            params.repeated_ids, params.num_repeated = counts.ids_address, len(counts)
        counts = state.reply_counts
        if counts is not None:
            params.reply_ids, params.reply_counts = counts.ids_address, counts.counts_address
            params.num_reply_ids = len(counts)
        token: int = self._sample_token(
            row.__array_interface__["data"][0],
            block_maxima.__array_interface__["data"][0],
            self._vocab_size,
            params,
            self._scratch_address,
        )
        return token


def _constant_params(state: SamplerState, vocab_size: int) -> native.SampleParams:
    """The parameters that are the same for all tokens of a request."""
    params = state.params
    return native.SampleParams(
        bias_ids=state.bias_ids.ctypes.data,
        biases=state.biases.ctypes.data,
        num_biases=len(state.bias_ids),
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        temperature=params.temperature,
        top_p=params.top_p,
        min_p=params.min_p,
        top_k=min(params.top_k, vocab_size),  # fits 32 bits
        is_greedy=state.is_greedy,
    )
