"""Random paged caches and ragged batches for the tests of GPU attention."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from kernels.gpu import KvPages
from kernels.gpu.attention.pages import MAX_CODES
from tests.support.gpu_guard import Guards


def make_pages(
    guards: Guards, num_kv_heads: int, head_dim: int, shape: tuple[int, int], dtype: torch.dtype
) -> KvPages:
    """Normal numbers in ``shape`` (num_blocks, block_size) pages, quantised where dtype says so."""
    num_blocks, block_size = shape
    values = torch.randn(2 * num_kv_heads, num_blocks * block_size, head_dim)
    if dtype not in MAX_CODES:
        return KvPages(guards.wrap(values.to(dtype)), None, block_size)
    scales = values.abs().amax(-1) / MAX_CODES[dtype]
    codes = values / scales.unsqueeze(-1)
    codes = (codes.round() if dtype == torch.int8 else codes).to(dtype)
    return KvPages(guards.wrap(codes), guards.wrap(scales), block_size)


@dataclass(frozen=True)
class Ragged:
    """``lengths[b]`` rows of sequence b, whose first is at ``starts[b]``; the rest as in GpuOps."""

    lengths: list[int]
    starts: torch.Tensor
    query_starts: torch.Tensor
    block_tables: torch.Tensor
    parents: torch.Tensor
    positions: torch.Tensor

    @property
    def num_rows(self) -> int:
        return sum(self.lengths)


def make_ragged(
    rng: random.Random, guards: Guards, lengths: list[int], starts: list[int], pages: KvPages
) -> Ragged:
    """Tables name blocks in random order; entries that nobody needs are far outside the pool."""
    num_blocks = pages.data.shape[1] // pages.block_size
    blocks = list(range(num_blocks))
    rng.shuffle(blocks)
    needed = [-(-(s + n) // pages.block_size) for s, n in zip(starts, lengths, strict=True)]
    width = max(needed, default=0) + 1
    rows = []
    for count in needed:
        taken, blocks = blocks[:count], blocks[count:]
        rows.append(taken + [1 << 24] * (width - count))
    query_starts = [0]
    parents: list[int] = []
    positions: list[int] = []
    for length, start in zip(lengths, starts, strict=True):
        query_starts.append(query_starts[-1] + length)
        depths: list[int] = []
        for row in range(length):
            parent = rng.randint(-1, row - 1) if row else -1
            parents.append(parent)
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        positions += [start + depth for depth in depths]

    def wrap(numbers: list[int]) -> torch.Tensor:
        return guards.wrap(torch.tensor(numbers, dtype=torch.int32))

    return Ragged(
        lengths,
        wrap(starts),
        wrap(query_starts),
        guards.wrap(torch.tensor(rows, dtype=torch.int32).view(len(lengths), width)),
        wrap(parents),
        wrap(positions),
    )
