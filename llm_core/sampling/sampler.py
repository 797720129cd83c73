"""Chooses the next token from a row of logits.

The random number of a token depends only on its request's seed and its position, never on what
else is in the batch or on how many steps were made: equal logits give equal text.

Order of processing: penalties, logit bias, bans, guide, temperature, top-k, top-p (of what top-k
left), min-p. All is done on as few tokens as possible: of a real row of 49k logits a few hundred
lie near enough to the best to be drawn at all. Where the model noted the largest of each 64 logits
(``maxima``), the others are not even read: same comparisons, same tokens, in a tenth of the time.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from llm_core.batch import MAXIMUM_LEN
from llm_core.errors import LlmError
from llm_core.messages import SamplingParams

FloatRow = npt.NDArray[np.float32]
BoolRow = npt.NDArray[np.bool_]
IdRow = npt.NDArray[np.int64]

_GREEDY_BELOW = 1e-5  # smaller temperatures leave nothing to chance in float32
# Distances from the best scaled logit (natural log) within which the nucleus is looked for.
_NUCLEUS_DEPTHS = (4.0, 16.0)
# All tokens that lie deeper than ln(vocabulary) plus this have, together, a share below 2^-20:
# less than float32 loses in the sum of the others. They are never drawn.
_NEAR_DEPTH = 14.0
_NUM_NEAR = 24_576  # of more than this, picking them out costs more than it saves
_TOP_K_DEPTH = 8.0
_ROUNDING = 0.01  # what lies this near to an edge is left for the exact comparison
_NUM_SORTED = 2048
_NUM_BINS = 1024
_BLOCK_LEN = 256

_WORD = 0xFFFF_FFFF
_NEVER = np.float32(-np.inf)
_LOWEST = float(np.finfo(np.float32).min)
_IN_PIECE = np.arange(MAXIMUM_LEN)


class TokenDrawer(Protocol):
    """Chooses tokens as ``sample_row`` does, sooner."""

    def draw(self, row: FloatRow, maxima: FloatRow, state: SamplerState, fraction: float) -> int:
        """The token for logits float32 [vocab], which are written to meanwhile and as they were
        afterwards, with their ``maxima``; nothing is banned or masked. ``fraction`` is the random
        number. -1: the logits are unusable."""


class ChunkRow(NamedTuple):
    """A row's logits float32 [vocab] with their ``maxima`` (see ``batch.ForwardResult``) if these
    were noted, and who draws from them sooner; or the token that was chosen where the logits are;
    -1: they were unusable."""

    logits: FloatRow | None = None
    maxima: FloatRow | None = None
    token_id: int | None = None
    drawer: TokenDrawer | None = None


class SamplerState:
    """What choosing a request's tokens needs to remember: its seed, and counts for penalties."""

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], *, vocab_size: int
    ) -> None:
        """``params`` are validated; every id in ``logit_bias`` is below ``vocab_size``."""
        self.params = params
        seed = secrets.randbits(64) if params.seed is None else params.seed
        self.seed = seed & 0xFFFF_FFFF_FFFF_FFFF
        self.counted: TokenCounts | None = None
        self.seen: TokenCounts | None = None
        if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
            self.counted = TokenCounts()
        if params.repetition_penalty != 1.0:
            self.seen = TokenCounts(prompt_ids)
        self.bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self.biases = np.array(list(params.logit_bias.values()), dtype=np.float32)

    @property
    def is_greedy(self) -> bool:
        """The likeliest token is taken, nothing is drawn."""
        return self.params.temperature < _GREEDY_BELOW or self.params.top_k == 1

    @property
    def is_plain(self) -> bool:
        """Logits are used as the model gave them: without penalties and biases."""
        return self.seen is None and self.counted is None and not len(self.bias_ids)

    def observe(self, token_id: int) -> None:
        """Counts a generated token."""
        if self.counted is not None:
            self.counted.add(token_id)
        if self.seen is not None:
            self.seen.add(token_id)

    def penalise(self, row: FloatRow) -> FloatRow:
        """``row`` float32 [vocab] with penalties and biases; the same array when there are none.

        Repetition (CTRL) counts prompt and reply, frequency and presence (OpenAI) the reply alone.
        """
        if self.is_plain:
            return row
        row = row.copy()
        if self.seen is not None:
            ids = self.seen.ids
            values, factor = row[ids], np.float32(self.params.repetition_penalty)
            row[ids] = np.where(values > 0, values / factor, values * factor)
        if self.counted is not None:
            row[self.counted.ids] -= self.counted.counts * np.float32(
                self.params.frequency_penalty
            ) + np.float32(self.params.presence_penalty)
        row[self.bias_ids] += self.biases
        return row


class TokenCounts:
    """How often each token occurred. Small and quick to read: few tokens of a vocabulary occur."""

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        ids, counts = np.unique(np.asarray(token_ids, dtype=np.int64), return_counts=True)
        self._index = {int(token_id): at for at, token_id in enumerate(ids)}
        self._keep(ids, counts.astype(np.float32))

    def __len__(self) -> int:
        return len(self._index)

    @property
    def ids(self) -> IdRow:
        """Tokens that occurred, int64 [n], in no order."""
        return self._ids[: len(self)]

    @property
    def counts(self) -> FloatRow:
        """Of ``ids``."""
        return self._counts[: len(self)]

    def add(self, token_id: int) -> None:
        """Counts one more."""
        at = self._index.get(token_id)
        if at is None:
            at = self._index[token_id] = len(self._index)
            if at == len(self._ids):
                grown = max(64, 2 * at)
                self._keep(np.resize(self._ids, grown), np.resize(self._counts, grown))
            self._ids[at], self._counts[at] = token_id, 0.0
        self._counts[at] += 1.0

    def _keep(self, ids: IdRow, counts: FloatRow) -> None:
        self._ids, self._counts = ids, counts
        # Asking arrays for their address takes as long as drawing a token by it.
        self.ids_address: int = ids.ctypes.data
        self.counts_address: int = counts.ctypes.data


def sample_row(
    row: FloatRow,
    state: SamplerState,
    position: int,
    *,
    banned: Collection[int] = (),
    allowed: BoolRow | None = None,
    maxima: FloatRow | None = None,
    drawer: TokenDrawer | None = None,
) -> int:
    """The token at ``position`` (its index in the sequence) from logits float32 [vocab].

    ``banned`` ids are never chosen; ``allowed`` (bool [vocab]) is the mask of a guide; ``maxima``
    are ``ForwardResult.maxima`` of ``row``, and ``drawer`` draws with their help: they change
    nothing but the time. Raises LlmError when the model produced no usable logits.
    """
    is_quick = state.is_greedy and state.is_plain  # then there is only one look at the maxima
    if drawer and maxima is not None and not (banned or allowed is not None or is_quick):
        fraction = 0.0 if state.is_greedy else uniform(state.seed, position)
        token_id = drawer.draw(row, maxima, state, fraction)
        if token_id < 0:
            raise LlmError(f"the model produced unusable logits (best value {row.max()})")
        return token_id
    # A mask could hide a NaN.
    is_usable = not (banned or allowed is not None) or not math.isnan(row.max())
    processed = _masked(state.penalise(row), banned, allowed)
    if processed is not row:
        row, maxima = processed, None
    best = _best(row, maxima)
    # argmax stops at the first NaN, so this one look finds NaN anywhere, +inf, and all -inf.
    if not is_usable or not math.isfinite(row[best]):
        raise LlmError(f"the model produced unusable logits (best value {row[best]})")
    if state.is_greedy:
        return best
    return draw_token(row, state.params, uniform(state.seed, position), best, maxima)


def _best(row: FloatRow, maxima: FloatRow | None) -> int:
    """Where the largest logit is: the first of equals, or the first NaN."""
    if maxima is None:
        return int(row.argmax())
    first = int(maxima.argmax()) * MAXIMUM_LEN
    return first + int(row[first : first + MAXIMUM_LEN].argmax())


def draw_token(
    row: FloatRow,
    params: SamplingParams,
    fraction: float,
    best: int | None = None,
    maxima: FloatRow | None = None,
) -> int:
    """The token at which the running sum of the probabilities, in the order of token ids, passes
    ``fraction`` in [0, 1). ``row``: processed logits float32 [vocab]; ``best``: its largest place;
    ``maxima``: as in ``sample_row``, if nothing was processed.

    The order matters to whoever guesses: a distribution that is near to this one draws the same
    token by the same fraction, mostly.
    """
    best = int(row.argmax()) if best is None else best
    ids, weights = candidates(row, float(row[best]), params, maxima)
    if ids is None:
        return _draw(weights, fraction)
    if params.top_k > 0 or params.top_p < 1.0:  # else they are in order
        order = np.argsort(ids)
        ids, weights = ids[order], weights[order]
    return int(ids[_draw(weights, fraction)])


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
    row: FloatRow, best: float, params: SamplingParams, maxima: FloatRow | None = None
) -> tuple[IdRow | None, FloatRow]:
    """Tokens that may be drawn and their weights (probabilities but for a common factor).

    ``row``: float32 [vocab], ``best``: its maximum, ``maxima``: as in ``draw_token``. Returns (ids
    int64 [n], weights float32 [n]) in an order that follows from the logits alone, that of the ids
    where neither top-k nor top-p cuts; ids None means the whole vocabulary in order. Of equal
    logits at the edge of top-k or top-p, the smaller ids are kept.
    """
    ids = _near(row, best, params, maxima)
    # The best becomes 0 before the division: a tiny temperature cannot overflow it.
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
    row: FloatRow, best: float, params: SamplingParams, maxima: FloatRow | None = None
) -> IdRow | None:
    """All ids that can matter, in order; None when they are too many to be picked out."""
    depth = math.log(len(row)) + _NEAR_DEPTH
    if params.top_p == 1.0 and params.min_p > 0.0:
        depth = min(depth, _ROUNDING - math.log(params.min_p))
    if maxima is not None:
        pieces = np.flatnonzero(maxima >= _floor(best, depth, params))
        if len(pieces) * MAXIMUM_LEN <= _NUM_NEAR:
            return _near_in_pieces(row, best, params, depth, pieces)
    is_near = row >= _floor(best, depth, params)
    if 0 < params.top_k < len(row):
        is_closer = row >= _floor(best, _TOP_K_DEPTH, params)
        if np.count_nonzero(is_closer) >= params.top_k:
            is_near &= is_closer
    return np.flatnonzero(is_near) if np.count_nonzero(is_near) <= _NUM_NEAR else None


def _near_in_pieces(
    row: FloatRow, best: float, params: SamplingParams, depth: float, pieces: IdRow
) -> IdRow:
    """As ``_near`` where all that is within ``depth`` lies in some ``pieces`` of MAXIMUM_LEN."""
    ids = (pieces[:, None] * MAXIMUM_LEN + _IN_PIECE).ravel()
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
    """The k largest, by falling value; of equal ones, those with the smaller ids."""
    kth = np.partition(scaled, len(scaled) - k)[len(scaled) - k]
    return _falling(scaled, np.flatnonzero(scaled >= kth))[:k]


def _nucleus(scaled: FloatRow, weights: FloatRow, top_p: float) -> IdRow:
    """The fewest best tokens whose share of the total weight reaches ``top_p``; at least one.

    Sorting 49k logits takes milliseconds. The nucleus is mostly a handful near the best token, so
    only those are sorted; a broad one is found by bins of logits, of which one bin is sorted.
    """
    needed = top_p * float(weights.sum())
    for depth in _NUCLEUS_DEPTHS:
        near = np.flatnonzero(scaled >= -depth)
        if float(weights[near].sum()) >= needed:
            break
    else:
        near = np.flatnonzero(weights > 0.0)
    if len(near) <= _NUM_SORTED:
        return _cut_falling(scaled, weights, near, needed)
    depths = -scaled[near]
    deepest = max(float(depths.max()), 1e-6)  # all may be equal
    bins = (depths * np.float32((_NUM_BINS - 1) / deepest)).astype(np.int64)
    sums = np.cumsum(np.bincount(bins, weights=weights[near], minlength=_NUM_BINS))
    last = min(int(np.searchsorted(sums, needed, side="left")), _NUM_BINS - 1)
    before = float(sums[last - 1]) if last else 0.0
    edge = _cut_falling(scaled, weights, near[bins == last], needed - before)
    return np.concatenate((near[bins < last], edge))


def _cut_falling(scaled: FloatRow, weights: FloatRow, ids: IdRow, needed: float) -> IdRow:
    ids = _falling(scaled, ids)
    sums = np.cumsum(weights[ids], dtype=np.float64)
    return ids[: int(np.searchsorted(sums, needed, side="left")) + 1]


def _draw(weights: FloatRow, fraction: float) -> int:
    """The index at which the running sum of ``weights`` passes ``fraction`` of their total.

    By blocks first: a running sum over a whole vocabulary takes most of a millisecond.
    """
    starts = np.arange(0, len(weights), _BLOCK_LEN)
    block_sums = np.cumsum(np.add.reduceat(weights, starts), dtype=np.float64)
    point = fraction * float(block_sums[-1])
    block = min(int(np.searchsorted(block_sums, point, side="right")), len(starts) - 1)
    before = float(block_sums[block - 1]) if block else 0.0
    start = block * _BLOCK_LEN
    sums = np.cumsum(weights[start : start + _BLOCK_LEN], dtype=np.float64)
    at = int(np.searchsorted(sums, point - before, side="right"))
    if at == len(sums):  # rounding: the last one that has any weight
        at = int(np.flatnonzero(weights[start : start + _BLOCK_LEN])[-1])
    return start + at


def _falling(values: FloatRow, ids: npt.NDArray[Any]) -> IdRow:
    return ids[np.argsort(-values[ids], kind="stable")]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, from a 64-bit ``seed`` and a ``position``."""
    a, b, _, _ = philox4x32((position & _WORD, position >> 32, 0, 0), (seed & _WORD, seed >> 32))
    return ((a >> 5) * 67108864.0 + (b >> 6)) / 9007199254740992.0


def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & _WORD,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & _WORD,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3
