"""A drafter that is often right and checks its notifications, and a controller that pauses."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from llm_core.scheduling.block_tables import BlockCopy
from llm_core.scheduling.draft_tree import DraftTree
from llm_core.scheduling.sequence import TokenSequence
from llm_core.speculative.control.base import BatchState, FixedController
from llm_core.speculative.drafters.base import ComputedTokens, DraftRequest, DraftShape
from llm_core.speculative.drafters.tree_expansion import DrawCoupling

# For a drafter that is the target itself.
EXACT_COUPLING = DrawCoupling(bandwidth=1e-6, temperature_scale=1.0)


class RestingController(FixedController):
    """Alternates between random spans of steps with and without drafts. Within a span without,
    hidden states are not captured for a random number of steps from its start, possibly none."""

    def __init__(self, shape: DraftShape, *, seed: int, mean_steps: int = 6) -> None:
        super().__init__(shape)
        self._random = random.Random(seed)
        self._mean_steps = mean_steps
        self._left = self._no_capture = 0
        self._is_pausing = True

    def draft_shape(self, batch: BatchState) -> DraftShape | None:
        if self._left == 0:
            self._is_pausing = not self._is_pausing
            self._left = self._random.randint(1, 2 * self._mean_steps)
            self._no_capture = self._random.randint(0, self._left) if self._is_pausing else 0
        self._left -= 1
        self._no_capture -= self._no_capture > 0
        return None if self._is_pausing else super().draft_shape(batch)

    @property
    def wants_hidden_states(self) -> bool:
        return self._no_capture == 0


class GuessingDrafter:
    """Proposes random trees that often contain the right token, and checks that it is notified of
    every step of every sequence. Positions between two notifications came from the prefix cache."""

    name = "guessing"

    def __init__(
        self,
        next_token: Callable[[list[int]], int],
        vocab_size: int,
        *,
        seed: int = 0,
        accuracy: float = 0.7,
        feature_layers: tuple[int, ...] = (),
    ) -> None:
        """``next_token(tokens)`` is the right one."""
        self.feature_layers = feature_layers
        self.proposed: list[DraftTree] = []
        self.num_steps: dict[int, int] = {}
        self._next_token = next_token
        self._vocab_size = vocab_size
        self._random = random.Random(seed)
        self._accuracy = accuracy

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
            if self._random.random() < self._accuracy:
                token = self._next_token(sequence.token_ids + path)
            if len(path) < shape.max_depth and [*path, token] not in paths:
                parents.append(parent)
                paths.append([*path, token])
        tokens = tuple(path[-1] for path in paths[1:])
        tree = DraftTree(tokens, tuple(parents), tuple(0.5 for _ in tokens))
        tree.check()
        return tree

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        pass

    def observe_computed(self, computed: Sequence[ComputedTokens]) -> None:
        for row in computed:
            known = self.num_steps.get(row.sequence.seq_id, 0)
            # A draft that is committed counts from its reply on.
            assert row.sequence.num_steps in (1, known + 1), "no step is left out"
            assert row.start + row.length == row.sequence.computed_len
            assert row.length > 0
            if self.feature_layers and row.features is not None:
                assert list(row.rows) == sorted(set(row.rows))
                assert 0 <= row.rows[0] <= row.rows[-1] < len(row.features)
            self.num_steps[row.sequence.seq_id] = row.sequence.num_steps

    def truncate_sequence(self, sequence: TokenSequence, length: int) -> None:
        pass

    def close_sequence(self, sequence: TokenSequence) -> None:
        assert sequence.block_ids or not sequence.computed_len
        self.num_steps.pop(sequence.seq_id, None)
