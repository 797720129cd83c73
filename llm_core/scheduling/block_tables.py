"""Gives sequences their blocks, and shares what they have in common. No tensors here.

The rule about writing: a row is written only into a block that its sequence alone holds. Where the
prefix cache or another sequence holds it too, the sequence first gets a block of its own and a copy
of the rows before; so nothing published ever changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from llm_core.scheduling.attention_window import GONE, AttentionWindow
from llm_core.scheduling.block_pool import BlockPool
from llm_core.scheduling.prefix_cache import CachedBlock, PrefixCache
from llm_core.scheduling.sequence import TokenSequence

# So many blocks that a window has just left are kept: a draft's end is often taken back a little.
_SLACK = 2


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The first ``num_rows`` rows of ``source`` are to be copied to ``target``."""

    source: int
    target: int
    num_rows: int


class BlockTables:
    """The pool, the prefix cache, and the block tables of all sequences.

    With a ``window``, blocks that it has left are given back, and ``GONE`` stands in their places.
    """

    def __init__(
        self, num_blocks: int, block_size: int = 16, window: AttentionWindow | None = None
    ) -> None:
        self.window = window
        self.pool = BlockPool(num_blocks, block_size)
        self.cache = PrefixCache(self.pool)

    @property
    def num_available(self) -> int:
        """Blocks that can be had without taking any from a sequence."""
        return self.pool.num_free + self.cache.num_idle

    def num_blocks_of(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` positions."""
        return -(-num_tokens // self.pool.block_size)

    def num_needed(self, num_rows: int) -> float:
        """Blocks that any sequence can go on with, ``num_rows`` rows a step; without a window there
        is no such number (infinity)."""
        if self.window is None:
            return inf
        return self.window.num_blocks + _SLACK + self.num_blocks_of(num_rows) + 1

    def admit(self, sequence: TokenSequence, *, spare: int) -> list[BlockCopy] | None:
        """Blocks for all tokens of a sequence that has none, as many of them as possible from the
        cache; sets its computed length. Returns the copies that make it true, in order. With a
        window, blocks for as many more tokens as it sees; the others come with ``prepare``.

        None, and nothing changes, unless ``spare`` blocks would be available afterwards. One token
        at least is left to compute, since logits come from a row.
        """
        assert not sequence.block_ids, "admitted once"
        match = self.cache.match(sequence.token_ids, len(sequence.token_ids) - 1, sequence.salt)
        total = self._num_admitted(sequence, len(match.full))
        fresh = total - len(match.full)
        for entry in match.full:
            self.cache.hold(entry.block)
        if fresh + spare > self.num_available:
            for entry in reversed(match.full):
                self.cache.let_go(entry.block)
            return None
        sequence.block_ids = [entry.block for entry in match.full]
        sequence.block_keys = [entry.key for entry in match.full if entry.key is not None]
        sequence.computed_len = len(match.full) * self.pool.block_size + match.tail_len
        copies = [] if match.tail is None else self._start_in(match.tail, match.tail_len, sequence)
        sequence.block_ids += self._allocate(total - len(sequence.block_ids), sequence)
        self.slide(sequence)
        self.cache.counts.prompt_tokens += len(sequence.token_ids)
        self.cache.counts.hit_tokens += sequence.computed_len
        return copies

    def uncached_len(self, sequence: TokenSequence) -> int:
        """Rows that a sequence would have to compute if it were admitted now."""
        match = self.cache.match(sequence.token_ids, len(sequence.token_ids) - 1, sequence.salt)
        cached_len = len(match.full) * self.pool.block_size + match.tail_len
        return len(sequence.token_ids) - cached_len

    def prepare(self, sequence: TokenSequence, end: int) -> list[BlockCopy] | None:
        """Makes positions [computed, ``end``) of ``sequence`` writable. Returns the copies to make
        first, in order; None, and nothing changes, when too few blocks are available."""
        size = self.pool.block_size
        first = sequence.computed_len // size
        last = self.num_blocks_of(end)
        shared = [
            index
            for index in range(first, min(last, len(sequence.block_ids)))
            if self.pool.num_refs(sequence.block_ids[index]) > 1
        ]
        more = max(0, last - len(sequence.block_ids))
        if len(shared) + more > self.num_available:
            return None
        copies = []
        for index in shared:
            old = sequence.block_ids[index]
            (new,) = self._allocate(1, sequence)
            num_rows = max(0, sequence.computed_len - index * size)
            if num_rows > 0:
                copies.append(BlockCopy(old, new, num_rows))
            sequence.block_ids[index] = new
            self.cache.let_go(old)
        sequence.block_ids += self._allocate(more, sequence)
        return copies

    def publish(self, sequence: TokenSequence) -> None:
        """Keeps full blocks that are computed by now. Call after the forward that wrote them."""
        size = self.pool.block_size
        while (len(sequence.block_keys) + 1) * size <= sequence.computed_len:
            index = len(sequence.block_keys)
            tokens = tuple(sequence.token_ids[index * size : (index + 1) * size])
            key = self.cache.publish(sequence.block_ids[index], self._parent(sequence), tokens)
            assert key is not None, "a full block has a key"
            sequence.block_keys.append(key)

    def publish_tail(self, sequence: TokenSequence) -> None:
        """Keeps the computed rows of the last block too. The sequence is at its end: were it to
        write on, it would have to copy them."""
        size = self.pool.block_size
        index = len(sequence.block_keys)
        tokens = tuple(sequence.token_ids[index * size : sequence.computed_len])
        if not tokens or sequence.block_ids[index] == GONE:
            return
        if self.pool.num_refs(sequence.block_ids[index]) == 1:
            self.cache.publish(sequence.block_ids[index], self._parent(sequence), tokens)

    def slide(self, sequence: TokenSequence) -> None:
        """Gives back what the next rows of ``sequence`` do not see any more; the prefix cache keeps
        it while there is room. What is pinned stays whole, for others begin with it."""
        if self.window is None or sequence.is_pinned:
            return
        size = self.pool.block_size
        last_row_block = max(0, sequence.computed_len - 1) // size
        sequence.num_unseen = len(self.window.unseen(last_row_block)) * size
        next_block = sequence.computed_len // size
        for index in reversed(self.window.unseen(next_block - _SLACK)):
            block = sequence.block_ids[index]
            if block == GONE:
                break
            self.cache.let_go(block)
            sequence.block_ids[index] = GONE

    def cut(self, sequence: TokenSequence) -> None:
        """After tokens were taken from the end: blocks behind the last token are let go, and a
        block with fewer tokens than it had loses its key (for this sequence; the cache keeps it as
        what it is). If a window has left blocks that are seen again now, all are let go."""
        keep = self.num_blocks_of(len(sequence.token_ids))
        for block in reversed(sequence.block_ids[keep:]):
            self._let_go(block)
        del sequence.block_ids[keep:]
        next_block = sequence.computed_len // self.pool.block_size
        del sequence.block_keys[next_block:]
        if self.window is not None:
            first = self.window.unseen(next_block).stop
            if GONE in sequence.block_ids[first : next_block + 1]:
                self.release(sequence)

    def fork(self, source: TokenSequence, target: TokenSequence) -> None:
        """Lets ``target``, which has no blocks and equal tokens, share all that is computed."""
        assert not target.block_ids and target.token_ids == source.token_ids
        count = self.num_blocks_of(source.computed_len)
        target.block_ids = source.block_ids[:count]
        target.block_keys = list(source.block_keys)
        target.computed_len = source.computed_len
        for block in target.block_ids:
            if block != GONE:
                self.cache.hold(block)

    def release(self, sequence: TokenSequence) -> None:
        """Takes all blocks of a sequence; what is computed stays cached while there is room."""
        if sequence.block_ids:
            self.publish_tail(sequence)
        for block in reversed(sequence.block_ids):
            self._let_go(block)
        sequence.block_ids = []
        sequence.block_keys = []
        sequence.computed_len = 0

    def check(self, sequences: Iterable[TokenSequence]) -> None:
        """Asserts that pool, cache and the tables of ``sequences``, all there are, agree."""
        held = list(self.cache.check())
        size = self.pool.block_size
        for sequence in sequences:
            blocks = [block for block in sequence.block_ids if block != GONE]
            held += blocks
            assert len(set(blocks)) == len(blocks), "a block twice"
            self._check_gone(sequence)
            assert sequence.computed_len <= len(sequence.block_ids) * size, "KV has a place"
            assert len(sequence.block_ids) <= self.num_blocks_of(len(sequence.token_ids))
            assert len(sequence.block_keys) == sequence.computed_len // size, "all full published"
        self.pool.check(held)

    def _num_admitted(self, sequence: TokenSequence, num_cached: int) -> int:
        """Blocks in the table of a sequence that is admitted with the first ``num_cached``."""
        total = self.num_blocks_of(len(sequence.token_ids))
        if self.window is None:
            return total
        return min(total, num_cached + self.window.num_blocks)

    def _let_go(self, block: int) -> None:
        if block != GONE:
            self.cache.let_go(block)

    def _check_gone(self, sequence: TokenSequence) -> None:
        gone = [index for index, block in enumerate(sequence.block_ids) if block == GONE]
        if gone:
            assert self.window is not None, "blocks are given back by a window"
            unseen = self.window.unseen(sequence.computed_len // self.pool.block_size)
            assert gone == list(range(unseen.start, gone[-1] + 1)), "a hole behind the sinks"
            assert gone[-1] < unseen.stop, "what is seen is there"

    def _start_in(
        self, tail: CachedBlock, tail_len: int, sequence: TokenSequence
    ) -> list[BlockCopy]:
        """The block in which ``sequence`` goes on, with the first ``tail_len`` rows of ``tail``."""
        if self.cache.take_over(tail, tail_len):
            sequence.block_ids.append(tail.block)
            return []
        # The copy's target may be the evicted source itself, if no other block is to be had.
        (block,) = self._allocate(1, sequence)
        sequence.block_ids.append(block)
        return [] if block == tail.block else [BlockCopy(tail.block, block, tail_len)]

    def _allocate(self, count: int, sequence: TokenSequence) -> list[int]:
        missing = count - self.pool.num_free
        if missing > 0:
            self.cache.evict(missing)
        after = sequence.block_ids[-1] if sequence.block_ids else None
        return self.pool.allocate(count, after=after)

    def _parent(self, sequence: TokenSequence) -> bytes:
        return sequence.block_keys[-1] if sequence.block_keys else self.cache.root(sequence.salt)
