"""Prompts whose KV is kept for as long as the engine lives, and what that leaves for the others."""

from __future__ import annotations

from collections.abc import Sequence

from llm_core.errors import InvalidRequestError
from llm_core.scheduling import BlockTables, TokenSequence

_LARGEST_SHARE = 4  # pins take at most one block in so many


class PinnedPrefixes:
    """The pinned sequences, computed or still to be."""

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables
        self._sequences: list[TokenSequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def num_blocks(self) -> int:
        """Blocks that they fill, once they are computed."""
        return sum(self._tables.num_blocks_of(s.prompt_len) for s in self._sequences)

    @property
    def num_blocks_left(self) -> int:
        """Blocks for the longest sequence: those beside the pins, but for one that a copy takes."""
        return self._tables.pool.num_blocks - self.num_blocks - 1

    def holds(self, token_ids: Sequence[int], salt: str) -> bool:
        """Just this is pinned."""
        return any(s.token_ids == token_ids and s.salt == salt for s in self._sequences)

    def check_room(self, prompt_len: int) -> None:
        """Raises InvalidRequestError where one more would take too much of the cache."""
        num_blocks = self.num_blocks + self._tables.num_blocks_of(prompt_len)
        if _LARGEST_SHARE * num_blocks > self._tables.pool.num_blocks:
            raise InvalidRequestError(
                f"pinned prompts would take {num_blocks} of {self._tables.pool.num_blocks} blocks "
                "of the KV cache; at most a quarter can be pinned"
            )

    def add(self, sequence: TokenSequence) -> None:
        """Its blocks are never taken from it."""
        sequence.is_pinned = True
        self._sequences.append(sequence)

    def remove(self, sequence: TokenSequence) -> None:
        """It has ended after all."""
        self._sequences.remove(sequence)
