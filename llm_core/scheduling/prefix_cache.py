"""Blocks whose KV is kept because another request may begin alike. No tensors here.

A full block is known by a key: a hash over its tokens and the key of the block before it, so one
lookup says that *everything* up to its end is the same. Keys start from the tenant's salt, are
keyed with a secret of this process, and tokens are compared on a hit all the same, so no caller can
be given another one's KV. A block that is not full is kept too, below its parent: what goes on from
within it copies the rows that agree, so a conversation cut at any token loses none before it.

The cache holds a reference to each of its blocks; those that nobody else holds are idle and are
given up, the longest idle first, when blocks are needed. A sequence lets go of its last block
first, so a block never goes before those that continue it.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from llm_core.scheduling.block_pool import BlockPool
from llm_core.scheduling.sequence import common_prefix_len

_MAX_SIBLINGS = 64  # looked at for a partial hit, the newest first: a bound on the time it takes


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """``tokens`` are those whose KV is in ``block``; ``key`` is None when they do not fill it."""

    block: int
    parent: bytes
    tokens: tuple[int, ...]
    key: bytes | None


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached beginning: whole blocks, and ``tail_len`` rows of one more."""

    full: list[CachedBlock]
    tail: CachedBlock | None
    tail_len: int


@dataclass(slots=True)
class CacheCounts:
    """Since the start. Tokens of admitted prompts, and how many of them were not computed."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    evicted_blocks: int = 0


class PrefixCache:
    """Finds, keeps and gives up blocks of ``pool``."""

    def __init__(self, pool: BlockPool) -> None:
        self.counts = CacheCounts()
        self._pool = pool
        self._secret = secrets.token_bytes(32)
        self._by_key: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self._children: dict[bytes, dict[int, CachedBlock]] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # the longest idle first

    @property
    def num_idle(self) -> int:
        """Blocks that can be given up."""
        return len(self._idle)

    @property
    def cached_len(self) -> int:
        """Tokens whose KV is kept."""
        return sum(len(entry.tokens) for entry in self._by_block.values())

    def root(self, salt: str) -> bytes:
        """The parent of first blocks."""
        return self._hash(b"root", salt.encode("utf-8", errors="replace"))

    def match(self, token_ids: Sequence[int], limit: int, salt: str) -> Match:
        """What is cached of the first ``limit`` tokens. Holds nothing."""
        size = self._pool.block_size
        parent, full = self.root(salt), list[CachedBlock]()
        while (len(full) + 1) * size <= limit:
            tokens = tuple(token_ids[len(full) * size : (len(full) + 1) * size])
            entry = self._by_key.get(self._key(parent, tokens))
            if entry is None or entry.tokens != tokens or entry.parent != parent:
                break
            full.append(entry)
            assert entry.key is not None, "found by its key"
            parent = entry.key
        rest = tuple(token_ids[len(full) * size : min(limit, (len(full) + 1) * size)])
        agreed = [(common_prefix_len(e.tokens, rest), e) for e in self._siblings(parent)]
        tail_len, tail = max(agreed, key=lambda item: item[0], default=(0, None))
        return Match(full, tail if tail_len else None, tail_len)

    def publish(self, block: int, parent: bytes, tokens: tuple[int, ...]) -> bytes | None:
        """Keeps a computed block. Returns its key, None if it is not full.

        A block that says nothing new is not kept, one that another says better is given up.
        """
        key = self._key(parent, tokens) if len(tokens) == self._pool.block_size else None
        if key in self._by_key:
            return key
        for sibling in list(self._siblings(parent)):
            shared = common_prefix_len(sibling.tokens, tokens)
            if shared == len(tokens):
                return key  # a partial block that is the beginning of another
            if shared == len(sibling.tokens) and sibling.block in self._idle:
                self._forget(sibling)
                self._pool.release(sibling.block)
        entry = CachedBlock(block, parent, tokens, key)
        self._pool.retain(block)
        self._by_block[block] = entry
        self._children.setdefault(parent, {})[block] = entry
        if key is not None:
            self._by_key[key] = entry
        return key

    def hold(self, block: int) -> None:
        """One more sequence uses ``block``."""
        self._pool.retain(block)
        self._idle.pop(block, None)

    def let_go(self, block: int) -> None:
        """One sequence less uses ``block``."""
        self._pool.release(block)
        if block in self._by_block and self._pool.num_refs(block) == 1:
            self._idle[block] = None

    def take_over(self, entry: CachedBlock, tail_len: int) -> bool:
        """Gives a partial block to the one sequence that goes on behind all its rows; the cache's
        reference becomes the sequence's. False when it must be copied instead."""
        if entry.key is not None or entry.block not in self._idle or tail_len < len(entry.tokens):
            return False
        self._forget(entry)
        return True

    def evict(self, count: int) -> None:
        """Gives up ``count`` idle blocks; there must be as many."""
        for _ in range(count):
            block = next(iter(self._idle))
            self._forget(self._by_block[block])
            self._pool.release(block)
        self.counts.evicted_blocks += count

    def check(self) -> Iterator[int]:
        """Asserts the invariants; yields the blocks that the cache holds."""
        for entry in self._by_block.values():
            refs = self._pool.num_refs(entry.block)
            assert refs >= 1, "a cached block is held"
            assert (refs == 1) == (entry.block in self._idle), "idle blocks are listed"
            assert 0 < len(entry.tokens) <= self._pool.block_size
            assert (entry.key is not None) == (len(entry.tokens) == self._pool.block_size)
            assert self._children[entry.parent][entry.block] is entry
            if entry.key is not None:
                assert self._by_key[entry.key] is entry
                assert entry.key == self._key(entry.parent, entry.tokens)
            yield entry.block
        assert self._idle.keys() <= self._by_block.keys(), "only cached blocks are idle"
        assert len(self._by_key) == sum(e.key is not None for e in self._by_block.values())
        assert sum(map(len, self._children.values())) == len(self._by_block)

    def _siblings(self, parent: bytes) -> Iterator[CachedBlock]:
        return islice(reversed(self._children.get(parent, {}).values()), _MAX_SIBLINGS)

    def _forget(self, entry: CachedBlock) -> None:
        del self._by_block[entry.block]
        self._idle.pop(entry.block, None)
        siblings = self._children[entry.parent]
        del siblings[entry.block]
        if not siblings:
            del self._children[entry.parent]
        if entry.key is not None:
            del self._by_key[entry.key]

    def _key(self, parent: bytes, tokens: tuple[int, ...]) -> bytes:
        return self._hash(parent, array("q", tokens).tobytes())

    def _hash(self, parent: bytes, content: bytes) -> bytes:
        return hashlib.blake2b(parent + content, digest_size=16, key=self._secret).digest()
