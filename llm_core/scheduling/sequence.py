"""One request's tokens, the blocks that hold their KV, and how far that is computed.

::

    tokens  [0, cached) reused | [cached, computed) in KV | [computed, len) to compute
            [0, prompt_len) prompt                | [prompt_len, len) generated
    blocks  [0, block_size) [block_size, 2 * block_size) ...   at least up to computed

There are no phases: a sequence always wants ``len - computed`` rows more. A long prompt, the rest
of a prompt after a prefix hit, the one row of a decode step, the changed end of a draft and the
repetition of what was lost to another sequence are the same thing.
"""

from __future__ import annotations

from collections.abc import Sequence

from llm_core.messages import Downgrade

UNKNOWN_ID = -1  # stands for a token that a device has chosen and not told yet


class TokenSequence:
    """Owns token ids, block table and counts; the scheduler moves it about, its owner appends.

    ``block_keys`` are the prefix cache's names of the first blocks, all full and computed.
    ``is_open``: a draft; it stays when all is computed, until it is ended, and its tokens may
    change. ``is_pinned``: its blocks are never taken from it. ``deadline_ns`` (monotonic) is the
    instant at which its next token is needed; None: soon, but nobody counts. ``num_dropped``:
    messages that were left out of the prompt because they did not fit; ``num_unseen``: tokens that
    the last computed row does not see, because a window has left them; ``downgrades``: what was
    given up to be in time. ``is_expecting``: the last token is chosen, but not known here yet.
    """

    __slots__ = (
        "arrival_ns",
        "block_ids",
        "block_keys",
        "cached_len",
        "computed_len",
        "deadline_ns",
        "downgrades",
        "generates",
        "is_expecting",
        "is_open",
        "is_pinned",
        "max_len",
        "num_dropped",
        "num_steps",
        "num_unseen",
        "priority",
        "prompt_len",
        "salt",
        "seq_id",
        "token_ids",
    )

    def __init__(
        self,
        seq_id: int,
        prompt_ids: Sequence[int],
        *,
        max_len: int,
        generates: bool = True,
        is_open: bool = False,
        salt: str = "",
        priority: int = 0,
        arrival_ns: int = 0,
        deadline_ns: int | None = None,
    ) -> None:
        """``max_len``: prompt and generated tokens together. ``generates`` False: the prompt is
        computed into the KV cache and nothing else. ``salt``: prefixes are shared within it."""
        assert 0 < len(prompt_ids) <= max_len, "a prompt has at least one token and fits"
        self.seq_id = seq_id
        self.token_ids = list(prompt_ids)
        self.prompt_len = len(prompt_ids)
        self.max_len = max_len
        self.generates = generates
        self.is_open = is_open
        self.is_pinned = False
        self.is_expecting = False
        self.salt = salt
        self.priority = priority
        self.arrival_ns = arrival_ns
        self.deadline_ns = deadline_ns
        self.cached_len = 0
        self.computed_len = 0
        self.num_steps = 0
        self.num_dropped = 0
        self.num_unseen = 0
        self.downgrades: tuple[Downgrade, ...] = ()
        self.block_ids: list[int] = []
        self.block_keys: list[bytes] = []

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
        # What was expected may come when the KV before it was lost to another sequence.
        assert self.remaining_len == 0 or self.is_expecting, "a token follows from what is computed"
        assert len(self.token_ids) < self.max_len, "no token beyond max_len"
        self.token_ids.append(token_id)
        self.is_expecting = False

    def expect(self) -> None:
        """The next token is chosen, but not known here yet: something stands for it, so that the
        step that computes it can be planned. ``take_back`` and ``append`` follow then."""
        self.append(UNKNOWN_ID)
        self.is_expecting = True

    def take_back(self) -> None:
        """Takes away what stands for the expected token."""
        assert self.is_expecting and self.token_ids[-1] == UNKNOWN_ID, "nothing stands for a token"
        self.token_ids.pop()

    def replace(self, prompt_ids: Sequence[int]) -> int:
        """Makes a draft's tokens these; returns how many of the first ones stay."""
        assert not self.is_decoding, "only a prompt is replaced"
        assert 0 < len(prompt_ids) <= self.max_len, "a prompt has at least one token and fits"
        kept_len = common_prefix_len(self.token_ids, prompt_ids)
        self.token_ids[kept_len:] = prompt_ids[kept_len:]
        self.prompt_len = len(self.token_ids)
        self.computed_len = min(self.computed_len, kept_len)
        self.cached_len = min(self.cached_len, self.prompt_len - 1)
        return kept_len


def common_prefix_len(a: Sequence[int], b: Sequence[int]) -> int:
    """How many of the first tokens are the same. Compares by slices, at C speed."""
    limit = min(len(a), len(b))
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
