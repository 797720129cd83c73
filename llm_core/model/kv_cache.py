"""The paged KV cache: keys and values of all layers in one pool of fixed-size blocks.

    data   [num_layers, 2 * num_kv_heads, num_blocks * block_size, head_dim]   key heads first
    scales [num_layers, 2 * num_kv_heads, num_blocks * block_size]             int8 and fp8 only

Blocks with consecutive ids are adjacent in memory, so a run of such blocks is a single view. The
torch decoder attends to one view per contiguous run; cached positions are never copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from kernels.kv_runs import KvRun
from llm_core.batch import Segment
from llm_core.config import KvDtype, ModelConfig

DTYPES: dict[KvDtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
_SCALED: tuple[KvDtype, ...] = ("int8", "fp8")
_MAX_CODE = 127


class Segmented(Protocol):
    """A batch of rows, of a model or of a draft head."""

    @property
    def segments(self) -> tuple[Segment, ...]: ...


class KvCache:
    """A pool of ``num_blocks`` blocks. Memory is reserved at once and resident once written.

    int8: symmetric, with one scale per head and position (largest magnitude / 127), so an outlier
    affects only its own head and position. fp8 (e4m3): likewise with 448; GPU kernels only.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int = 16,
        dtype: KvDtype = "float32",
        device: torch.device | str = "cpu",
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._num_kv_heads = config.num_kv_heads
        shape = (config.num_layers, 2 * config.num_kv_heads, num_blocks * block_size)
        self.data = torch.empty(*shape, config.head_dim, dtype=DTYPES[dtype], device=device)
        self.scales = torch.empty(*shape, device=device) if dtype in _SCALED else None
        self._layers = self.data.unbind(0)
        self._layer_scales = None if self.scales is None else self.scales.unbind(0)

    @staticmethod
    def num_bytes(
        config: ModelConfig, num_blocks: int, block_size: int = 16, dtype: KvDtype = "float32"
    ) -> int:
        """Bytes that a cache of this size reserves."""
        per_head = config.head_dim * DTYPES[dtype].itemsize + (4 if dtype in _SCALED else 0)
        return config.num_layers * 2 * config.num_kv_heads * per_head * num_blocks * block_size

    def positions(self, batch: Segmented) -> torch.Tensor:
        """Pool positions of all rows of ``batch``, int64 [T]."""
        return torch.tensor(
            [
                self._slot(segment.block_ids, at)
                for segment in batch.segments
                for at in range(segment.start, segment.end)
            ],
            dtype=torch.int64,
        )

    def write(self, layer: int, positions: torch.Tensor, key_value: torch.Tensor) -> None:
        """Stores key_value float32 [2 * num_kv_heads, T, head_dim] at pool ``positions`` [T]."""
        if self._layer_scales is None:
            self._layers[layer].index_copy_(1, positions, key_value.to(self.data.dtype))
            return
        scales = key_value.abs().amax(-1).div_(_MAX_CODE)
        codes = key_value / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
        self._layers[layer].index_copy_(1, positions, codes.round_().to(torch.int8))
        self._layer_scales[layer].index_copy_(1, positions, scales)

    def runs(self, block_ids: Sequence[int], first: int, end: int) -> tuple[tuple[KvRun, ...], ...]:
        """For each layer, positions [first, end) of the sequence in ``block_ids``, in order."""
        places = contiguous_runs(block_ids, self.block_size, first, end)
        return tuple(zip(*(self._views(start, stop) for start, stop in places), strict=True))

    def copy_rows(self, src_block: int, dst_block: int, num_rows: int) -> None:
        """Copies the first ``num_rows`` positions of one block to another."""
        src, dst = src_block * self.block_size, dst_block * self.block_size
        for pool in self._pools():
            pool[:, :, dst : dst + num_rows] = pool[:, :, src : src + num_rows]

    def move_rows(self, block_ids: Sequence[int], start: int, rows: Sequence[int]) -> None:
        """Compacts the accepted rows of a tree: moves position start + rows[i] of the sequence in
        ``block_ids`` to start + i. ``rows`` must be ascending."""
        moves = [(start + row, start + i) for i, row in enumerate(rows) if row != i]
        if not moves:
            return
        src, dst = (
            torch.tensor([self._slot(block_ids, at) for at in side], device=self.data.device)
            for side in zip(*moves, strict=True)
        )
        for pool in self._pools():
            pool.index_copy_(2, dst, pool.index_select(2, src))

    def _pools(self) -> list[torch.Tensor]:
        """Data and scales, as bytes if torch cannot index the dtype."""
        data = self.data.view(torch.uint8) if self.data.dtype == DTYPES["fp8"] else self.data
        return [data] if self.scales is None else [data, self.scales]

    def _slot(self, block_ids: Sequence[int], at: int) -> int:
        return block_ids[at // self.block_size] * self.block_size + at % self.block_size

    def _views(self, start: int, stop: int) -> Iterator[KvRun]:
        heads = self._num_kv_heads
        seen = self.data[:, :, start:stop]
        keys, values = seen[:, :heads].unbind(0), seen[:, heads:].unbind(0)
        if self.scales is None:
            return map(KvRun, keys, values)
        scales = self.scales[:, :, start:stop]
        return map(KvRun, keys, values, scales[:, :heads].unbind(0), scales[:, heads:].unbind(0))


def contiguous_runs(
    block_ids: Sequence[int], block_size: int, first: int, end: int
) -> list[tuple[int, int]]:
    """Pool positions [start, stop) of positions [first, end), in as few ranges as possible."""
    runs: list[tuple[int, int]] = []
    for index in range(first // block_size, (end - 1) // block_size + 1):
        start = block_ids[index] * block_size
        stop = start + min(block_size, end - index * block_size)
        start += max(0, first - index * block_size)
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], stop)
        else:
            runs.append((start, stop))
    return runs
