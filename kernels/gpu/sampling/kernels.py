"""Sampling on the device: temperature, top-k, top-p and min-p without sorting the vocabulary.

The *depth* of a token is the distance of its scaled logit from the best, so its weight is
exp(-depth). The bits of a depth read as an integer (its *key*) are monotonic in the depth, so each
threshold (top-k, top-p) is found by a binary search over the bits of the key. Four launches,
without synchronisation:

1. the best logit of each block of the vocabulary;
2. count and weight of each block's tokens within a few depths of the best;
3. the smallest of these depths that contains all candidates; these (a few hundred of tens of
   thousands) are written in order of ids;
4. one program per row applies the thresholds and samples in the order of ids.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernels.gpu.cost import Cost
from kernels.gpu.launch import cdiv, dependent, power_of_2, wait_for_inputs
from kernels.gpu.sampling.inputs import TAIL_DEPTH, SamplingInputs

_BLOCK = 4096
_DRAW_BLOCK = 1024

# Depths at which tokens are counted: 0, 4, 8, 16 and the limit beyond which none is sampled.
_NUM_DEPTHS = 5

# Views into a step's input buffer: their alignment must not trigger new compilations.
_ROW_POINTERS = [
    *("temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seeds_ptr", "positions_ptr")
]


@triton.jit
def load_logits(logits_ptr, allowed_ptr, row, block, row_stride, vocab_size, num_words,
                HAS_ALLOWED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """float32 [BLOCK]: -inf for tokens that are not allowed, +inf for NaN."""
    ids = block * BLOCK + tl.arange(0, BLOCK)
    mask = ids < vocab_size
    logits_at = logits_ptr + row.to(tl.int64) * row_stride + ids
    logits = tl.load(logits_at, mask=mask, other=float("-inf")).to(tl.float32)
    values = logits
    if HAS_ALLOWED:
        words_at = allowed_ptr + row.to(tl.int64) * num_words + ids // 32
        words = tl.load(words_at, mask=mask, other=0)
        values = tl.where(((words >> (ids & 31)) & 1) != 0, logits, float("-inf"))
    return tl.where(logits != logits, float("inf"), values)


@triton.jit
def best_of(best_ptr, row, num_blocks, BLOCKS: tl.constexpr):
    block = tl.arange(0, BLOCKS)
    best_at = best_ptr + row * num_blocks + block
    return tl.max(tl.load(best_at, mask=block < num_blocks, other=float("-inf")), 0)


@triton.jit
def is_greedy(temperature_ptr, top_k_ptr, row):
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    return (temperature < 1e-5) | (top_k == 1)


@triton.jit
def depths_of(values, best, temperature_ptr, top_k_ptr, row):
    """(best - values) / temperature; for greedy rows 0 or infinity."""
    greedy = is_greedy(temperature_ptr, top_k_ptr, row)
    factor = 1.0 / tl.where(greedy, 1.0, tl.load(temperature_ptr + row))
    # An unusable row has best +-inf; its depths are not used, but must be finite.
    best = tl.where((best == float("inf")) | (best == float("-inf")), 0.0, best)
    depths = tl.maximum((best - values) * factor, 0.0)
    return tl.where(depths > 0.0, depths + tl.where(greedy, float("inf"), 0.0), depths)


@triton.jit
def best_kernel(
    logits_ptr,
    allowed_ptr,
    best_ptr,
    row_stride,
    vocab_size,
    num_words,
    HAS_ALLOWED: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    block, row = tl.program_id(0), tl.program_id(1)
    values = load_logits(logits_ptr, allowed_ptr, row, block, row_stride, vocab_size, num_words,
                         HAS_ALLOWED, BLOCK)  # fmt: skip
    tl.store(best_ptr + row * tl.num_programs(0) + block, tl.max(values, 0))


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "top_k_ptr"])
def depths_kernel(
    logits_ptr,
    allowed_ptr,
    best_ptr,
    temperature_ptr,
    top_k_ptr,
    masses_ptr,
    counts_ptr,
    row_stride,
    vocab_size,
    num_words,
    limit,
    HAS_ALLOWED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    block, row = tl.program_id(0), tl.program_id(1)
    num_blocks = tl.num_programs(0)
    values = load_logits(logits_ptr, allowed_ptr, row, block, row_stride, vocab_size, num_words,
                         HAS_ALLOWED, BLOCK)  # fmt: skip
    best = best_of(best_ptr, row, num_blocks, BLOCKS)
    depths = depths_of(values, best, temperature_ptr, top_k_ptr, row)
    weights = tl.exp(-depths)
    for index in tl.static_range(5):
        if index == 0:
            within = depths <= 0.0
        elif index == 1:
            within = depths <= 4.0
        elif index == 2:
            within = depths <= 8.0
        elif index == 3:
            within = depths <= 16.0
        else:
            within = depths <= limit
        # [B, 5, num_blocks]
        at = (row * 5 + index) * num_blocks + block
        tl.store(masses_ptr + at, tl.sum(tl.where(within, weights, 0.0), 0))
        tl.store(counts_ptr + at, tl.sum(within.to(tl.int32), 0))


@triton.jit
def chosen_depth(masses_ptr, counts_ptr, temperature_ptr, top_k_ptr, top_p_ptr, row, num_blocks,
                 limit, BLOCKS: tl.constexpr):  # fmt: skip
    """(index of the depth that contains all candidates, the depth, total weight)"""
    block = tl.arange(0, BLOCKS)
    is_block = block < num_blocks
    last_at = (row * 5 + 4) * num_blocks + block
    total = tl.sum(tl.load(masses_ptr + last_at, mask=is_block, other=0.0), 0)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    chosen = 4
    depth = limit
    for back in tl.static_range(1, 4):
        index = 4 - back
        at = (row * 5 + index) * num_blocks + block
        count = tl.sum(tl.load(counts_ptr + at, mask=is_block, other=0), 0)
        mass = tl.sum(tl.load(masses_ptr + at, mask=is_block, other=0.0), 0)
        # The margin keeps tokens at the threshold despite rounding.
        has_nucleus = (top_p < 1.0) & (mass >= top_p * total * 1.00001)
        holds = tl.where(top_k > 0, count >= top_k, has_nucleus)
        here = tl.where(index == 3, 16.0, tl.where(index == 2, 8.0, 4.0))
        holds &= here <= limit
        chosen = tl.where(holds, index, chosen)
        depth = tl.where(holds, here, depth)
    greedy = is_greedy(temperature_ptr, top_k_ptr, row)
    return tl.where(greedy, 0, chosen), tl.where(greedy, 0.0, depth), total


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "top_k_ptr", "top_p_ptr"])
def gather_kernel(
    logits_ptr,
    allowed_ptr,
    best_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    masses_ptr,
    counts_ptr,
    depths_ptr,
    ids_ptr,
    row_stride,
    vocab_size,
    num_words,
    limit,
    HAS_ALLOWED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    block, row = tl.program_id(0), tl.program_id(1)
    num_blocks = tl.num_programs(0)
    best = best_of(best_ptr, row, num_blocks, BLOCKS)
    if (best == float("inf")) | (best == float("-inf")):
        return
    index, depth, _ = chosen_depth(masses_ptr, counts_ptr, temperature_ptr, top_k_ptr, top_p_ptr,
                                   row, num_blocks, limit, BLOCKS)  # fmt: skip
    other = tl.arange(0, BLOCKS)
    counts_at = counts_ptr + (row * 5 + index) * num_blocks + other
    before = tl.sum(tl.load(counts_at, mask=other < block, other=0), 0)
    values = load_logits(logits_ptr, allowed_ptr, row, block, row_stride, vocab_size, num_words,
                         HAS_ALLOWED, BLOCK)  # fmt: skip
    depths = depths_of(values, best, temperature_ptr, top_k_ptr, row)
    within = depths <= depth
    place = before + tl.cumsum(within.to(tl.int32), 0) - 1
    at = row.to(tl.int64) * vocab_size + place
    tl.store(depths_ptr + at, depths, mask=within)
    tl.store(ids_ptr + at, block * BLOCK + tl.arange(0, BLOCK), mask=within)


@triton.jit
def load_block(depths_ptr, count, first, BLOCK: tl.constexpr):
    """(keys, weights) of BLOCK candidates from ``first`` on; padding has the highest key and weight
    0."""
    at = first + tl.arange(0, BLOCK)
    depths = tl.load(depths_ptr + at, mask=at < count, other=float("inf"))
    keys = tl.where(at < count, depths.to(tl.int32, bitcast=True), 0x7FFFFFFF)
    return keys, tl.exp(-depths)


@triton.jit
def weight_below(keys, weights, depths_ptr, count, key, BLOCK: tl.constexpr):
    """Sum of the weights with keys below ``key``. ``keys`` and ``weights`` are the first block,
    which is usually the only one and stays in registers."""
    total = tl.sum(tl.where(keys < key, weights, 0.0), 0)
    for first in range(BLOCK, count, BLOCK):
        more_keys, more = load_block(depths_ptr, count, first, BLOCK)
        total += tl.sum(tl.where(more_keys < key, more, 0.0), 0)
    return total


@triton.jit
def count_below(keys, depths_ptr, count, key, BLOCK: tl.constexpr):
    """Number of keys below ``key``."""
    total = tl.sum((keys < key).to(tl.int32), 0)
    for first in range(BLOCK, count, BLOCK):
        more_keys, _ = load_block(depths_ptr, count, first, BLOCK)
        total += tl.sum((more_keys < key).to(tl.int32), 0)
    return total


@triton.jit
def weight_of(key):
    return tl.exp(-key.to(tl.float32, bitcast=True))


@triton.jit
def cut_falling(depths_ptr, count, all_weight, top_k, top_p, BLOCK: tl.constexpr):
    """Threshold of top-k followed by top-p as (edge, num_edge): kept are all keys below ``edge``
    and the first ``num_edge`` tokens with that key, in order of ids."""
    keys, weights = load_block(depths_ptr, count, 0, BLOCK)
    edge = tl.full((), 0x7F800000, tl.int32)
    num_edge = tl.full((), 0, tl.int32)
    kept_weight = all_weight
    if top_k > 0:
        edge = tl.full((), 0, tl.int32)
        for bit in range(31):
            candidate = edge | (1 << (30 - bit))
            edge = tl.where(
                count_below(keys, depths_ptr, count, candidate, BLOCK) < top_k, candidate, edge
            )
        edge = tl.minimum(edge, 0x7F800000)
        num_edge = top_k - count_below(keys, depths_ptr, count, edge, BLOCK)
        below = weight_below(keys, weights, depths_ptr, count, edge, BLOCK)
        kept_weight = below + num_edge * weight_of(edge)
    if top_p < 1.0:
        needed = top_p * kept_weight
        nucleus = tl.full((), 0, tl.int32)
        for bit in range(31):
            candidate = nucleus | (1 << (30 - bit))
            below = weight_below(keys, weights, depths_ptr, count, candidate, BLOCK)
            below = tl.where(candidate > edge, kept_weight, below)
            nucleus = tl.where(below < needed, candidate, nucleus)
        # Beyond the edge only by rounding, or with top_p within rounding of 1: then all are kept.
        if nucleus < edge:
            edge = nucleus
            num_edge = tl.full((), 0x7FFFFFFF, tl.int32)
        below = weight_below(keys, weights, depths_ptr, count, edge, BLOCK)
        share = tl.ceil((needed - below) / tl.maximum(weight_of(edge), 1e-30))
        num_needed = tl.minimum(tl.maximum(share, 1.0), 1e9).to(tl.int32)
        num_edge = tl.minimum(num_edge, num_needed)
    return edge, num_edge


@triton.jit
def kept_block(depths_ptr, count, first, num_equal, edge, num_edge, min_p, BLOCK: tl.constexpr):
    """(weights of BLOCK candidates from ``first`` on, 0 if removed; number of candidates with the
    edge's key up to their end, of which ``num_equal`` come before ``first``)."""
    keys, weights = load_block(depths_ptr, count, first, BLOCK)
    equal = (keys == edge).to(tl.int32)
    kept = (keys < edge) | ((equal > 0) & (num_equal + tl.cumsum(equal, 0) <= num_edge))
    weights = tl.where(kept & (weights >= min_p), weights, 0.0)
    return weights, num_equal + tl.sum(equal, 0)


@triton.jit
def draw_in_order(depths_ptr, count, edge, num_edge, min_p, fraction, BLOCK: tl.constexpr):
    """Index of the candidate sampled from those that are kept and have a weight of at least min_p,
    in the order of ids, as in the CPU sampler."""
    total = 0.0
    num_equal = 0
    for first in range(0, count, BLOCK):
        weights, num_equal = kept_block(depths_ptr, count, first, num_equal, edge, num_edge, min_p,
                                        BLOCK)  # fmt: skip
        total += tl.sum(weights, 0)
    point = (fraction * tl.cast(total, tl.float64)).to(tl.float32)
    before = 0.0
    num_equal = 0
    place = 0x7FFFFFFF
    last = 0
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        weights, num_equal = kept_block(depths_ptr, count, first, num_equal, edge, num_edge, min_p,
                                        BLOCK)  # fmt: skip
        sums = before + tl.cumsum(weights, 0)
        # Only kept candidates: a parallel prefix sum need not be monotonic, and must never select
        # one that was removed.
        passed = tl.where((weights > 0.0) & (sums > point), at, 0x7FFFFFFF)
        place = tl.minimum(place, tl.min(passed, 0))
        last = tl.maximum(last, tl.max(tl.where(weights > 0.0, at, 0), 0))
        before += tl.sum(weights, 0)
    return tl.minimum(place, last)


@triton.jit(do_not_specialize_on_alignment=_ROW_POINTERS)
def draw_kernel(
    best_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    masses_ptr,
    counts_ptr,
    depths_ptr,
    ids_ptr,
    tokens_ptr,
    vocab_size,
    num_blocks,
    limit,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    row = tl.program_id(0)
    best = best_of(best_ptr, row, num_blocks, BLOCKS)
    if (best == float("inf")) | (best == float("-inf")):
        tl.store(tokens_ptr + row, tl.full((), -1, tl.int64))
        return
    index, _, all_weight = chosen_depth(masses_ptr, counts_ptr, temperature_ptr, top_k_ptr,
                                        top_p_ptr, row, num_blocks, limit, BLOCKS)  # fmt: skip
    block = tl.arange(0, BLOCKS)
    counts_at = counts_ptr + (row * 5 + index) * num_blocks + block
    count = tl.sum(tl.load(counts_at, mask=block < num_blocks, other=0), 0)
    row_depths_ptr = depths_ptr + row.to(tl.int64) * vocab_size
    row_ids_ptr = ids_ptr + row.to(tl.int64) * vocab_size
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    top_k = tl.where(top_k < vocab_size, top_k, 0)
    min_p = tl.load(min_p_ptr + row)

    # kernels.philox.uniform: counter (position, 0, 0), key the seed
    position = tl.load(positions_ptr + row).to(tl.uint64)
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = (position >> 32).to(tl.uint32)
    nothing = tl.full((), 0, tl.uint32)
    a, b, _, _ = tl.philox(tl.load(seeds_ptr + row), low, high, nothing, nothing)
    fraction = (a >> 5).to(tl.float64) * 67108864.0 + (b >> 6).to(tl.float64)
    fraction = fraction / 9007199254740992.0

    place = tl.full((), 0, tl.int32)  # greedy: the first of the best
    if index > 0:
        edge = tl.full((), 0x7F800000, tl.int32)
        num_edge = tl.full((), 0, tl.int32)
        if (top_k > 0) | (top_p < 1.0):
            edge, num_edge = cut_falling(row_depths_ptr, count, all_weight, top_k, top_p, BLOCK)
        place = draw_in_order(row_depths_ptr, count, edge, num_edge, min_p, fraction, BLOCK)
    tl.store(tokens_ptr + row, tl.load(row_ids_ptr + place).to(tl.int64))


def sample(
    logits: torch.Tensor,
    inputs: SamplingInputs,
    *,
    allowed: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``ops.GpuOps``."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and (allowed is None or allowed.is_contiguous()), "dense rows"
    device = logits.device
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int64, device=device)
    assert out.dtype == torch.int64 and out.is_contiguous(), "dense int64 tokens"
    tokens = out[:num_rows]
    if num_rows == 0:
        return tokens
    num_blocks = cdiv(vocab_size, _BLOCK)
    blocks = power_of_2(num_blocks)
    limit = math.log(vocab_size) + TAIL_DEPTH
    best = torch.empty(num_rows, num_blocks, device=device)
    masses = torch.empty(num_rows, _NUM_DEPTHS, num_blocks, device=device)
    counts = torch.empty_like(masses, dtype=torch.int32)
    depths = torch.empty(num_rows, vocab_size, device=device)
    ids = torch.empty(num_rows, vocab_size, dtype=torch.int32, device=device)
    mask = logits if allowed is None else allowed
    shape = (logits.stride(0), vocab_size, 0 if allowed is None else allowed.shape[1])
    grid = (num_blocks, num_rows)
    early = dependent(device)
    flags = {"HAS_ALLOWED": allowed is not None, "BLOCK": _BLOCK, "num_warps": 8, **early}
    temperature, top_k, top_p = inputs.temperature, inputs.top_k, inputs.top_p
    best_kernel[grid](logits, mask, best, *shape, **flags)
    depths_kernel[grid](
        *(logits, mask, best, temperature, top_k, masses, counts, *shape, limit),
        BLOCKS=blocks,
        **flags,
    )
    gather_kernel[grid](
        *(logits, mask, best, temperature, top_k, top_p, masses, counts, depths, ids, *shape),
        limit,
        BLOCKS=blocks,
        **flags,
    )
    draw_kernel[(num_rows,)](
        *(best, temperature, top_k, top_p, inputs.min_p, inputs.seeds, inputs.positions),
        *(masses, counts, depths, ids, tokens, vocab_size, num_blocks, limit),
        BLOCK=_DRAW_BLOCK,
        BLOCKS=blocks,
        num_warps=8,
        **early,
    )
    return tokens


def sample_cost(logits: torch.Tensor) -> Cost:
    """Reads the logits three times (best, counts, candidates)."""
    return Cost(3 * logits.numel() * logits.element_size(), 4 * logits.numel())
