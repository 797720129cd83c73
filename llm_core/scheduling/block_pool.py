"""The pool of KV blocks: which are free, and how many hold each of the others. No tensors here.

A block has a reference for each sequence whose table names it and one if the prefix cache keeps it.
Whoever writes into a block must be its only holder; others take a copy first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

_FREE, _USED = b"\x01", b"\x00"
_FREE_RUN = re.compile(rb"\x01+")


class BlockPool:
    """``num_blocks`` numbered blocks of ``block_size`` positions each."""

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        assert num_blocks > 0 and block_size > 0, "a pool has room"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._refs = [0] * num_blocks
        self._is_free = bytearray(_FREE * num_blocks)  # so that runs are found at C speed
        self._num_free = num_blocks

    @property
    def num_free(self) -> int:
        return self._num_free

    def num_refs(self, block: int) -> int:
        """How many hold ``block``."""
        return self._refs[block]

    def allocate(self, count: int, *, after: int | None = None) -> list[int]:
        """``count`` free blocks, held once; there must be as many.

        Consecutive where possible: those right behind block ``after`` first, then from the middle
        of the longest free run, which leaves room to grow behind them and behind their neighbours.
        """
        assert 0 <= count <= self._num_free, f"{count} blocks wanted, {self._num_free} free"
        taken: list[int] = []
        if after is not None:
            end = after + 1
            while end < self.num_blocks and end - after <= count and self._is_free[end]:
                end += 1
            taken += self._take(after + 1, end - after - 1)
        while len(taken) < count:
            missing = count - len(taken)
            run = max(_FREE_RUN.finditer(self._is_free), key=lambda found: len(found[0]))
            length = min(missing, len(run[0]))
            taken += self._take(run.start() + (len(run[0]) - length) // 2, length)
        return taken

    def retain(self, block: int) -> None:
        """One holder more of a block that is held."""
        assert self._refs[block] > 0, f"block {block} is free"
        self._refs[block] += 1

    def release(self, block: int) -> None:
        """One holder less; without any the block is free."""
        assert self._refs[block] > 0, f"block {block} is free"
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._is_free[block : block + 1] = _FREE
            self._num_free += 1

    def check(self, held: Iterable[int]) -> None:
        """Asserts that ``held``, every holder's blocks together, is what the pool believes."""
        counts = Counter(held)
        for block in range(self.num_blocks):
            refs = self._refs[block]
            assert refs == counts[block], f"block {block} has {refs} of {counts[block]} references"
            assert (refs == 0) == bool(self._is_free[block]), f"block {block} free and held"
        assert self._num_free == self._is_free.count(_FREE), "free blocks are counted"

    def _take(self, start: int, count: int) -> list[int]:
        self._is_free[start : start + count] = _USED * count
        self._num_free -= count
        for block in range(start, start + count):
            self._refs[block] = 1
        return list(range(start, start + count))
