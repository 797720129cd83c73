"""Samples the next token from a row of logits.

The random number of a token depends only on its request's seed and its position, never on the rest
of the batch or on the number of steps: equal logits give equal text.

Order of processing: penalties, logit bias, banned tokens, grammar mask, temperature, top-k, top-p
(of the tokens that top-k keeps), min-p. All steps work on as few tokens as possible: of a typical
row of 49k logits only a few hundred are near enough to the best to be sampled at all. With block
maxima (``ForwardResult.block_maxima``) most blocks are not even read: same comparisons, same
tokens, in a tenth of the time.

This is the reference: ``NativeSampler`` and the GPU kernels are tested against it.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kernels.philox import uniform
from llm_core.batch import MAXIMA_BLOCK
from llm_core.errors import LlmError
from llm_core.messages import SamplingParams

FloatRow = npt.NDArray[np.float32]
BoolRow = npt.NDArray[np.bool_]
IdRow = npt.NDArray[np.int64]

_GREEDY_BELOW = 1e-5  # lower temperatures are greedy in float32
# Distances from the best scaled logit (natural log) within which top-p is tried first.
_NUCLEUS_DEPTHS = (4.0, 16.0)
# Tokens more than ln(vocabulary) plus this below the best have a joint probability below 2^-20,
# less than the rounding error of the sum of the others in float32. They are never sampled.
TAIL_DEPTH = 14.0
_MAX_CANDIDATES = 24_576  # above this, selecting candidates costs more than it saves
_TOP_K_DEPTH = 8.0
_ROUNDING = 0.01  # margin of the coarse cut before the exact comparison
_NUM_SORTED = 2048
_NUM_BINS = 1024
_SUM_BLOCK = 256

_NEVER = np.float32(-np.inf)
_LOWEST = float(np.finfo(np.float32).min)
_BLOCK_OFFSETS = np.arange(MAXIMA_BLOCK)


class SamplerBackend(Protocol):
    """A faster implementation of ``sample_row`` for rows without banned tokens or mask."""

    def sample(self, row: FloatRow, block_maxima: FloatRow, state: SamplerState, u: float) -> int:
        """The token for logits float32 [vocab] and their ``block_maxima``, sampled with the uniform
        random number ``u``; -1 if the logits are unusable. ``row`` may be modified during the call
        and is restored."""


class ChunkRow(NamedTuple):
    """Either logits float32 [vocab], with their ``block_maxima`` (see ``batch.ForwardResult``) and
    sampler backend if there are any; or the token that was already sampled on the device, -1 if the
    logits were unusable."""

    logits: FloatRow | None = None
    block_maxima: FloatRow | None = None
    token_id: int | None = None
    sampler: SamplerBackend | None = None


class SamplerState:
    """Sampling state of one request: its seed, and token counts for penalties."""

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], *, vocab_size: int
    ) -> None:
        """``params`` must be valid, and every id in ``logit_bias`` below ``vocab_size``."""
        self.params = params
        seed = secrets.randbits(64) if params.seed is None else params.seed
        self.seed = seed & 0xFFFF_FFFF_FFFF_FFFF
        self.reply_counts: TokenCounts | None = None
        self.repetition_counts: TokenCounts | None = None
        if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
            self.reply_counts = TokenCounts()
        if params.repetition_penalty != 1.0:
            self.repetition_counts = TokenCounts(prompt_ids)
        self.bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self.biases = np.array(list(params.logit_bias.values()), dtype=np.float32)

    @property
    def is_greedy(self) -> bool:
        """Is the most likely token always taken?"""
        return self.params.temperature < _GREEDY_BELOW or self.params.top_k == 1

    @property
    def is_plain(self) -> bool:
        """Are there neither penalties nor biases?"""
        return (
            self.repetition_counts is None and self.reply_counts is None and not len(self.bias_ids)
        )

    def observe(self, token_id: int) -> None:
        """Counts a generated token."""
        if self.reply_counts is not None:
            self.reply_counts.add(token_id)
        if self.repetition_counts is not None:
            self.repetition_counts.add(token_id)

    def apply_penalties(self, row: FloatRow) -> FloatRow:
        """``row`` float32 [vocab] with penalties and biases; the same array if there are none.

        The repetition penalty (CTRL) counts prompt and reply, the frequency and presence penalties
        (OpenAI) only the reply.
        """
        if self.is_plain:
            return row
        row = row.copy()
        if self.repetition_counts is not None:
            ids = self.repetition_counts.ids
            values, factor = row[ids], np.float32(self.params.repetition_penalty)
            row[ids] = np.where(values > 0, values / factor, values * factor)
        if self.reply_counts is not None:
            row[self.reply_counts.ids] -= self.reply_counts.counts * np.float32(
                self.params.frequency_penalty
            ) + np.float32(self.params.presence_penalty)
        row[self.bias_ids] += self.biases
        return row


class TokenCounts:
    """Token counts in sparse form: few tokens of a vocabulary occur in a conversation."""

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        ids, counts = np.unique(np.asarray(token_ids, dtype=np.int64), return_counts=True)
        self._index = {int(token_id): at for at, token_id in enumerate(ids)}
        self._set_arrays(ids, counts.astype(np.float32))

    def __len__(self) -> int:
        return len(self._index)

    @property
    def ids(self) -> IdRow:
        """Distinct tokens, int64 [n], unordered."""
        return self._ids[: len(self)]

    @property
    def counts(self) -> FloatRow:
        """Counts of ``ids``, float32 [n]."""
        return self._counts[: len(self)]

    def add(self, token_id: int) -> None:
        """Increments the count of a token."""
        at = self._index.get(token_id)
        if at is None:
            at = self._index[token_id] = len(self._index)
            if at == len(self._ids):
                grown = max(64, 2 * at)
                self._set_arrays(np.resize(self._ids, grown), np.resize(self._counts, grown))
            self._ids[at], self._counts[at] = token_id, 0.0
        self._counts[at] += 1.0

    def _set_arrays(self, ids: IdRow, counts: FloatRow) -> None:
        self._ids, self._counts = ids, counts
        # Cached, as asking an array for its address takes as long as sampling a token.
        self.ids_address: int = ids.ctypes.data
        self.counts_address: int = counts.ctypes.data


def sample_row(
    row: FloatRow,
    state: SamplerState,
    position: int,
    *,
    banned: Collection[int] = (),
    allowed: BoolRow | None = None,
    block_maxima: FloatRow | None = None,
    backend: SamplerBackend | None = None,
) -> int:
    """The token at ``position`` (its index in the sequence) from logits float32 [vocab].

    ``banned`` ids are never sampled; ``allowed`` bool [vocab] is the mask of a grammar.
    ``block_maxima`` (``ForwardResult.block_maxima`` of the row) and ``backend`` only save time.
    Raises LlmError if the logits are unusable.
    """
    is_masked = bool(banned) or allowed is not None
    is_argmax = state.is_greedy and state.is_plain  # block maxima alone answer that
    if backend and block_maxima is not None and not (is_masked or is_argmax):
        u = 0.0 if state.is_greedy else uniform(state.seed, position)
        token_id = backend.sample(row, block_maxima, state, u)
        if token_id < 0:
            raise LlmError(f"the model produced unusable logits (best value {row.max()})")
        return token_id
    # A mask could hide a NaN.
    is_usable = not is_masked or not math.isnan(row.max())
    processed = _masked(state.apply_penalties(row), banned, allowed)
    if processed is not row:
        row, block_maxima = processed, None
    best = _argmax(row, block_maxima)
    # argmax stops at the first NaN, so this check finds NaN anywhere, +inf, and all -inf.
    if not is_usable or not math.isfinite(row[best]):
        raise LlmError(f"the model produced unusable logits (best value {row[best]})")
    if state.is_greedy:
        return best
    return sample_token(row, state.params, uniform(state.seed, position), best, block_maxima)


def _argmax(row: FloatRow, block_maxima: FloatRow | None) -> int:
    """Index of the largest logit: the first of equal ones, or the first NaN."""
    if block_maxima is None:
        return int(row.argmax())
    first = int(block_maxima.argmax()) * MAXIMA_BLOCK
    return first + int(row[first : first + MAXIMA_BLOCK].argmax())


def sample_token(
    row: FloatRow,
    params: SamplingParams,
    u: float,
    best: int | None = None,
    block_maxima: FloatRow | None = None,
) -> int:
    """The token at which the running sum of probabilities, in the order of token ids, passes ``u``
    in [0, 1).

    ``row``: logits float32 [vocab] after penalties and masks; ``best``: index of its maximum;
    ``block_maxima``: as in ``sample_row``, only for an unprocessed row. The order of ids makes
    drafting with the same ``u`` effective: a similar distribution mostly samples the same token.
    """
    best = int(row.argmax()) if best is None else best
    ids, weights = candidates(row, float(row[best]), params, block_maxima)
    if ids is None:
        return _index_at(weights, u)
    if params.top_k > 0 or params.top_p < 1.0:  # otherwise already ordered
        order = np.argsort(ids)
        ids, weights = ids[order], weights[order]
    return int(ids[_index_at(weights, u)])


def _masked(row: FloatRow, banned: Collection[int], allowed: BoolRow | None) -> FloatRow:
    if allowed is not None:
        ids = np.flatnonzero(allowed)
        kept = np.full_like(row, _NEVER)
        kept[ids] = row[ids]
        row = kept
    if banned:
        row = row.copy()
        row[list(banned)] = _NEVER
    return row


def candidates(
    row: FloatRow, best: float, params: SamplingParams, block_maxima: FloatRow | None = None
) -> tuple[IdRow | None, FloatRow]:
    """Tokens that may be sampled and their weights (unnormalised probabilities).

    ``row``: float32 [vocab]; ``best``: its maximum; ``block_maxima``: as in ``sample_token``.
    Returns (ids int64 [n], weights float32 [n]); ids are ascending unless top-k or top-p applies,
    and None stands for the whole vocabulary in order. Of equal logits at the threshold of top-k or
    top-p, the smaller ids are kept.
    """
    ids = _near(row, best, params, block_maxima)
    # Subtracting the best first: a tiny temperature cannot overflow.
    scaled = (row if ids is None else row[ids]) - np.float32(best)
    scaled *= np.float32(1.0 / params.temperature)
    if 0 < params.top_k < len(row):
        kept = _top_k(scaled, min(params.top_k, len(scaled)))
        ids = kept if ids is None else ids[kept]
        scaled = scaled[kept]
    weights: FloatRow = np.exp(scaled)
    if params.top_p < 1.0:
        kept = _nucleus(scaled, weights, params.top_p)
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
    if params.min_p > 0.0:
        # The best token has weight 1.
        strong = np.flatnonzero(weights >= np.float32(params.min_p))
        ids = strong if ids is None else ids[strong]
        weights = weights[strong]
    return ids, weights


def _near(
    row: FloatRow, best: float, params: SamplingParams, block_maxima: FloatRow | None = None
) -> IdRow | None:
    """Ids of all candidates in order; None if there are more than _MAX_CANDIDATES."""
    depth = math.log(len(row)) + TAIL_DEPTH
    if params.top_p == 1.0 and params.min_p > 0.0:
        depth = min(depth, _ROUNDING - math.log(params.min_p))
    if block_maxima is not None:
        blocks = np.flatnonzero(block_maxima >= _floor(best, depth, params))
        if len(blocks) * MAXIMA_BLOCK <= _MAX_CANDIDATES:
            return _near_in_blocks(row, best, params, depth, blocks)
    is_near = row >= _floor(best, depth, params)
    if 0 < params.top_k < len(row):
        is_closer = row >= _floor(best, _TOP_K_DEPTH, params)
        if np.count_nonzero(is_closer) >= params.top_k:
            is_near &= is_closer
    return np.flatnonzero(is_near) if np.count_nonzero(is_near) <= _MAX_CANDIDATES else None


def _near_in_blocks(
    row: FloatRow, best: float, params: SamplingParams, depth: float, blocks: IdRow
) -> IdRow:
    """``_near`` if all tokens within ``depth`` lie in the given ``blocks`` of MAXIMA_BLOCK."""
    ids = (blocks[:, None] * MAXIMA_BLOCK + _BLOCK_OFFSETS).ravel()
    if ids[-1] >= len(row):
        ids = ids[: np.searchsorted(ids, len(row))]
    values = row[ids]
    kept = np.flatnonzero(values >= _floor(best, depth, params))
    if 0 < params.top_k < len(row):
        closer = np.flatnonzero(values >= _floor(best, _TOP_K_DEPTH, params))
        if params.top_k <= len(closer) < len(kept):
            kept = closer
    return ids[kept]


def _floor(best: float, depth: float, params: SamplingParams) -> np.float32:
    return np.float32(max(best - depth * params.temperature, _LOWEST))


def _top_k(scaled: FloatRow, k: int) -> IdRow:
    """The k largest in descending order; of equal ones, those with the smaller ids."""
    kth = np.partition(scaled, len(scaled) - k)[len(scaled) - k]
    return _descending(scaled, np.flatnonzero(scaled >= kth))[:k]


def _nucleus(scaled: FloatRow, weights: FloatRow, top_p: float) -> IdRow:
    """The smallest set of best tokens whose share of the total weight reaches ``top_p``.

    Sorting 49k logits takes milliseconds. The nucleus usually is a handful of tokens near the best,
    so only those are sorted; a broad one is found by a histogram, of which one bin is sorted.
    """
    needed = top_p * float(weights.sum())
    for depth in _NUCLEUS_DEPTHS:
        near = np.flatnonzero(scaled >= -depth)
        if float(weights[near].sum()) >= needed:
            break
    else:
        near = np.flatnonzero(weights > 0.0)
    if len(near) <= _NUM_SORTED:
        return _take_descending(scaled, weights, near, needed)
    depths = -scaled[near]
    deepest = max(float(depths.max()), 1e-6)  # they may all be 0
    bins = (depths * np.float32((_NUM_BINS - 1) / deepest)).astype(np.int64)
    sums = np.cumsum(np.bincount(bins, weights=weights[near], minlength=_NUM_BINS))
    last = min(int(np.searchsorted(sums, needed, side="left")), _NUM_BINS - 1)
    before = float(sums[last - 1]) if last else 0.0
    edge = _take_descending(scaled, weights, near[bins == last], needed - before)
    return np.concatenate((near[bins < last], edge))


def _take_descending(scaled: FloatRow, weights: FloatRow, ids: IdRow, needed: float) -> IdRow:
    ids = _descending(scaled, ids)
    sums = np.cumsum(weights[ids], dtype=np.float64)
    return ids[: int(np.searchsorted(sums, needed, side="left")) + 1]


def _index_at(weights: FloatRow, u: float) -> int:
    """The index at which the running sum of ``weights`` passes ``u`` of their total.

    By blocks first: a running sum over a whole vocabulary takes most of a millisecond.
    """
    starts = np.arange(0, len(weights), _SUM_BLOCK)
    block_sums = np.cumsum(np.add.reduceat(weights, starts), dtype=np.float64)
    point = u * float(block_sums[-1])
    block = min(int(np.searchsorted(block_sums, point, side="right")), len(starts) - 1)
    before = float(block_sums[block - 1]) if block else 0.0
    start = block * _SUM_BLOCK
    sums = np.cumsum(weights[start : start + _SUM_BLOCK], dtype=np.float64)
    at = int(np.searchsorted(sums, point - before, side="right"))
    if at == len(sums):  # by rounding: the last one with any weight
        at = int(np.flatnonzero(weights[start : start + _SUM_BLOCK])[-1])
    return start + at


def _descending(values: FloatRow, ids: npt.NDArray[Any]) -> IdRow:
    return ids[np.argsort(-values[ids], kind="stable")]
