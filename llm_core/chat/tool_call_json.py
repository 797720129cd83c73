"""Reads one call of a tool, a JSON object, character by character while a model writes it."""

from __future__ import annotations

import json

_SPACE = " \t\r\n"


class CallScanner:
    """``{"name": ..., <arguments_key>: {...}}`` in any order, other keys ignored.

    ``name`` is set as soon as it is read. Of ``is_done`` and ``is_failed`` (not a call) at most one
    becomes True; ``raw`` is all that was pushed.
    """

    def __init__(self, arguments_key: str) -> None:
        self.name: str | None = None
        self.is_done = False
        self.is_failed = False
        self.is_valid = False  # once done: the arguments are a JSON object
        self.raw = ""
        self._arguments_key = arguments_key
        self._read = self._read_open
        self._key = ""
        self._value = ""
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._arguments = ""
        self._arguments_taken = 0

    def push(self, char: str) -> None:
        """The next character; not after the end."""
        assert not self.is_done and not self.is_failed, "the call is over"
        self.raw += char
        self._read(char)

    def take_arguments(self) -> str:
        """What is new of the arguments' JSON text, once the name is known."""
        if self.name is None:
            return ""
        new = self._arguments[self._arguments_taken :]
        self._arguments_taken = len(self._arguments)
        return new

    def _read_open(self, char: str) -> None:
        self.is_failed = char != "{"
        self._read = self._read_key_start

    def _read_key_start(self, char: str) -> None:
        if char == '"':
            self._key = char
            self._read = self._read_key
        elif char == "}":
            self._finish()
        else:
            self.is_failed = char not in _SPACE and char != ","

    def _read_key(self, char: str) -> None:
        self._key += char
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._read = self._read_colon

    def _read_colon(self, char: str) -> None:
        if char == ":":
            self._value = ""
            self._read = self._read_value
        else:
            self.is_failed = char not in _SPACE

    def _read_value(self, char: str) -> None:
        if not self._in_string and self._depth == 0 and char in ",}":
            self._end_value()
            self._read = self._read_key_start
            if char == "}" and not self.is_failed:
                self._finish()
            return
        if not self._value and char in _SPACE:
            return
        self._value += char
        self._track(char)
        # A string with JSON inside, as some models write it, is only known at its end.
        is_object = self._is_arguments and self._value[0] == "{"
        if is_object and (self._in_string or self._depth or char == "}"):
            self._arguments += char

    @property
    def _is_arguments(self) -> bool:
        return self._key == f'"{self._arguments_key}"'

    def _track(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif self._in_string:
            self._is_escaped = char == "\\"
            self._in_string = char != '"'
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1

    def _end_value(self) -> None:
        try:
            value = json.loads(self._value)
        except (ValueError, RecursionError):
            # Arguments may be on their way already; whoever called hears that they are broken.
            self.is_failed = not (self._is_arguments and self._arguments)
            return
        if self._key == '"name"':
            self.name = value if isinstance(value, str) else None
            self.is_failed = self.name is None
        elif self._is_arguments and isinstance(value, str):
            self._arguments = value
            self.is_valid = _is_object(value)
        elif self._is_arguments:
            self._arguments = self._arguments if isinstance(value, dict) else "{}"
            self.is_valid = isinstance(value, dict) or value is None

    def _finish(self) -> None:
        if self.name is None:
            self.is_failed = True
            return
        if not self._arguments:
            self._arguments, self.is_valid = "{}", True
        self.is_done = True


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
