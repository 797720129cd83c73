"""The KV pool on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kernels.gpu import GpuOps
from llm_core.config import KvDtype, ModelConfig
from llm_core.errors import ModelLoadError
from llm_core.model.kv_cache import KvCache

_MAX_SHARE = 0.95  # of the free memory; activations, graphs and the allocator need the rest


class GpuKvCache(KvCache):
    """``KvCache`` on ``device``, with asynchronous copies and moves."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: KvDtype,
        *,
        device: torch.device,
        ops: GpuOps,
    ) -> None:
        """Raises ModelLoadError if the pool does not fit into the GPU's free memory."""
        if device.type == "cuda":
            num_bytes = self.num_bytes(config, num_blocks, block_size, dtype)
            free_bytes = torch.cuda.mem_get_info(device)[0]
            if num_bytes > _MAX_SHARE * free_bytes:
                raise ModelLoadError(
                    f"the KV cache of {num_blocks} blocks of {block_size} positions needs "
                    f"{num_bytes / 2**30:.1f} GiB and the GPU has {free_bytes / 2**30:.1f} GiB "
                    "free: choose a smaller max_context, fewer sequences, or kv_dtype fp8"
                )
        super().__init__(config, num_blocks, block_size, dtype, device)
        # Called before each change, by which rank 0 broadcasts it.
        self.on_copy: Callable[[int, int, int], None] | None = None
        self.on_move: Callable[[Sequence[int], int, Sequence[int]], None] | None = None
        self._ops = ops

    def copy_rows(self, src_block: int, dst_block: int, num_rows: int) -> None:
        """See ``KvCache``."""
        if self.on_copy is not None:
            self.on_copy(src_block, dst_block, num_rows)
        super().copy_rows(src_block, dst_block, num_rows)

    def move_rows(self, block_ids: Sequence[int], start: int, rows: Sequence[int]) -> None:
        """See ``KvCache``."""
        moves = [(start + row, start + i) for i, row in enumerate(rows) if row != i]
        if not moves:
            return
        if self.on_move is not None:
            self.on_move(block_ids, start, rows)
        places = torch.tensor(
            [[self._slot(block_ids, at) for at in side] for side in zip(*moves, strict=True)]
        ).to(self.data.device)
        self._ops.move_rows(self.data, self.scales, places[:1], places[1:])
