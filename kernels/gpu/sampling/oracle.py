"""Reference for ``GpuOps.sample``: one row at a time, fully sorted, in float64."""

from __future__ import annotations

import math

import torch

from kernels.gpu.sampling.inputs import TAIL_DEPTH, SamplingInputs
from kernels.philox import uniform

# Lower temperatures are greedy in float32.
GREEDY_BELOW = 1e-5


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
    u: float,
) -> int:
    """The token sampled from float32 row [vocab] with the random number ``u`` in [0, 1)."""
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
    ids = torch.nonzero(depths <= math.log(len(row)) + TAIL_DEPTH).flatten()
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
    at = min(int((sums <= u * sums[-1]).sum()), len(ids) - 1)
    return int(ids[at])
