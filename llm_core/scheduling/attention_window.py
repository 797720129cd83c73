"""A sliding window with attention sinks (Xiao et al. 2023): what a row still sees of a long text.

Rows see the sequence's first blocks (the sinks: without them a model falls apart), the blocks just
before their own, and their own up to themselves. It goes by whole blocks, so that what is unseen
can be given back to the pool, and by a row's position alone: the same text gives the same keys and
values however it was cut into chunks, and blocks can be shared. Positions stay those of the text:
keys keep the rotation with which they were stored, and the rows see a text with a hole in it.

::

    block    0 .. S-1 | S ........ b-W-1 | b-W ..... b-1 | b
    row in b  sinks   |     unseen       |    window     | up to itself
"""

from __future__ import annotations

from dataclasses import dataclass

GONE = -1
"""Stands in a block table for a block that was given back."""


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """``num_sinks`` (S) and ``num_recent`` (W) are blocks."""

    num_sinks: int
    num_recent: int

    @classmethod
    def of_tokens(cls, sinks: int, recent: int, block_size: int) -> AttentionWindow:
        """At least so many positions of each kind."""
        return cls(-(-sinks // block_size), -(-recent // block_size))

    @property
    def num_blocks(self) -> int:
        """That a row sees, at most."""
        return self.num_sinks + self.num_recent + 1

    def unseen(self, block: int) -> range:
        """The blocks that rows in ``block`` do not see any more."""
        return range(self.num_sinks, max(self.num_sinks, block - self.num_recent))
