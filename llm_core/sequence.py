"""One request's tokens and how far their KV is computed.

::

    tokens  [0, cached) reused | [cached, computed) in KV | [computed, len) to compute
            [0, prompt_len) prompt                | [prompt_len, len) generated

There are no phases: a sequence always wants ``len - computed`` rows more. A long prompt, the rest
of a prompt after a prefix hit, and the one row of a decode step are the same thing.
"""

from __future__ import annotations

from collections.abc import Sequence


class TokenSequence:
    """Owns token ids and counts; the scheduler moves it about, the engine appends to it."""

    __slots__ = (
        "cached_len",
        "computed_len",
        "generates",
        "max_len",
        "num_steps",
        "prompt_len",
        "seq_id",
        "slot",
        "token_ids",
    )

    def __init__(
        self, seq_id: int, prompt_ids: Sequence[int], *, max_len: int, generates: bool = True
    ) -> None:
        """``max_len``: prompt and generated tokens together. ``generates`` False: the prompt is
        computed into the KV cache and nothing else."""
        assert 0 < len(prompt_ids) <= max_len, "a prompt has at least one token and fits"
        self.seq_id = seq_id
        self.token_ids = list(prompt_ids)
        self.prompt_len = len(prompt_ids)
        self.max_len = max_len
        self.generates = generates
        self.cached_len = 0
        self.computed_len = 0
        self.num_steps = 0
        self.slot: int | None = None

    @property
    def remaining_len(self) -> int:
        """Rows to compute before the next token can be chosen."""
        return len(self.token_ids) - self.computed_len

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def is_decoding(self) -> bool:
        """Has generated something, so that somebody is listening to its next token."""
        return len(self.token_ids) > self.prompt_len

    def append(self, token_id: int) -> None:
        """Adds a generated token; its own KV is not computed yet."""
        assert self.remaining_len == 0, "a token follows from a computed sequence only"
        assert len(self.token_ids) < self.max_len, "no token beyond max_len"
        self.token_ids.append(token_id)
