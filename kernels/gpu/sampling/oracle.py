"""The plain form of ``GpuOps.sample``: one row at a time, sorted in full, in float64."""

from __future__ import annotations

import math

import torch

from kernels.gpu.sampling.inputs import SamplingInputs

# Smaller temperatures leave nothing to chance in float32.
GREEDY_BELOW = 1e-5
# All tokens deeper below the best than ln(vocabulary) plus this have, together, a share below 2^-20
# and are never drawn.
NEAR_DEPTH = 14.0

_WORD = 0xFFFF_FFFF


def sample(
    logits: torch.Tensor,
    inputs: SamplingInputs,
    *,
    allowed: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``ops.GpuOps``."""
    tokens = [
        sample_one(
            row.float(),
            None if allowed is None else allowed[index],
            float(inputs.temperature[index]),
            int(inputs.top_k[index]),
            float(inputs.top_p[index]),
            float(inputs.min_p[index]),
            uniform(int(inputs.seeds[index]) & (1 << 64) - 1, int(inputs.positions[index])),
        )
        for index, row in enumerate(logits)
    ]
    chosen = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
    return chosen if out is None else out[: len(tokens)].copy_(chosen)


def sample_one(
    row: torch.Tensor,
    allowed: torch.Tensor | None,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    fraction: float,
) -> int:
    """The token of float32 row [vocab], drawn with ``fraction`` in [0, 1)."""
    if bool(row.isnan().any()):
        return -1
    if allowed is not None:
        ids = torch.arange(len(row), device=row.device)
        row = row.masked_fill(allowed[ids // 32] >> (ids % 32) & 1 == 0, -math.inf)
    best = row.max()
    if not bool(best.isfinite()):
        return -1
    if temperature < GREEDY_BELOW or top_k == 1:
        return int((row == best).nonzero()[0])
    depths = (best - row) * torch.tensor(1.0 / temperature)  # in float32, as kernels have them
    ids = torch.nonzero(depths <= math.log(len(row)) + NEAR_DEPTH).flatten()
    if 0 < top_k < len(row) or top_p < 1.0:
        ids = ids[torch.sort(depths[ids], stable=True).indices]
    if 0 < top_k < len(row):
        ids = ids[:top_k]
    weights = torch.exp(-depths[ids].double())
    if top_p < 1.0:
        sums = weights.cumsum(0)
        num_kept = int((sums < top_p * sums[-1]).sum()) + 1
        ids, weights = ids[:num_kept], weights[:num_kept]
    if min_p > 0.0:
        is_strong = weights >= min_p
        ids, weights = ids[is_strong], weights[is_strong]
    ids, order = ids.sort()
    sums = weights[order].cumsum(0)
    at = min(int((sums <= fraction * sums[-1]).sum()), len(ids) - 1)
    return int(ids[at])


def uniform(seed: int, position: int) -> float:
    """In [0, 1) with 53 random bits, of an unsigned 64-bit ``seed`` and a ``position``."""
    words = _philox(position & _WORD, position >> 32, seed & _WORD, seed >> 32)
    return ((words[0] >> 5) * 67108864.0 + (words[1] >> 6)) / 9007199254740992.0


def _philox(c0: int, c1: int, k0: int, k1: int) -> tuple[int, int]:
    """Two words of Philox-4x32-10 (Salmon et al. 2011) for the counter (c0, c1, 0, 0)."""
    c2 = c3 = 0
    for _ in range(10):
        low, high = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high >> 32 ^ c1 ^ k0, high & _WORD, low >> 32 ^ c3 ^ k1, low & _WORD
        k0, k1 = k0 + 0x9E3779B9 & _WORD, k1 + 0xBB67AE85 & _WORD
    return c0, c1
