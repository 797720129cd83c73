"""Keys and values of all layers: one contiguous, preallocated range of positions per slot.

    slot s   [0, end) computed | [end, max_context) not yet written

Pages come later; what a segment attends to is handed out as views, so nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llm_core.config import ModelConfig


@dataclass(frozen=True, slots=True)
class SegmentViews:
    """One segment's views into the cache, a tensor per layer.

    ``target[l]`` [2 * num_kv_heads, length, head_dim] is where its new keys, then values go;
    ``keys[l]`` and ``values[l]`` [num_kv_heads, end, head_dim] are all that it attends to.
    """

    target: tuple[torch.Tensor, ...]
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]


class KvCache:
    """float32 [num_layers, num_slots, 2 * num_kv_heads, max_context, head_dim].

    The memory is reserved at once but becomes resident only where positions are written.
    """

    def __init__(self, config: ModelConfig, num_slots: int, max_context: int) -> None:
        self._num_kv_heads = config.num_kv_heads
        self._data = torch.empty(
            config.num_layers, num_slots, 2 * config.num_kv_heads, max_context, config.head_dim
        )

    @staticmethod
    def num_bytes(config: ModelConfig, num_slots: int, max_context: int) -> int:
        """What a cache of this size reserves."""
        return 4 * config.num_layers * num_slots * 2 * config.kv_size * max_context

    def views(self, slot: int, start: int, end: int) -> SegmentViews:
        """Views for a segment that computes positions [start, end) of ``slot``."""
        seen = self._data[:, slot, :, :end]
        return SegmentViews(
            target=seen[:, :, start:].unbind(0),
            keys=seen[:, : self._num_kv_heads].unbind(0),
            values=seen[:, self._num_kv_heads :].unbind(0),
        )

    def copy_prefix(self, src_slot: int, dst_slot: int, length: int) -> None:
        """Positions [0, length) of ``src_slot`` over those of ``dst_slot``."""
        if src_slot != dst_slot:
            self._data[:, dst_slot, :, :length].copy_(self._data[:, src_slot, :, :length])
