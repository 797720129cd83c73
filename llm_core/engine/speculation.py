"""Speculation within the engine's loop: drafts for a step's streams, and what came of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from llm_core.engine.generation import Generation
from llm_core.messages import Speculation
from llm_core.progress import Progress
from llm_core.scheduling import COMFORT_NS, EMPTY, DraftTree, Scheduler, StepPlan, TokenSequence
from llm_core.speculative import (
    BatchState,
    ComputedTokens,
    Controller,
    Drafter,
    DraftShape,
    SpeculationCounts,
)

# What a grammar forces is right unless the model splits the same text into other tokens.
_FORCED_PROBABILITY = 0.95
_MAX_FORCED = 8


class Speculator:
    """A drafter, the controller that decides about it, and the counts.

    ``drafter`` None: only what a guide forces is drafted.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        controller: Controller,
        *,
        max_context: int,
        clock: Callable[[], int],
        progress: Progress,
    ) -> None:
        self._progress = progress
        self._drafter = drafter
        self._controller = controller
        self._max_context = max_context
        self._clock = clock
        self._listens = True
        self._start_ns: int | None = None  # of a step in which streams go on
        self._counts = SpeculationCounts()

    @property
    def name(self) -> str:
        """Who drafts."""
        return "grammar" if self._drafter is None else self._drafter.name

    @property
    def wants_features(self) -> bool:
        """The target is to give out hidden states in this step."""
        return self._listens and self._drafter is not None and bool(self._drafter.feature_layers)

    def add_drafts(
        self, plan: StepPlan, scheduler: Scheduler, generations: Mapping[int, Generation]
    ) -> None:
        """Lets the plan's streams verify drafts too, where that is expected to gain time."""
        if self._drafter is not None and plan.copies:
            self._drafter.copy_blocks(plan.copies)
        streams = {
            index: generations[chunk.sequence.seq_id]
            for index, chunk in enumerate(plan.chunks)
            if chunk.wants_logits and chunk.length == 1 and chunk.sequence.is_decoding
        }
        self._start_ns = self._clock() if streams else None
        self._listens = True  # to prompts, whatever batch they will be drafted for in
        if not streams:
            return
        situation = BatchState(len(streams), plan.num_rows, self._is_patient(plan, streams))
        shape = None if self._drafter is None else self._controller.draft_shape(situation)
        self._listens = self._controller.wants_hidden_states
        if shape is None and not any(generation.is_guided for generation in streams.values()):
            return
        start_ns = self._clock()
        trees = self._controller.select_drafts(self._propose(plan, streams, shape), situation)
        for index, tree in zip(streams, trees, strict=True):
            if tree:
                scheduler.add_drafts(plan, index, tree)
        duration_ns = self._clock() - start_ns
        for counts in self._counts_of(streams.values()):
            counts.draft_ns += duration_ns

    def ran(self, plan: StepPlan, generations: Mapping[int, Generation], duration_ns: int) -> None:
        """The target computed the plan."""
        self._controller.record_forward(plan.num_rows, duration_ns)
        verifying = [generations[c.sequence.seq_id] for c in plan.chunks if c.tree]
        if verifying:
            for counts in self._counts_of(verifying):
                counts.verify_ns += duration_ns

    def finished(self) -> None:
        """All of a step is done: what it brought is on its way."""
        if self._start_ns is not None and self._drafter is not None:
            self._controller.record_step(self._clock() - self._start_ns)

    def verified(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """What ``accepted_path`` gave for a tree."""
        self._controller.record_accepted(tree, accepted)
        self._counts.add_drafts(tree)
        for depth in range(1, len(accepted)):
            self._counts.add_accepted(depth)

    def observe(
        self,
        plan: StepPlan,
        features: torch.Tensor | None,
        accepted: Mapping[int, Sequence[int]],
    ) -> None:
        """What the step made final; ``accepted`` are the rows by sequence where there were drafts.
        Called before sequences that have ended lose their blocks."""
        if self._drafter is None:
            return
        computed: list[ComputedTokens] = []
        first = 0
        for chunk in plan.chunks:
            kept = accepted.get(chunk.sequence.seq_id)
            rows: Sequence[int] = range(first, first + chunk.length)
            if kept is not None:
                is_chain = kept[-1] == len(kept) - 1
                rows = range(first, first + len(kept)) if is_chain else [first + i for i in kept]
            computed.append(ComputedTokens(chunk.sequence, chunk.start, rows, features))
            first += chunk.num_rows
        with self._progress.at("model"):
            self._drafter.observe_computed(computed)

    def truncate(self, sequence: TokenSequence, length: int) -> None:
        """See ``Drafter``."""
        if self._drafter is not None:
            self._drafter.truncate_sequence(sequence, length)

    def close(self, sequence: TokenSequence) -> None:
        """See ``Drafter``; the sequence still has its blocks."""
        if self._drafter is not None:
            self._drafter.close_sequence(sequence)

    def stats(self) -> Speculation:
        """Sums since the start."""
        return self._counts.snapshot()

    def _propose(
        self, plan: StepPlan, streams: Mapping[int, Generation], shape: DraftShape | None
    ) -> list[DraftTree]:
        """A tree for each stream: what its guide forces, else what the drafter thinks."""
        trees: dict[int, DraftTree] = {}
        requests = {}
        for index, generation in streams.items():
            # Drafts are kept behind the last token, within the context.
            room = self._max_context - len(plan.chunks[index].sequence.token_ids)
            forced = generation.forced_tokens()
            if forced:
                forced = forced[: max(0, min(_MAX_FORCED, room, generation.draft_room))]
                trees[index] = DraftTree.chain(forced, [_FORCED_PROBABILITY] * len(forced))
            elif shape is not None:
                fitting = shape
                if room < shape.max_drafts:
                    fitting = replace(shape, max_drafts=max(0, room))
                request = generation.draft_request(fitting)
                if min(request.shape.max_depth, request.shape.max_drafts) > 0:
                    requests[index] = request
        if self._drafter is not None and requests:
            start_ns = self._clock()
            with self._progress.at("model"):
                proposed = self._drafter.propose(list(requests.values()))
            self._controller.record_drafting(proposed, self._clock() - start_ns)
            for index, tree in zip(requests, proposed, strict=True):
                trees[index] = streams[index].allowed_drafts(tree)
        return [trees.get(index, EMPTY) for index in streams]

    def _is_patient(self, plan: StepPlan, streams: Mapping[int, Generation]) -> bool:
        """All streams have said more than their listeners can have heard."""
        soon_ns = self._clock() + COMFORT_NS
        deadlines = [plan.chunks[index].sequence.deadline_ns for index in streams]
        return all(deadline is not None and deadline > soon_ns for deadline in deadlines)

    def _counts_of(self, generations: Iterable[Generation]) -> Iterator[SpeculationCounts]:
        """The engine's and each reply's: a step's time is waited for by all of them."""
        yield self._counts
        for generation in generations:
            yield generation.speculation
