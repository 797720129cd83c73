"""A memory-mapped file whose pages are released after they were copied."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch

from llm_core.errors import ModelLoadError

_CHUNK_BYTES = 1 << 24


class MappedFile:
    """Read-only. Raises ModelLoadError if the file is empty or cannot be read."""

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
        """A copy of the bytes from ``offset`` on, uint8 [num_bytes].

        Releases the pages that were read, so that loading a model does not keep the file resident
        in addition to the copies.
        """
        target = torch.empty(num_bytes, dtype=torch.uint8)
        with memoryview(self._map) as source, memoryview(target.numpy().data) as sink:
            for start in range(0, num_bytes, _CHUNK_BYTES):
                end = min(start + _CHUNK_BYTES, num_bytes)
                sink[start:end] = source[offset + start : offset + end]
                self._release(offset + start, offset + end)
        return target

    def close(self) -> None:
        """Unmaps the file; copies stay valid."""
        self._map.close()

    def _release(self, start: int, end: int) -> None:
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED"):  # not on all systems; only saves memory
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)
