"""Compiles grammars for one vocabulary, within llguidance's own limits.

These bound the size of a grammar and the work of a step, not the time that compiling takes: see
``guide_check``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from llm_core.errors import InvalidRequestError
from llm_core.structured.grammar import Grammar

if TYPE_CHECKING:
    import llguidance


class Vocabulary(msgspec.Struct, frozen=True):
    """A tokenizer's tokens by id, as bytes, and which of them are no text or end a reply."""

    tokens: list[bytes]
    special_ids: list[int]
    eos_ids: list[int]
    bos_id: int | None

    def to_library(self, encode: Callable[[str], list[int]]) -> llguidance.LLTokenizer:
        """Indexes the vocabulary: 0.3 s for 49k tokens. ``encode`` writes text in tokens."""
        import llguidance

        return llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokenizer(self, encode)),
            n_vocab=len(self.tokens),
            eos_token=self.eos_ids,
        )

    def to_library_alone(self) -> llguidance.LLTokenizer:
        """As ``to_library``, without the tokenizer: text is written in the longest tokens that
        fit."""
        library: llguidance.LLTokenizer
        library = self.to_library(lambda text: library.greedy_tokenize(text))
        return library


class _Tokenizer:
    """A vocabulary by the names that llguidance looks for."""

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], list[int]]) -> None:
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = vocabulary.bos_id
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self._encode = encode

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", errors="replace")
        return self._encode(text)


def compile_grammar(library: llguidance.LLTokenizer, grammar: Grammar) -> llguidance.LLMatcher:
    """A matcher at the beginning of a reply. Raises InvalidRequestError when the grammar is wrong,
    too large, or matches nothing. May take for ever: see ``guide_check``."""
    import llguidance

    matcher = llguidance.LLMatcher(library, grammar.text, limits=_limits(), log_level=0)
    if matcher.is_error():
        raise InvalidRequestError(f"{grammar.name}: {first_line(matcher.get_error())}")
    # Some grammars are found to be impossible only when they are asked what may come first.
    trial = matcher.deep_copy()
    may_begin = any(trial.compute_bitmask())
    if trial.is_error():
        raise too_complex(grammar.name, trial)
    if not may_begin:
        raise InvalidRequestError(f"{grammar.name}: no reply can satisfy it")
    return matcher


def too_complex(name: str, matcher: llguidance.LLMatcher) -> InvalidRequestError:
    """The error for a matcher that has exceeded the limits; ``name`` is the parameter's."""
    why = first_line(matcher.get_error())
    return InvalidRequestError(f"{name}: it is too complex to follow: {why}")


def first_line(text: str) -> str:
    """The library's explanation, without its excerpt of the grammar and the place in it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"^at \d+\(\d+\): ", "", lines[0] if lines else "unknown reason")[:300]


def _limits() -> llguidance.LLParserLimits:
    import llguidance

    return llguidance.LLParserLimits(
        max_grammar_size=10_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=50_000,  # about 4 ms
        step_max_items=5_000,  # about 7 ms where a long text is forced
        max_lexer_states=20_000,  # about 2 kB each
        verbose_errors=False,
    )
