"""KV slots: who uses which, and what of earlier requests can be used again.

Each slot is one contiguous cache. When its sequence ends, the slot keeps the token ids whose KV it
holds. A new request starts from the longest beginning it shares with any slot, free or busy:

- in place, when a free slot's content goes on as the new request does (the same caller's next
  turn): nothing is moved;
- by copying the shared beginning into another free slot, when the source is busy or would lose
  much (callers who share a system prompt).

Reuse compares token ids, never hashes. Only rows already computed by a finished step count. No
tensors here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llm_core.sequence import TokenSequence

# A free slot is continued in place if this many of its tokens at most are lost by it: computing
# one row costs about as much as copying a hundred (135M model, 2-core EPYC).
_MAX_LOST_LEN = 32
_MAX_LOST_SHARE = 4  # or a quarter of what is reused
_MIN_COPY_LEN = 8  # a shorter gain is not worth a copy


@dataclass(slots=True)
class Slot:
    """``token_ids`` is what a free slot's KV holds; a busy slot's content is its owner's."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    owner: TokenSequence | None = None
    last_used: int = 0

    @property
    def content(self) -> list[int]:
        return self.token_ids if self.owner is None else self.owner.token_ids

    @property
    def computed_len(self) -> int:
        """Positions whose KV is valid."""
        return len(self.token_ids) if self.owner is None else self.owner.computed_len


@dataclass(frozen=True, slots=True)
class PrefixCopy:
    """KV positions [0, length) of ``source`` are to be copied to ``target`` before the step."""

    source: int
    target: int
    length: int


class SlotTable:
    """All slots of an engine."""

    def __init__(self, num_slots: int) -> None:
        assert num_slots > 0, "an engine has at least one slot"
        self._slots = [Slot(index) for index in range(num_slots)]
        self._tick = 0

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def num_free(self) -> int:
        return sum(slot.owner is None for slot in self._slots)

    @property
    def cached_len(self) -> int:
        """Tokens with valid KV, in all slots together."""
        return sum(slot.computed_len for slot in self._slots)

    def acquire(self, sequence: TokenSequence) -> PrefixCopy | None:
        """Gives ``sequence`` a free slot (there must be one) and as much cached prefix as possible.

        Sets its slot, cached and computed lengths, and returns the copy that makes them true, if
        one is needed. One prompt token at least is left to compute, since logits come from a row.
        """
        limit = sequence.prompt_len - 1
        shared = [self._shared_len(slot, sequence.token_ids, limit) for slot in self._slots]
        source = max(self._slots, key=lambda s: (shared[s.index], s.owner is None, s.last_used))
        target = self._target(source, shared[source.index])
        copy = None
        if shared[source.index] >= shared[target.index] + _MIN_COPY_LEN:
            copy = PrefixCopy(source.index, target.index, shared[source.index])
            self._touch(source)
        cached_len = copy.length if copy else shared[target.index]
        target.owner = sequence
        target.token_ids = []
        sequence.slot = target.index
        sequence.cached_len = sequence.computed_len = cached_len
        self._touch(target)
        return copy

    def release(self, sequence: TokenSequence) -> None:
        """Frees the sequence's slot; what is computed stays as a prefix for others."""
        assert sequence.slot is not None, "only a sequence that has a slot can release it"
        slot = self._slots[sequence.slot]
        assert slot.owner is sequence, "a slot is released by its owner"
        slot.token_ids = sequence.token_ids[: sequence.computed_len]
        slot.owner = None
        sequence.slot = None
        self._touch(slot)

    def check(self, running: Sequence[TokenSequence]) -> None:
        """Asserts that slots and running sequences agree."""
        owners = [slot.owner for slot in self._slots if slot.owner is not None]
        assert len(owners) == len(running), "as many busy slots as running sequences"
        for sequence in running:
            assert sequence.slot is not None, "a running sequence has a slot"
            assert self._slots[sequence.slot].owner is sequence, "the slot knows its owner"
        for slot in self._slots:
            assert 0 <= slot.computed_len <= len(slot.content), "KV of known tokens only"

    def _shared_len(self, slot: Slot, token_ids: list[int], limit: int) -> int:
        return common_prefix_len(slot.content, token_ids, min(limit, slot.computed_len))

    def _target(self, source: Slot, shared_len: int) -> Slot:
        """``source`` if it loses little, else the free slot that is empty or longest unused."""
        lost_len = source.computed_len - shared_len
        few = max(_MAX_LOST_LEN, shared_len // _MAX_LOST_SHARE) if shared_len > 0 else 0
        if source.owner is None and lost_len <= few:
            return source
        free = [slot for slot in self._slots if slot.owner is None]
        assert free, "acquire needs a free slot"
        others = [slot for slot in free if slot is not source]
        return min(others or free, key=lambda slot: (slot.computed_len > 0, slot.last_used))

    def _touch(self, slot: Slot) -> None:
        self._tick += 1
        slot.last_used = self._tick


def common_prefix_len(a: list[int], b: list[int], limit: int) -> int:
    """How many of the first ``limit`` tokens are the same. Compares by slices, at C speed."""
    limit = min(limit, len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    low, high = 0, limit  # a[:low] == b[:low], a[:high] != b[:high]
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
