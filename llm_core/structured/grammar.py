"""Guides as grammars of llguidance, and the bounds of what may be asked for.

A guide comes from a stranger. All of it is checked here that can be checked without compiling it;
what compiling costs is bounded by ``guide_check``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

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
from llm_core.structured.arguments_schema import close_objects, move_references

MAX_GUIDE_CHARS = 32_768
MAX_TOOLS_CHARS = 262_144  # of the schemas of all tools together
MAX_PATTERN_CHARS = 1_000  # also of a text that must be said as it is
MAX_MULTIPLE_OF = 10_000
MAX_KNOWN = 1_024  # guides of which it is remembered that they can be compiled
_MAX_CHOICES = 1_000
_REMARKS = frozenset(("title", "description", "default", "examples", "$comment"))

# One way to put spaces, the one that models write most: free whitespace is where small ones get
# lost, line after line.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class Grammar:
    """``text`` is llguidance's; ``name`` is what the request calls the parameter it comes from."""

    text: str
    name: str


def grammar_of(guide: Guide, tool_format: ToolFormat) -> Grammar:
    """The grammar of a guide. Raises InvalidRequestError, naming the parameter."""
    match guide:
        case JsonGuide():
            return Grammar(_lark(f"start: {_json_guide(guide)}"), name_of(guide))
        case RegexGuide(pattern=pattern):
            if not 0 < len(pattern) <= MAX_PATTERN_CHARS:
                raise InvalidRequestError(
                    f"regex: must have 1 to {MAX_PATTERN_CHARS} characters, got {len(pattern)}"
                )
            whole = {"grammars": [{"lark_grammar": _regex(pattern)}]}
            return Grammar(json.dumps(whole), name_of(guide))
        case ChoiceGuide(options=options):
            return Grammar(_lark(f"start: {_choices(options)}"), name_of(guide))
        case ToolGuide():
            return Grammar(_lark(_tool_rules(guide, tool_format)), name_of(guide))


def name_of(guide: Guide) -> str:
    """The parameter that a guide comes from, as errors call it."""
    match guide:
        case JsonGuide():
            return "schema"
        case RegexGuide():
            return "regex"
        case ChoiceGuide():
            return "choice"
        case ToolGuide():
            return "tools"


def guide_key(guide: Guide) -> bytes:
    """The same for equal guides, and for no others."""
    return hashlib.blake2b(msgspec.msgpack.encode(guide), digest_size=16).digest()


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
    num_chars = sum(len(tool.parameters) for tool in guide.tools)
    if num_chars > MAX_TOOLS_CHARS:
        raise InvalidRequestError(
            f"tools: the parameters of all functions may have at most {MAX_TOOLS_CHARS} "
            f"characters in all, got {num_chars}"
        )
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
    _check_values(parsed, name)
    return parsed


def _check_values(schema: Any, name: str) -> None:
    """Patterns, names and constants are work at every step, in proportion to their length; and the
    library walks through the remainders of ``multipleOf`` one by one (from 2**30 on without an
    end)."""
    for place, key, value in _values(schema):
        if isinstance(value, str) and len(value) > MAX_PATTERN_CHARS:
            raise InvalidRequestError(
                f"{name}: patterns, names and constants may have at most {MAX_PATTERN_CHARS} "
                f"characters, got {len(value)}"
            )
        is_step = key == "multipleOf" and isinstance(value, int | float)
        if is_step and abs(value) > MAX_MULTIPLE_OF:
            raise InvalidRequestError(
                f"{name}: {place[:200]}: must be at most {MAX_MULTIPLE_OF}, got {str(value)[:40]}"
            )


def _values(schema: Any) -> Iterator[tuple[str, str, Any]]:
    """Names and values in ``schema``, remarks aside, as (path, key or "", value). Without
    recursion: schemas may be nested as deep as people like."""
    waiting: list[tuple[str, str, Any]] = [("", "", schema)]
    while waiting:
        place, key, value = waiting.pop()
        yield place, key, value
        if isinstance(value, list):
            waiting += ((f"{place}[{at}]", "", item) for at, item in enumerate(value))
        elif isinstance(value, dict):
            for name, item in value.items():
                yield place, "", name
                if name not in _REMARKS or not isinstance(item, str):
                    waiting.append((f"{place}.{name}" if place else name, name, item))
