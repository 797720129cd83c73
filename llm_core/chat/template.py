"""Renders a model's own chat template without letting message text become control tokens.

The template decides where control tokens stand; what callers said must never add one. After
rendering, both look alike ("<|im_end|>" is ten characters either way), so every message is *marked*
first: a character that occurs nowhere else is put inside each piece of a control token that the
message contains. The marked text is rendered, so trimming, splitting and joining work as usual;
then control tokens are looked for, which no longer finds the marked ones, and the marks go away.

A template is a program from a file: it runs in jinja2's immutable sandbox, with a bound on how
often it may loop and call and on how much it may write.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llm_core.chat.tool_prompt import (
    Row,
    as_rows,
    check_tools,
    format_of,
    in_words,
    uses_tools,
)
from llm_core.errors import InvalidRequestError, ModelLoadError
from llm_core.messages import ChatMessage, ToolFormat

_MAX_WORK = 100_000  # loop rounds and calls of one rendering
_MAX_CHARS = 16 * 1024 * 1024  # of any text that a template builds
_PRIVATE_USE = range(0xF0000, 0xFFFFE)


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """A run of a rendered prompt: one control token, or plain text."""

    text: str
    is_control: bool


class ChatTemplate:
    """One model's template. Not thread-safe.

    ``tool_format``: how the model writes calls of tools when it is offered some.
    """

    def __init__(
        self,
        source: str,
        *,
        control_tokens: Iterable[str],
        bos_token: str = "",
        eos_token: str = "",
    ) -> None:
        """Raises ModelLoadError for a template that is not jinja2 or that leaves the sandbox."""
        self._tokens = sorted(control_tokens, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, self._tokens)) or '(?!)'})")
        self._variables = {"bos_token": bos_token, "eos_token": eos_token}
        self._environment = _BoundedEnvironment()
        try:
            self._template = self._environment.compile_bounded(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadError(
                f"the chat template is broken at line {error.lineno}: {error.message}"
            ) from error
        except RecursionError as error:
            raise ModelLoadError("the chat template is nested too deeply") from error
        own_format = format_of(source, self._environment.uses(source, "tools"))
        self.tool_format: ToolFormat = own_format or "hermes"
        self._has_own_format = own_format is not None
        self._probe()

    def render(self, messages: Sequence[ChatMessage]) -> list[PromptPiece]:
        """The prompt, up to and including the header of the assistant's next turn.

        Raises InvalidRequestError when there are no messages or the template refuses them.
        """
        if not messages:
            raise InvalidRequestError("messages: at least one message is needed")
        check_tools(messages)
        if uses_tools(messages) and not self._has_own_format:
            messages = in_words(messages)
        texts: list[str] = []

        def collect(text: str) -> str:
            texts.append(text)
            return text

        plain = as_rows(messages, collect)
        mark = self._unused_character(texts)
        marked = as_rows(messages, lambda text: self._mark(text, mark))
        text = self._run(*marked)
        if marked != plain:
            text = self._checked(text, self._run(*plain), mark)
        parts = self._pattern.split(text)
        # split() with one group: plain and control parts take turns.
        return [
            PromptPiece(part.replace(mark, ""), is_control=index % 2 == 1)
            for index, part in enumerate(parts)
            if part
        ]

    def render_open(self, messages: Sequence[ChatMessage]) -> list[PromptPiece]:
        """The prompt up to the end of the last message's content, for whoever continues it.

        Raises as ``render``, and InvalidRequestError when the template does not show the content.
        """
        pieces = self.render(messages)
        content = messages[-1].content.strip()
        text = "".join(piece.text for piece in pieces)
        at = text.rfind(content) if content else -1
        if at < 0:
            raise InvalidRequestError("messages: the last one has nothing that could be continued")
        left = at + len(content)
        kept: list[PromptPiece] = []
        for piece in pieces:
            if left > 0:
                kept.append(replace(piece, text=piece.text[:left]))
            left -= len(piece.text)
        return kept

    def _checked(self, marked_text: str, plain_text: str, mark: str) -> str:
        """``marked_text`` if marking changed nothing else.

        A template that looks into messages (escapes them, searches them) may go another way with
        marked ones. What it wrote for the real ones may be used if it holds as many control tokens:
        then the messages have added none.
        """
        if marked_text.replace(mark, "") == plain_text:
            return marked_text
        if self._pattern.findall(marked_text) == self._pattern.findall(plain_text):
            return plain_text
        raise InvalidRequestError(
            "messages: one contains a control token of this model, and the chat template does not "
            "allow to keep it apart"
        )

    def _mark(self, content: str, mark: str) -> str:
        """``content`` with ``mark`` inside all that could be, or become, part of a control token.

        Besides whole tokens that is a beginning at the end of the content, and an end at its start,
        since the template's text may complete them.
        """
        for token in self._tokens:
            head = token[:2] if len(token) > 1 else token
            content = content.replace(head, head[0] + mark + head[1:])
        kept = content.rstrip()
        if any(kept.endswith(token[0]) for token in self._tokens):
            content = kept + mark + content[len(kept) :]
        start = len(content) - len(content.lstrip())
        if any(content.startswith(t[k:], start) for t in self._tokens for k in range(1, len(t))):
            content = content[:start] + mark + content[start:]
        return content

    def _unused_character(self, texts: Iterable[str]) -> str:
        present = set[str]().union(*texts)
        return next(chr(point) for point in _PRIVATE_USE if chr(point) not in present)

    def _run(self, rows: list[Row], tools: list[Row] | None) -> str:
        self._environment.refill()
        try:
            text = self._template.render(
                messages=rows, tools=tools, add_generation_prompt=True, **self._variables
            )
            self._environment.check_size(len(text))
        except Exception as error:  # a foreign program: it can raise anything
            raise InvalidRequestError(
                f"the chat template refused the messages: {type(error).__name__}: {error}"
            ) from error
        return text

    def _probe(self) -> None:
        """One harmless message: a template that breaks out or never ends is found when it loads."""
        try:
            self._run([{"role": "user", "content": "Hello"}], None)
        except InvalidRequestError as error:
            if isinstance(error.__cause__, SecurityError | RecursionError):
                raise ModelLoadError(f"the chat template is unsafe: {error.__cause__}") from error


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with a budget of work that every loop round and every call draws from."""

    intercepted_binops = frozenset(("+", "*", "**"))

    def __init__(self) -> None:
        # trim_blocks, lstrip_blocks and loop controls: what templates are written for.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        self._work_left = _MAX_WORK
        self.filters["_bounded"] = self._bounded
        self.filters["_concat"] = self._concat
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def compile_bounded(self, source: str) -> jinja2.Template:
        """Compiles ``source`` with every loop's iterable and every ``~`` under control."""
        tree = self.parse(source)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_bounded", [], [], None, None)
        for joined in list(tree.find_all(nodes.Concat)):
            rest = nodes.List(list(joined.nodes))
            joined.nodes = [nodes.Filter(rest, "_concat", [], [], None, None)]
        tree.set_environment(self)
        code = self.compile(tree)
        return self.template_class.from_code(self, code, self.make_globals(None))

    def uses(self, source: str, variable: str) -> bool:
        """Whether a template looks at a variable that it is given."""
        return variable in meta.find_undeclared_variables(self.parse(source))

    def refill(self) -> None:
        self._work_left = _MAX_WORK

    def check_size(self, num_chars: int) -> None:
        if num_chars > _MAX_CHARS:
            raise SecurityError(f"more than {_MAX_CHARS} characters of text")

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._spend(1)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            self.check_size(len(left) + len(right))
        elif operator == "*":
            for sized, times in ((left, right), (right, left)):
                if isinstance(sized, str | list | tuple) and isinstance(times, int):
                    self.check_size(len(sized) * times)
        elif operator == "**":
            raise SecurityError("powers are not allowed")
        return super().call_binop(context, operator, left, right)

    def _spend(self, amount: int) -> None:
        self._work_left -= amount
        if self._work_left < 0:
            raise SecurityError(f"more than {_MAX_WORK} loop rounds and calls")

    def _bounded(self, iterable: Any) -> Any:
        rounds = iterable if hasattr(iterable, "__len__") else self._take(iterable)
        self._spend(len(rounds))
        return rounds

    def _take(self, iterable: Any) -> list[Any]:
        return list(islice(iter(iterable), self._work_left + 1))

    def _concat(self, parts: list[Any]) -> str:
        texts = [str(part) for part in parts]
        self.check_size(sum(map(len, texts)))
        return "".join(texts)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """As Hugging Face renders it: jinja2's own writes < and > as escapes, for web pages."""
    known = {k: v for k, v in options.items() if k in ("ensure_ascii", "separators", "sort_keys")}
    return json.dumps(value, indent=indent, **{"ensure_ascii": False, **known})


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
