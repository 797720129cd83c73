"""Decides what each step computes. Moves sequences between lists and hands out blocks.

The one rule: every running sequence's computed count chases its length. A step gives the streams
their one row each, then prompts their rows in the policy's order, as far as the row budget goes;
prompts are cut where it ends. No tensors here.

::

    waiting --(a place, and blocks for all its tokens)--> running --> removed
       ^                                                   |  |
       +---- preempted: blocks taken, computed anew -------+  +--> parked: a draft that is computed
       +---- changed -------------------------------------------------+
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from llm_core.errors import EngineBusyError
from llm_core.scheduling.block_tables import BlockCopy, BlockTables
from llm_core.scheduling.draft_tree import EMPTY, DraftTree
from llm_core.scheduling.policy import Policy
from llm_core.scheduling.sequence import TokenSequence

# Of the places to wait, those that a priority below 0 leaves to others: one in so many.
_RESERVED_SHARE = 4


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [start, start + length) of ``sequence``; ``wants_logits`` of the last of them, and of
    the drafts of ``tree``, which follow it and are kept behind it until the step is over."""

    sequence: TokenSequence
    start: int
    length: int
    wants_logits: bool
    tree: DraftTree = EMPTY

    @property
    def num_rows(self) -> int:
        return self.length + len(self.tree)


@dataclass(slots=True)
class StepPlan:
    """Copies to make, in order, and then the chunks to compute in one batch."""

    copies: list[BlockCopy] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return sum(chunk.num_rows for chunk in self.chunks)


class Scheduler:
    """Owns the lists; the policy gives the order, ``tables`` the blocks."""

    def __init__(
        self,
        tables: BlockTables,
        policy: Policy,
        *,
        max_running: int,
        max_waiting: int,
        prompt_budget: int = 96,
        mixed_budget: int = 64,
    ) -> None:
        """``prompt_budget``: rows of a step in which no stream has one; ``mixed_budget``: prompt
        rows of a step with streams, small because every listener waits for that step."""
        assert prompt_budget > 0 and mixed_budget > 0, "a step can always compute something"
        self.tables = tables
        self.prompt_budget = prompt_budget
        self.mixed_budget = mixed_budget
        self.num_preempted = 0
        self._policy = policy
        self._max_running = max_running
        self._max_waiting = max_waiting
        # Bounded: add() refuses with EngineBusyError when max_waiting are waiting for which the
        # next step has no place (fewer for a priority below 0), or as many drafts are open.
        # Preempted ones always find room.
        self._waiting: list[TokenSequence] = []
        self._without_blocks: TokenSequence | None = None  # was not admitted for want of them
        self._running: list[TokenSequence] = []
        self._parked: list[TokenSequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    @property
    def ids(self) -> set[int]:
        """Of all sequences."""
        return {s.seq_id for s in (*self._waiting, *self._running, *self._parked)}

    def add(self, sequence: TokenSequence) -> None:
        """Queues a sequence. Raises EngineBusyError when there is no room to wait."""
        reserve = self._max_waiting // _RESERVED_SHARE if sequence.priority < 0 else 0
        if len(self._waiting) >= self._max_waiting + self._num_places - reserve:
            raise EngineBusyError(
                f"{len(self._running)} requests are running and {len(self._waiting)} waiting; "
                "try again later"
            )
        if sequence.is_open and len(self._parked) >= self._max_waiting:
            raise EngineBusyError(f"{len(self._parked)} drafts are open; try again later")
        self._waiting.append(sequence)

    def fork(self, source: TokenSequence, target: TokenSequence) -> None:
        """Queues ``target``, equal to ``source``, with all that is computed. Raises as ``add``."""
        self.add(target)
        self.tables.fork(source, target)
        self._settle(target)

    def changed(self, sequence: TokenSequence) -> None:
        """The tokens of a sequence were replaced, or it is not open any more."""
        had_blocks = bool(sequence.block_ids)
        self.tables.cut(sequence)
        if had_blocks and not sequence.block_ids and sequence in self._running:
            self._running.remove(sequence)  # a window had left what is seen again now
            self._waiting.append(sequence)
        self._settle(sequence)

    def remove(self, sequence: TokenSequence) -> None:
        """Takes a sequence out, finished or not; its blocks are free at once."""
        self._list_of(sequence).remove(sequence)
        self.tables.release(sequence)

    def schedule(self, now_ns: int = 0) -> StepPlan:
        """The next step. It must be run before anything else is called."""
        plan = StepPlan()
        self._make_room()
        streams = sorted(filter(_is_stream, self._running), key=self._policy.rank)
        prompts = [s for s in self._running if not _is_stream(s)] + self._waiting
        patient = [s for s in streams if prompts and self._policy.gives_way(s, now_ns)]
        for sequence in streams:
            if sequence not in patient:
                self._plan(plan, sequence, sequence.remaining_len)
        num_planned = len(plan.chunks)
        self._plan_prompts(plan, self.mixed_budget if plan.chunks else self.prompt_budget)
        if len(plan.chunks) == num_planned:  # no prompt could use the room that was made
            for sequence in patient:
                self._plan(plan, sequence, sequence.remaining_len)
        return plan

    def add_drafts(self, plan: StepPlan, index: int, tree: DraftTree) -> None:
        """Lets a stream's chunk compute drafts too, as many of the best as there are blocks for:
        nobody loses blocks to a guess."""
        chunk = plan.chunks[index]
        assert _is_stream(chunk.sequence) and chunk.wants_logits, "drafts follow a known token"
        end = chunk.start + 1
        room = len(chunk.sequence.block_ids) + self.tables.num_available
        tree = tree.best(room * self.tables.pool.block_size - end)
        copies = self.tables.prepare(chunk.sequence, end + len(tree))
        assert copies == [], "the chunk itself was prepared, and there is nothing behind it"
        plan.chunks[index] = replace(chunk, tree=tree)

    def settle_drafts(self, sequence: TokenSequence) -> None:
        """After its accepted drafts were appended and counted as computed: what is full may be
        shared, and what the others had is let go."""
        self.tables.publish(sequence)
        self.tables.cut(sequence)

    def commit(self, plan: StepPlan) -> None:
        """Counts the plan's rows as computed, but for drafts; only now may others share them."""
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.computed_len += chunk.length
            sequence.num_steps += 1
            self.tables.publish(sequence)
            self.tables.slide(sequence)
            if sequence.is_open:
                self._settle(sequence)

    def rows_ahead(self, sequence: TokenSequence) -> int:
        """Rows of prompts that are served before a sequence that is not here yet."""
        rank = self._policy.rank(sequence)
        prompts = [s for s in self._running if not _is_stream(s)] + self._waiting
        return sum(s.remaining_len for s in prompts if self._policy.rank(s) < rank)

    def check(self) -> None:
        """Asserts the invariants; true between any two calls."""
        everyone = [*self._waiting, *self._running, *self._parked]
        self.tables.check(everyone)
        assert len(self._running) <= self._max_running, "a place each"
        for sequence in everyone:
            assert 0 <= sequence.computed_len <= len(sequence.token_ids) <= sequence.max_len
            assert 0 <= sequence.cached_len < sequence.prompt_len <= len(sequence.token_ids)
        for sequence in (*self._waiting, *self._running):
            assert sequence.remaining_len > 0, "all who wait or run want rows"
        assert all(sequence.is_open for sequence in self._parked), "only drafts are parked"
        ids = [sequence.seq_id for sequence in everyone]
        assert len(set(ids)) == len(ids), "an id is used once"

    def _settle(self, sequence: TokenSequence) -> None:
        """Parks a draft that wants no rows, and wakes one that does."""
        place = self._list_of(sequence)
        if sequence.remaining_len == 0 and place is not self._parked:
            place.remove(sequence)
            self._parked.append(sequence)
        elif sequence.remaining_len > 0 and place is self._parked:
            place.remove(sequence)
            self._waiting.append(sequence)

    def _make_room(self) -> None:
        """Whoever waits with a higher priority gets the place of one who runs with a lower one, and
        its blocks where there are too few."""
        needy, self._without_blocks = self._without_blocks, None
        if needy is not None and needy in self._waiting:
            self._displace_for(needy)
        waiting = sorted(self._waiting, key=self._policy.rank)
        for sequence in waiting[self._num_places :]:
            if not self._displace_for(sequence):
                return

    def _displace_for(self, sequence: TokenSequence) -> bool:
        """Preempts the last in the policy's order, if it must give way to ``sequence``."""
        victim = max(self._running, key=self._policy.rank, default=None)
        if victim is None or not self._policy.displaces(sequence, victim):
            return False
        self._preempt(victim)
        return True

    def _plan_prompts(self, plan: StepPlan, budget: int) -> None:
        """Rows for whoever has more than one to compute. The first that finds no room keeps those
        behind it waiting too: overtaking would starve the long ones."""
        prompts = [s for s in self._running if not _is_stream(s)] + self._waiting
        is_full = False
        for sequence in sorted(prompts, key=self._policy.rank):
            if budget <= 0:
                return
            if sequence in self._waiting:
                is_full = is_full or not self._admit(plan, sequence)
                if is_full:
                    continue
            length = min(budget, sequence.remaining_len)
            if self._plan(plan, sequence, length):
                budget -= length

    def _admit(self, plan: StepPlan, sequence: TokenSequence) -> bool:
        """From waiting to running, with blocks for all its tokens; a block for each of the others
        must be left, so that it is not the next to be preempted."""
        if self._num_places == 0:
            return False
        if not sequence.block_ids:
            spare = len(self._running)
            while (copies := self.tables.admit(sequence, spare=spare)) is None:
                if not self._reclaim(sequence):
                    self._without_blocks = sequence
                    return False
            plan.copies += copies
            if sequence.num_steps == 0:
                sequence.cached_len = sequence.computed_len
        self._waiting.remove(sequence)
        self._running.append(sequence)
        return True

    def _plan(self, plan: StepPlan, sequence: TokenSequence, length: int) -> bool:
        """Adds rows of a running sequence to the plan, taking blocks from others if need be. False
        if it had to give up its own."""
        if sequence not in self._running:
            return False  # preempted for another one of this step
        end = sequence.computed_len + length
        while (copies := self.tables.prepare(sequence, end)) is None:
            if self._reclaim(sequence):
                continue
            victim = max(self._unplanned(plan), key=self._policy.rank)
            self._preempt(victim)
            if victim is sequence:
                return False
        plan.copies += copies
        wants_logits = sequence.generates and length == sequence.remaining_len
        plan.chunks.append(Chunk(sequence, sequence.computed_len, length, wants_logits))
        return True

    def _reclaim(self, needy: TokenSequence) -> bool:
        """Takes the blocks of one sequence that is not running; the last in the policy's order."""
        idle = (
            s
            for s in (*self._parked, *self._waiting)
            if s.block_ids and not s.is_pinned and s is not needy
        )
        victim = max(idle, key=self._policy.rank, default=None)
        if victim is None:
            return False
        self.tables.release(victim)
        return True

    def _preempt(self, victim: TokenSequence) -> None:
        """Back to waiting. What it has computed stays cached, if nobody needs the room."""
        self.tables.release(victim)
        self._running.remove(victim)
        self._waiting.append(victim)
        self.num_preempted += 1

    def _unplanned(self, plan: StepPlan) -> Iterator[TokenSequence]:
        planned = {chunk.sequence.seq_id for chunk in plan.chunks}
        return (s for s in self._running if s.seq_id not in planned)

    @property
    def _num_places(self) -> int:
        return self._max_running - len(self._running)

    def _list_of(self, sequence: TokenSequence) -> list[TokenSequence]:
        for some in (self._running, self._waiting, self._parked):
            if sequence in some:
                return some
        raise AssertionError("only a sequence that was added can be removed")


def _is_stream(sequence: TokenSequence) -> bool:
    """Somebody listens, and all it wants is its next token."""
    return sequence.is_decoding and sequence.remaining_len == 1
