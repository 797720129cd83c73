"""Guided decoding: at every step, which tokens keep the reply within a schema, pattern or choice.

The work is done by llguidance: a grammar over bytes, walked along the vocabulary's prefix tree.
It takes some tens of microseconds a token, and never refuses a spelling that the tokenizer allows.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from llm_core.errors import InvalidRequestError
from llm_core.messages import Guide, ToolFormat
from llm_core.sampling import BoolRow
from llm_core.structured.compiler import Vocabulary, compile_grammar, too_complex
from llm_core.structured.grammar import Grammar, grammar_of, guide_key
from llm_core.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

_Result = TypeVar("_Result")

# Every operation delays the step of all replies. What people write takes 0.05 ms a token; up to
# 2 ms for the first token of a long string, up to 5 ms to copy a compiled grammar.
_MAX_OPERATION_NS = 20_000_000
_BURST_NS = 100_000_000
_NS_PER_TOKEN = 2_000_000

_MAX_KEPT = 128
_MAX_KEPT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class CompiledGuide:
    """A guide that replies can begin with. ``num_bytes``: memory, about."""

    matcher: llguidance.LLMatcher
    name: str
    num_bytes: int


class GuideState:
    """The place of one reply in its grammar.

    All methods raise InvalidRequestError when the grammar grows beyond its limits, which may
    happen only at the tokens that a reply takes; and when it has used more CPU time than a reply
    may. The state is unusable then.
    """

    def __init__(
        self,
        compiled: CompiledGuide,
        vocab_size: int,
        *,
        clock: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        """``clock``: CPU time of the thread in nanoseconds."""
        self._name = compiled.name
        self._vocab_size = vocab_size
        self._bits = np.zeros((vocab_size + 31) // 32, dtype=np.int32)
        self._clock = clock
        self._allowance_ns = _BURST_NS
        self._matcher = compiled.matcher
        self._matcher = self._timed(compiled.matcher.deep_copy)

    @property
    def is_complete(self) -> bool:
        """Nothing can follow but the end of the reply."""
        return self._matcher.is_stopped()

    def allowed(self) -> BoolRow:
        """bool [vocab]: what may come next; tokens that end the reply only where it may end.
        Changes nothing."""
        pointer, num_bytes = self._bits.ctypes.data, self._bits.nbytes
        self._timed(lambda: self._matcher.unsafe_compute_mask_ptr(pointer, num_bytes))
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")
        return bits[: self._vocab_size].view(np.bool_)

    def accept(self, token_id: int) -> None:
        """Moves on by an allowed token."""
        self._allowance_ns += _NS_PER_TOKEN
        self._timed(lambda: self._matcher.consume_token(token_id))

    def forced(self) -> list[int]:
        """What must come next, as the tokenizer would write it; [] where there is a choice.
        Changes nothing. The reply may still come in other tokens of the same text."""
        return [] if self.is_complete else self._timed(self._matcher.compute_ff_tokens)

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these may follow, one after another. Changes nothing."""
        if self.is_complete:
            return 0
        return self._timed(lambda: self._matcher.validate_tokens(list(token_ids)))

    def _timed(self, operation: Callable[[], _Result]) -> _Result:
        start_ns = self._clock()
        result = operation()
        duration_ns = self._clock() - start_ns
        if self._matcher.is_error():
            raise too_complex(self._name, self._matcher)
        self._allowance_ns -= duration_ns
        if duration_ns > _MAX_OPERATION_NS or self._allowance_ns < 0:
            raise InvalidRequestError(f"{self._name}: it takes too much time to follow")
        return result


class GuideCompiler:
    """Guides compiled for one tokenizer. They are kept, as are the errors of those that cannot be
    followed; the least recently used go first."""

    def __init__(self, tokenizer: Tokenizer, tool_format: ToolFormat) -> None:
        self._tokenizer = tokenizer
        self._tool_format = tool_format
        self._lock = threading.Lock()
        self._library: llguidance.LLTokenizer | None = None
        self._kept: OrderedDict[bytes, CompiledGuide | InvalidRequestError] = OrderedDict()
        self._num_bytes = 0

    @property
    def vocabulary(self) -> Vocabulary:
        """What guides are compiled for. Raises InvalidRequestError when no guide can be."""
        tokenizer = self._tokenizer
        if not tokenizer.eos_ids:
            raise InvalidRequestError("this model has no end token, so no guide can end its reply")
        return Vocabulary(
            tokens=tokenizer.token_bytes,
            special_ids=list(tokenizer.control_tokens.values()),
            eos_ids=sorted(tokenizer.eos_ids),
            bos_id=tokenizer.bos_id,
        )

    @property
    def tool_format(self) -> ToolFormat:
        """How calls of tools are written."""
        return self._tool_format

    def start(self, guide: Guide) -> GuideState:
        """The beginning of a reply. A guide that is not kept is compiled, however long that takes:
        the worker sees to it that it is kept. Raises InvalidRequestError."""
        key = guide_key(guide)
        compiled = self.find(key)
        if compiled is None:
            compiled = self.compile(grammar_of(guide, self._tool_format))
            self.keep(key, compiled)
        return GuideState(compiled, self._tokenizer.vocab_size)

    def find(self, key: bytes) -> CompiledGuide | None:
        """The guide of this key, if it is kept. Raises InvalidRequestError when its error is."""
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        outcome = self._kept[key]
        if isinstance(outcome, InvalidRequestError):
            raise InvalidRequestError(str(outcome))
        return outcome

    def keep(self, key: bytes, outcome: CompiledGuide | InvalidRequestError) -> None:
        """Keeps what has become of the guide of this key."""
        self._forget(key)
        self._kept[key] = outcome
        self._num_bytes += _num_bytes(outcome)
        while len(self._kept) > 1 and (
            len(self._kept) > _MAX_KEPT or self._num_bytes > _MAX_KEPT_BYTES
        ):
            self._forget(next(iter(self._kept)))

    def compile(self, grammar: Grammar, num_bytes: int = 0) -> CompiledGuide:
        """Compiles for as long as it takes. Any thread. ``num_bytes``: the memory it is known to
        need. Raises InvalidRequestError."""
        matcher = compile_grammar(self.read_vocabulary(), grammar)
        return CompiledGuide(matcher, grammar.name, num_bytes)

    def read_vocabulary(self) -> llguidance.LLTokenizer:
        """Indexes it when called first, which takes 0.3 s for 49k tokens. Any thread. Raises
        InvalidRequestError when the model can follow no guide."""
        with self._lock:
            if self._library is None:
                self._library = self.vocabulary.to_library(self._tokenizer.encode)
            return self._library

    def _forget(self, key: bytes) -> None:
        outcome = self._kept.pop(key, None)
        if outcome is not None:
            self._num_bytes -= _num_bytes(outcome)


def _num_bytes(outcome: CompiledGuide | InvalidRequestError) -> int:
    return outcome.num_bytes if isinstance(outcome, CompiledGuide) else 0
