"""Calls of tools in a model's text, found while it streams.

``hermes``: ``<tool_call>{"name": "f", "arguments": {...}}</tool_call>`` anywhere in the text, or a
list of such objects inside the tags. ``llama3``: the reply begins with
``{"name": "f", "parameters": {...}}``. What looks like a call and is none comes out as text.

Small models that may make several calls make the same one until there is no room for more. So a
reply is over at a call that repeats one of its own word for word: what was asked for once would be
done a hundred times.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass

from llm_core.chat.tool_call_json import CallScanner
from llm_core.messages import ToolFormat

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ToolText:
    """Text that is for the user. Spaces around calls are left out."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. ``index`` counts the calls of a reply from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    delta: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The call is over. ``is_complete`` False: its arguments are no JSON object, because the reply
    ended inside them or the model wrote them wrong."""

    index: int
    is_complete: bool


ToolEvent = ToolText | ToolCallStart | ToolArguments | ToolCallEnd


class ToolCallParser:
    """Feed it a reply's text as it comes, then ``flush``.

    Joined, the texts and the arguments do not depend on how the reply was cut. A call that may
    become the repetition of another is held back until it differs. If it never does, nothing is
    told of it, ``is_repeating`` is set, and all that follows is passed over.
    """

    def __init__(self, tool_format: ToolFormat, names: Collection[str]) -> None:
        """``names``: the tools that were offered; a call of another is text."""
        self.num_calls = 0
        self.is_repeating = False
        self._made: set[tuple[str, str]] = set()  # names and arguments of whole calls
        self._arguments = ""  # of the call that is being read, as far as it is
        self._held: list[ToolEvent] | None = None  # its events, while it repeats another
        self._is_tagged = tool_format == "hermes"
        self._names = frozenset(names)
        self._pending = ""  # text that is not decided yet
        self._lead = ""  # how the call began that is being read, should it turn out to be text
        self._scanner: CallScanner | None = None
        self._is_started = False
        self._trims = False  # nothing was said since the last call
        self._read: Callable[[list[ToolEvent]], bool] = (
            self._read_text if self._is_tagged else self._read_beginning
        )

    def feed(self, text: str) -> list[ToolEvent]:
        """What is certain after ``text``."""
        if self.is_repeating:
            return []
        self._pending += text
        events: list[ToolEvent] = []
        while self._pending and self._read(events):
            pass
        return _joined(events)

    def flush(self) -> list[ToolEvent]:
        """The rest, when the reply has ended."""
        if self.is_repeating:
            return []
        rest, self._pending = self._pending, ""
        if self._scanner is not None and self._is_started:
            events = _joined(self._held or [])
            return [*events, ToolCallEnd(self.num_calls - 1, is_complete=False)]
        if self._scanner is not None:
            rest = self._lead + self._scanner.raw
        elif self._read == self._read_between:
            rest = self._lead and self._lead + rest
        elif self._trims:
            rest = rest.strip(_SPACE)
        return [ToolText(rest)] if rest else []

    def _read_text(self, events: list[ToolEvent]) -> bool:
        """Up to the next tag. Spaces wait: they go if a call follows."""
        if self._trims:
            self._pending = self._pending.lstrip(_SPACE)
        at = self._pending.find(_OPEN)
        sure = self._pending[: len(self._pending) - _overlap(self._pending) if at < 0 else at]
        sure = sure.rstrip(_SPACE)
        self._say(sure, events)
        if at < 0:
            self._pending = self._pending[len(sure) :]
            return False
        self._lead = self._pending[len(sure) : at + len(_OPEN)]
        self._pending = self._pending[at + len(_OPEN) :]
        self._read = self._read_between
        return True

    def _read_beginning(self, events: list[ToolEvent]) -> bool:
        """Of a reply without tags: a brace begins a call, all else is text to the end."""
        kept = self._pending.lstrip(_SPACE + (";" if self.num_calls else ""))
        if not kept:
            return False
        if kept[0] == "{":
            self._lead = self._pending[: len(self._pending) - len(kept)]
            self._pending = kept
            self._begin_call()
        else:
            self._read = self._read_rest
        return True

    def _read_rest(self, events: list[ToolEvent]) -> bool:
        text = self._pending.lstrip(_SPACE) if self._trims else self._pending
        self._pending = ""
        self._say(text, events)
        return False

    def _read_between(self, events: list[ToolEvent]) -> bool:
        """Inside tags, before a call or after it."""
        is_first = bool(self._lead)
        kept = self._pending.lstrip(_SPACE + ("[" if is_first else "[,]}"))
        if is_first:
            self._lead += self._pending[: len(self._pending) - len(kept)]
        self._pending = kept
        if not kept or (_CLOSE.startswith(kept) and kept != _CLOSE):
            return False
        if kept[0] == "{":
            self._begin_call()
        elif is_first:
            self._give_back(self._lead, events)
        else:
            # A model that forgot the end tag goes on with its text.
            self._pending = kept.removeprefix(_CLOSE)
            self._read = self._read_text
        return True

    def _begin_call(self) -> None:
        self._scanner = CallScanner("arguments" if self._is_tagged else "parameters")
        self._is_started = False
        self._read = self._read_call

    def _read_call(self, events: list[ToolEvent]) -> bool:
        scanner = self._scanner
        assert scanner is not None, "a call is being read"
        for at, char in enumerate(self._pending, 1):
            scanner.push(char)
            if scanner.name is not None and not self._is_started:
                self._start(scanner.name, events)
            if self._is_started and (delta := scanner.take_arguments()):
                self._add_arguments(scanner.name or "", delta, events)
            if scanner.is_done or scanner.is_failed or self._scanner is None:
                self._pending = self._pending[at:]
                self._end_call(scanner, events)
                return True
        self._pending = ""
        return False

    def _start(self, name: str, events: list[ToolEvent]) -> None:
        if name not in self._names:
            self._scanner = None
            return
        start = ToolCallStart(self.num_calls, f"call_{secrets.token_hex(12)}", name)
        self._is_started = True
        self.num_calls += 1
        self._arguments = ""
        if self._repeats(name):
            self._held = [start]
        else:
            events.append(start)

    def _repeats(self, name: str) -> bool:
        """So far this may be a call that was made before."""
        return any(n == name and made.startswith(self._arguments) for n, made in self._made)

    def _add_arguments(self, name: str, delta: str, events: list[ToolEvent]) -> None:
        self._arguments += delta
        more = ToolArguments(self.num_calls - 1, delta)
        if self._held is None:
            events.append(more)
            return
        self._held.append(more)
        if not self._repeats(name):
            self._let_go(events)

    def _let_go(self, events: list[ToolEvent]) -> None:
        """What was held back is no repetition."""
        events += self._held or []
        self._held = None

    def _end_call(self, scanner: CallScanner, events: list[ToolEvent]) -> None:
        self._scanner = None
        if not self._is_started:
            self._give_back(self._lead + scanner.raw, events)
            return
        is_complete = scanner.is_done and scanner.is_valid
        call = (scanner.name or "", self._arguments)
        if is_complete and call in self._made:
            self.num_calls -= 1
            self.is_repeating = True
            self._pending = ""
            return
        self._let_go(events)
        if is_complete:
            self._made.add(call)
        events.append(ToolCallEnd(self.num_calls - 1, is_complete))
        self._lead = ""
        self._trims = True
        self._read = self._read_between if self._is_tagged else self._read_beginning

    def _give_back(self, text: str, events: list[ToolEvent]) -> None:
        """What began like a call is text."""
        self._lead = ""
        self._say(text.lstrip(_SPACE) if self._trims else text, events)
        self._read = self._read_text if self._is_tagged else self._read_rest

    def _say(self, text: str, events: list[ToolEvent]) -> None:
        if text:
            self._trims = False
            events.append(ToolText(text))


def _overlap(text: str) -> int:
    """Length of the longest end of ``text`` that may become the tag."""
    return next((n for n in range(len(_OPEN) - 1, 0, -1) if text.endswith(_OPEN[:n])), 0)


def _joined(events: list[ToolEvent]) -> list[ToolEvent]:
    """Neighbours of one kind as one event."""
    joined: list[ToolEvent] = []
    for event in events:
        match joined[-1] if joined else None, event:
            case ToolText(before), ToolText(text):
                joined[-1] = ToolText(before + text)
            case ToolArguments(index, before), ToolArguments(same, delta) if index == same:
                joined[-1] = ToolArguments(index, before + delta)
            case _:
                joined.append(event)
    return joined
