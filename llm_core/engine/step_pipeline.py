"""Steps: launched, and learnt of at once, or one step later.

Usually the host plans a step, waits for its tokens, and plans the next one, while a device waits in
turn. Where the model chooses tokens where it computes, the next step can be planned and launched
before this one's tokens are known: they stay there, and the next step's rows take them::

    host     plan 1 | launch 1 | plan 2 | launch 2 | learn 1 | plan 3 | launch 3 | learn 2 ...
    device             | forward 1          | forward 2          | forward 3 ...

A reply that turns out to have ended in step 1 has a row too many in step 2, which is thrown away.
What cannot be planned blindly is learnt of at once: rows whose tokens the host chooses (a guide,
penalties, logprobs), prompts that end without a reply, and drafts that are verified.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from kernels.gpu.sampling.inputs import SamplingInputs
from llm_core.batch import ForwardResult, Launched, TokenChoices, tree_depths
from llm_core.engine.batch_builder import make_batch
from llm_core.engine.generation import Generation
from llm_core.messages import SamplingParams
from llm_core.model import ModelRunner
from llm_core.progress import Progress
from llm_core.scheduling import BlockTables, Chunk, StepPlan

_LARGEST_TOP_K = 1 << 30  # of any vocabulary


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A launched step. ``keeps`` are its rows of logits whose tokens the host chooses, where the
    model chooses the others."""

    plan: StepPlan
    keeps: tuple[int, ...]
    launched_ns: int
    launched: Launched


@dataclass(frozen=True, slots=True)
class _Done:
    """A step that was computed while the caller waited."""

    made: ForwardResult

    def result(self) -> ForwardResult:
        return self.made


class StepPipeline:
    """Launches steps; at most one is in flight when the next one is launched.

    ``overlaps``: whether one may be; without it each is learnt of at once.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tables: BlockTables,
        vocab_size: int,
        *,
        overlaps: bool,
        clock: Callable[[], int],
        progress: Progress,
    ) -> None:
        """``vocab_size``: the tokenizer's, beyond which the model's words are padding."""
        self._chooses = runner.samples_on_device
        self.overlaps = overlaps and self._chooses
        self._runner = runner
        self._tables = tables
        self._clock = clock
        self._progress = progress
        self._flight: InFlightStep | None = None
        self._rows: dict[int, int] = {}  # the last step's row of logits of each sequence
        self._learnt_ns = 0
        if self._chooses:
            runner.set_vocab_size(vocab_size)

    @property
    def is_in_flight(self) -> bool:
        """There is something to learn."""
        return self._flight is not None

    def launch(
        self, plan: StepPlan, generations: Mapping[int, Generation], *, wants_features: bool
    ) -> InFlightStep | None:
        """Begins a step; returns the one before it, if it is still to be learnt of.
        ``generations`` are the replies that get logits, by sequence."""
        launched_ns = self._clock()
        choices = self._choices(plan, generations) if self._chooses else None
        batch = make_batch(plan, self._tables, wants_features=wants_features, choices=choices)
        before = self._flight
        with self._progress.at("model"):
            for copy in plan.copies:
                self._runner.copy_block_rows(copy.source, copy.target, copy.num_rows)
            launched: Launched
            if choices is None:
                launched = _Done(self._runner.forward(batch))
            else:
                launched = self._runner.launch(batch)
        keeps = () if choices is None else choices.keeps
        self._flight = InFlightStep(plan, keeps, launched_ns, launched)
        return before

    def leave(self, kept: StepPlan) -> bool:
        """Leaves the step that was just launched in flight, if it may be: then its sequences expect
        their tokens. ``kept`` are its chunks, committed, of replies that have not ended meanwhile.
        """
        assert self._flight is not None
        if not self.overlaps or self._flight.keeps:
            return False
        if not all(c.wants_logits or c.sequence.remaining_len > 0 for c in kept.chunks):
            return False
        for chunk in kept.chunks:
            if chunk.wants_logits:
                chunk.sequence.expect()
        return True

    def take(self) -> InFlightStep | None:
        """The step in flight, to be learnt of now."""
        flight, self._flight = self._flight, None
        return flight

    def result(self, flight: InFlightStep) -> tuple[ForwardResult, int]:
        """What a step gave, and for how many nanoseconds it kept the device, about."""
        with self._progress.at("model"):
            result = flight.launched.result()
        now_ns = self._clock()
        duration_ns = now_ns - max(flight.launched_ns, self._learnt_ns)
        self._learnt_ns = now_ns
        return result, duration_ns

    def _choices(self, plan: StepPlan, generations: Mapping[int, Generation]) -> TokenChoices:
        """How each row of logits is used; and which rows are of tokens that only the device
        knows: the last ones of sequences that expect theirs."""
        table = _Table()
        keeps: list[int] = []
        sources: list[int] = []
        rows: dict[int, int] = {}
        for chunk in plan.chunks:
            sequence, row_sources = chunk.sequence, [-1] * chunk.num_rows
            if sequence.is_expecting and chunk.start + chunk.length == len(sequence.token_ids):
                row_sources[chunk.length - 1] = self._rows[sequence.seq_id]
            sources += row_sources
            if not chunk.wants_logits:
                continue
            rows[sequence.seq_id] = len(table)
            chosen = generations[sequence.seq_id].chosen_elsewhere
            if chosen is None:
                keeps += range(len(table), len(table) + 1 + len(chunk.tree))
            table.add(chunk, chosen)
        self._rows = rows
        return TokenChoices(table.inputs(), tuple(keeps), torch.tensor(sources, dtype=torch.int32))


class _Table:
    """The columns of ``SamplingInputs`` while they grow."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, int, float, float, int, int]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, chunk: Chunk, chosen: tuple[SamplingParams, int] | None) -> None:
        """The rows of a chunk's last token and of its drafts. None: it does not matter how."""
        first = len(chunk.sequence.token_ids)
        depths = [0, *(1 + depth for depth in tree_depths(chunk.tree.parents))]
        if chosen is None:
            self._rows += [(0.0, 0, 1.0, 0.0, 0, first + depth) for depth in depths]
            return
        params, seed = chosen
        top_k = min(params.top_k, _LARGEST_TOP_K)
        seed -= (seed >> 63) << 64  # the same 64 bits, signed
        self._rows += [
            (params.temperature, top_k, params.top_p, params.min_p, seed, first + depth)
            for depth in depths
        ]

    def inputs(self) -> SamplingInputs:
        columns = list(zip(*self._rows, strict=True)) or [()] * 6
        real, whole, long = torch.float32, torch.int32, torch.int64
        kinds = (real, whole, real, real, long, whole)
        return SamplingInputs(
            *(torch.tensor(c, dtype=kind) for c, kind in zip(columns, kinds, strict=True))
        )
