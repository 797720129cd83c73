"""Guided decoding: at every step, which tokens keep the reply within a schema, pattern or choice.

The work is done by llguidance: a grammar over bytes, walked along the vocabulary's prefix tree.
It takes some tens of microseconds a token, and never refuses a spelling that the tokenizer allows.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from llm_core.errors import InvalidRequestError
from llm_core.messages import (
    ChoiceGuide,
    Guide,
    JsonGuide,
    RegexGuide,
    ToolFormat,
    ToolGuide,
    ToolSpec,
)
from llm_core.sampling import BoolRow
from llm_core.structured.arguments_schema import close_objects, move_references
from llm_core.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

logger = logging.getLogger(__name__)

# A grammar is compiled, and asked, between two steps of everybody's reply. Within these bounds and
# those of `_limits` the first takes 1 to 30 ms for what people write, 0.2 s at worst; the second
# 0.1 ms, 25 ms at worst.
MAX_GUIDE_CHARS = 32_768
MAX_PATTERN_CHARS = 1_000  # also of a text that must be said as it is
_MAX_CHOICES = 1_000
_REMARKS = frozenset(("title", "description", "default", "examples", "$comment"))
_NUM_CACHED = 32

# One way to put spaces, the one that models write most: free whitespace is where small ones get
# lost, line after line.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GuideState:
    """Where one reply stands in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, name: str) -> None:
        """``name``: of the parameter that the grammar is of."""
        self._matcher = matcher
        self._name = name
        self._vocab_size = vocab_size
        self._bits = np.zeros((vocab_size + 31) // 32, dtype=np.int32)

    @property
    def is_complete(self) -> bool:
        """Nothing can follow but the end of the reply."""
        return self._matcher.is_stopped()

    def allowed(self) -> BoolRow:
        """bool [vocab]: what may come next; tokens that end the reply only where it may end.

        Changes nothing. Raises InvalidRequestError when the grammar grows beyond its limits: that
        is found only where a reply takes it there.
        """
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")
        return bits[: self._vocab_size].view(np.bool_)

    def accept(self, token_id: int) -> None:
        """Moves on by an allowed token. Raises InvalidRequestError as ``allowed``."""
        self._matcher.consume_token(token_id)
        self._check()

    def forced(self) -> list[int]:
        """What must come next, as the tokenizer would write it; [] where there is a choice.
        Changes nothing. The reply may still come in other tokens of the same text."""
        return [] if self.is_complete else self._matcher.compute_ff_tokens()

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these may follow, one after another. Changes nothing."""
        return 0 if self.is_complete else self._matcher.validate_tokens(list(token_ids))

    def _check(self) -> None:
        if self._matcher.is_error():
            why = _first_line(self._matcher.get_error())
            raise InvalidRequestError(f"{self._name}: it is too much to follow: {why}")


class GuideCompiler:
    """Grammars for one tokenizer. Compiled ones are kept, the least recently used go first."""

    def __init__(self, tokenizer: Tokenizer, tool_format: ToolFormat) -> None:
        self._tokenizer = tokenizer
        self._tool_format = tool_format
        self._lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._cache: OrderedDict[Guide, tuple[llguidance.LLMatcher, str]] = OrderedDict()

    def prepare(self) -> None:
        """Reads the vocabulary (0.3 s for 49k tokens) in a thread, so that no request waits."""
        if self._tokenizer.eos_ids:
            threading.Thread(target=self._read_vocabulary, name="guide", daemon=True).start()

    def start(self, guide: Guide) -> GuideState:
        """The beginning of a reply. Raises InvalidRequestError for what cannot be a guide."""
        compiled = self._cache.get(guide)
        if compiled is None:
            compiled = self._compile(guide)
            self._cache[guide] = compiled
            if len(self._cache) > _NUM_CACHED:
                self._cache.popitem(last=False)
        self._cache.move_to_end(guide)
        matcher, name = compiled
        return GuideState(matcher.deep_copy(), self._tokenizer.vocab_size, name)

    def _compile(self, guide: Guide) -> tuple[llguidance.LLMatcher, str]:
        """The grammar, and the name of the parameter that it is of."""
        import llguidance

        grammar, name = _grammar(guide, self._tool_format)
        matcher = llguidance.LLMatcher(
            self._read_vocabulary(),
            grammar,
            limits=_limits(),
            log_level=0,
        )
        if matcher.is_error():
            raise InvalidRequestError(f"{name}: {_first_line(matcher.get_error())}")
        # Some grammars are found to be impossible only when they are asked what may come first.
        if not GuideState(matcher.deep_copy(), self._tokenizer.vocab_size, name).allowed().any():
            raise InvalidRequestError(f"{name}: no reply can satisfy it")
        return matcher, name

    def _read_vocabulary(self) -> llguidance.LLTokenizer:
        import llguidance

        if not self._tokenizer.eos_ids:
            raise InvalidRequestError("this model has no end token, so no guide can end its reply")
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = llguidance.LLTokenizer(
                    llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer)),
                    n_vocab=self._tokenizer.vocab_size,
                    eos_token=sorted(self._tokenizer.eos_ids),
                )
            return self._vocabulary


class _Vocabulary:
    """Our tokenizer by the names that llguidance looks for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = tokenizer.token_bytes
        self.special_token_ids = list(tokenizer.control_tokens.values())

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", errors="replace")
        return self._tokenizer.encode(text)


def _limits() -> llguidance.LLParserLimits:
    import llguidance

    return llguidance.LLParserLimits(
        max_grammar_size=10_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,  # about 7 ms
        step_max_items=20_000,
        max_lexer_states=20_000,  # about 2 kB each
        verbose_errors=False,
    )


def _grammar(guide: Guide, tool_format: ToolFormat) -> tuple[str, str]:
    """The grammar, and what the request calls it. Raises InvalidRequestError."""
    match guide:
        case JsonGuide():
            return _lark(f"start: {_json_guide(guide)}"), "schema"
        case RegexGuide(pattern=pattern):
            if not 0 < len(pattern) <= MAX_PATTERN_CHARS:
                raise InvalidRequestError(
                    f"regex: must have 1 to {MAX_PATTERN_CHARS} characters, got {len(pattern)}"
                )
            return json.dumps({"grammars": [{"lark_grammar": _regex(pattern)}]}), "regex"
        case ChoiceGuide(options=options):
            return _lark(f"start: {_choices(options)}"), "choice"
        case ToolGuide():
            return _lark(_tool_rules(guide, tool_format)), "tools"


def _lark(rules: str) -> str:
    return f"%llguidance {{}}\n{rules}\n"


def _regex(pattern: str) -> str:
    import llguidance

    return f"start: REGEX\nREGEX: /{llguidance.regex_to_lark(pattern, '')}/"


def _choices(options: tuple[str, ...]) -> str:
    num_chars = sum(map(len, options))
    if not options or not all(options):
        raise InvalidRequestError("choice: must be at least one text, and none of them empty")
    if any(len(option) > MAX_PATTERN_CHARS for option in options):
        raise InvalidRequestError(f"choice: no text may exceed {MAX_PATTERN_CHARS} characters")
    if len(options) > _MAX_CHOICES or num_chars > MAX_GUIDE_CHARS:
        raise InvalidRequestError(
            f"choice: must be at most {_MAX_CHOICES} texts of {MAX_GUIDE_CHARS} characters in all"
        )
    return " | ".join(json.dumps(option, ensure_ascii=False) for option in options)


def _tool_rules(guide: ToolGuide, tool_format: ToolFormat) -> str:
    """Calls as ``tool_calls`` reads them; between them, unless required, any text."""
    if not guide.tools:
        raise InvalidRequestError("tools: at least one is needed to require a call")
    arguments = "arguments" if tool_format == "hermes" else "parameters"
    calls = {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.name},
                    arguments: _arguments(tool, f"/anyOf/{at}/properties/{arguments}"),
                },
                "required": ["name", arguments],
                "additionalProperties": False,
            }
            for at, tool in enumerate(guide.tools)
        ]
    }
    call = _json(calls, strict=all(tool.strict for tool in guide.tools))
    if tool_format == "llama3":
        # Calls have no mark of their own there: text that begins like one is one.
        text = "/[^{](.|\\n)*/" if guide.text is None else _json_guide(guide.text)
        return f"start: {call}" if guide.required else f"start: {call} | text\ntext: {text}"
    body = f'"\\n" {call} "\\n</tool_call>"'
    if guide.required or guide.text is not None:
        more = ' ("\\n" call)*' if guide.parallel else ""
        text = "" if guide.required or guide.text is None else f" | {_json_guide(guide.text)}"
        return f'start: call{more}{text}\ncall: "<tool_call>" {body}'
    # Behind an only call there is nothing: text there could be another one, of any form.
    calls_in_text = "call* TEXT" if guide.parallel else "call | TEXT"
    return (
        f"start: {calls_in_text}\nTEXT: /(.|\\n)*/\n"
        f'begin[lazy]: TEXT "<tool_call>"\ncall: begin {body}'
    )


def _arguments(tool: ToolSpec, pointer: str) -> Any:
    """Their schema, for that place of the whole."""
    schema = _schema(tool.parameters, f"tools: {tool.name}: parameters")
    close_objects(schema)
    move_references(schema, pointer)
    return schema


def _json_guide(guide: JsonGuide) -> str:
    schema = _schema(guide.schema, "schema") if guide.schema else {"type": "object"}
    if not isinstance(schema, dict):
        raise InvalidRequestError("schema: must be a JSON object")
    move_references(schema, "")
    return _json(schema, strict=guide.strict)


def _json(schema: dict[str, Any], *, strict: bool) -> str:
    options = {**_JSON_STYLE, "lenient": not strict}
    return f"%json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}"


def _schema(text: str, name: str) -> Any:
    if len(text) > MAX_GUIDE_CHARS:
        raise InvalidRequestError(
            f"{name}: must have at most {MAX_GUIDE_CHARS} characters, got {len(text)}"
        )
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name}: not JSON: {error}") from error
    _check_texts(parsed, name)
    return parsed


def _check_texts(value: Any, name: str) -> None:
    """Patterns, names and constants are work at every step, in proportion to their length."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            waiting += [v for k, v in value.items() if k not in _REMARKS or not isinstance(v, str)]
            waiting += value
        elif isinstance(value, str) and len(value) > MAX_PATTERN_CHARS:
            raise InvalidRequestError(
                f"{name}: patterns, names and constants may have at most {MAX_PATTERN_CHARS} "
                f"characters, got {len(value)}"
            )


def _first_line(text: str) -> str:
    """The library's explanation, without its excerpt of the grammar and the place in it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"^at \d+\(\d+\): ", "", lines[0] if lines else "unknown reason")[:300]
