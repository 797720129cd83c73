"""A file mapped into memory, from which parts are copied out without leaving pages behind."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch

from llm_core.errors import ModelLoadError

_CHUNK_BYTES = 1 << 24


class MappedFile:
    """Read-only. Raises ModelLoadError when the file cannot be read (an empty one cannot)."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise ModelLoadError(f"{path}: cannot be read: {error}") from error

    def __len__(self) -> int:
        return len(self._map)

    def __getitem__(self, part: slice) -> bytes:
        return self._map[part]

    def copy(self, offset: int, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] from byte ``offset`` on, in memory of its own.

        The pages that were read are given back at once, so that reading a whole model holds the
        copies and not the file as well.
        """
        target = torch.empty(num_bytes, dtype=torch.uint8)
        with memoryview(self._map) as source, memoryview(target.numpy().data) as sink:
            for start in range(0, num_bytes, _CHUNK_BYTES):
                end = min(start + _CHUNK_BYTES, num_bytes)
                sink[start:end] = source[offset + start : offset + end]
                self._forget(offset + start, offset + end)
        return target

    def close(self) -> None:
        """Ends the mapping; copies stay valid."""
        self._map.close()

    def _forget(self, start: int, end: int) -> None:
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED"):  # not everywhere; only memory is saved by it
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)
