"""A drafter that knows the answer now and then, and checks what it is told."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from llm_core.scheduling.block_tables import BlockCopy
from llm_core.scheduling.draft_tree import DraftTree
from llm_core.scheduling.sequence import TokenSequence
from llm_core.speculative.control.base import BatchState, FixedController
from llm_core.speculative.drafters.base import ComputedRows, DraftRequest, DraftShape
from llm_core.speculative.drafters.tree_expansion import Nearness

OF_THE_TARGET = Nearness(reach=1e-6, softness=1.0)  # of a drafter that is the target


class RestingController(FixedController):
    """Rests for some steps at a time, and listens again some steps before it drafts, or only then,
    or never stopped."""

    def __init__(self, shape: DraftShape, *, seed: int, mean_steps: int = 6) -> None:
        super().__init__(shape)
        self._random = random.Random(seed)
        self._mean_steps = mean_steps
        self._left = self._deaf = 0
        self._rests = True

    def shape(self, situation: BatchState) -> DraftShape | None:
        if self._left == 0:
            self._rests = not self._rests
            self._left = self._random.randint(1, 2 * self._mean_steps)
            self._deaf = self._random.randint(0, self._left) if self._rests else 0
        self._left -= 1
        self._deaf -= self._deaf > 0
        return None if self._rests else super().shape(situation)

    @property
    def listens(self) -> bool:
        return self._deaf == 0


class GuessingDrafter:
    """Random trees that know the right token now and then, and a check that it is told of every
    step of every sequence. Rows between two of them came from the prefix cache: a draft that lost
    its blocks may begin again with more than it had, if somebody else has said the same."""

    name = "guessing"

    def __init__(
        self,
        next_token: Callable[[list[int]], int],
        vocab_size: int,
        *,
        seed: int = 0,
        knows: float = 0.7,
        feature_layers: tuple[int, ...] = (),
    ) -> None:
        """``next_token(tokens)`` is the right one."""
        self.feature_layers = feature_layers
        self.proposed: list[DraftTree] = []
        self.num_steps: dict[int, int] = {}
        self._next_token = next_token
        self._vocab_size = vocab_size
        self._random = random.Random(seed)
        self._knows = knows

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        trees = [self._tree(request) for request in requests]
        self.proposed += trees
        return trees

    def _tree(self, request: DraftRequest) -> DraftTree:
        sequence, shape = request.sequence, request.shape
        assert sequence.remaining_len == 1, "all but the last token is computed"
        paths: list[list[int]] = [[]]
        parents: list[int] = []
        for _ in range(self._random.randint(0, shape.max_drafts)):
            parent = self._random.choice([-1, len(paths) - 2, len(paths) - 2])
            if shape.width == 1:
                parent = len(paths) - 2
            path = paths[parent + 1]
            token = self._random.randrange(self._vocab_size)
            if self._random.random() < self._knows:
                token = self._next_token(sequence.token_ids + path)
            if len(path) < shape.max_depth and [*path, token] not in paths:
                parents.append(parent)
                paths.append([*path, token])
        tokens = tuple(path[-1] for path in paths[1:])
        tree = DraftTree(tokens, tuple(parents), tuple(0.5 for _ in tokens))
        tree.check()
        return tree

    def copied(self, copies: Sequence[BlockCopy]) -> None:
        pass

    def observe(self, rows: Sequence[ComputedRows]) -> None:
        for row in rows:
            known = self.num_steps.get(row.sequence.seq_id, 0)
            # A draft that is committed counts from its reply on.
            assert row.sequence.num_steps in (1, known + 1), "no step is left out"
            assert row.start + row.length == row.sequence.computed_len
            assert row.length > 0
            if self.feature_layers and row.features is not None:
                assert list(row.rows) == sorted(set(row.rows))
                assert 0 <= row.rows[0] <= row.rows[-1] < len(row.features)
            self.num_steps[row.sequence.seq_id] = row.sequence.num_steps

    def truncate(self, sequence: TokenSequence, length: int) -> None:
        pass

    def close(self, sequence: TokenSequence) -> None:
        assert sequence.block_ids or not sequence.computed_len
        self.num_steps.pop(sequence.seq_id, None)
