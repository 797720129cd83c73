"""Typed access to untrusted settings of a file; errors name key, value and expectation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llm_core.errors import ModelLoadError

# Far above any real model. Before anything is allocated, sizes are checked against the tensors, and
# tensors against the length of the file.
MAX_DIMENSION = 1 << 24
MAX_LAYERS = 1 << 12


class Fields:
    """``label`` names the file and ``kind`` its entries (such as "metadata ") in errors."""

    def __init__(self, label: str, values: Mapping[str, Any], kind: str = "") -> None:
        self._label = label
        self._values = values
        self._kind = kind

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def is_written(self, key: str) -> bool:
        """Does ``key`` occur, possibly as null?"""
        return key in self._values

    def error(self, message: str) -> ModelLoadError:
        """An error that names the file, to be raised."""
        return ModelLoadError(f"{self._label}: {message}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "text")
        return value

    def integer(self, key: str, default: int | None = None, limit: int = MAX_DIMENSION) -> int:
        """An integer in 1 to ``limit``."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
            raise self._wrong(key, value, f"an integer in 1 to {limit}")
        return value

    def optional_integer(self, key: str) -> int | None:
        return self.integer(key) if key in self else None

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key, value, "a number")
        try:
            return float(value)
        except OverflowError as error:
            raise self.error(f"{self._kind}{key} is beyond all floating point numbers") from error

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if key in self else None

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of at most MAX_DIMENSION numbers."""
        value = self.get(key)
        is_list = isinstance(value, list) and len(value) <= MAX_DIMENSION
        if not is_list or not all(type(number) in (int, float) for number in value):
            raise self._wrong(key, value, "a list of numbers")
        return tuple(map(float, value))

    def section(self, key: str) -> Fields:
        """The object ``key``; empty if absent or null."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return Fields(self._label, value or {}, f"{self._kind}{key}.")

    def forbid_unless(self, key: str, *supported: Any) -> None:
        """Raises ModelLoadError unless ``key`` is absent, null or one of ``supported``."""
        value = self._values.get(key)
        if value is not None and value not in supported:
            expected = " or ".join(map(repr, supported))
            raise self.error(f"{self._kind}{key} is {_shown(value)}, supported is only {expected}")

    def get(self, key: str, default: Any = None) -> Any:
        """The raw value or ``default``. Raises ModelLoadError if both are None."""
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"{self._kind}{key} is missing")
        return value

    def raw(self, key: str) -> Any:
        """The raw value, or None."""
        return self._values.get(key)

    def _wrong(self, key: str, value: Any, expected: str) -> ModelLoadError:
        return self.error(f"{self._kind}{key} is {_shown(value)}, expected {expected}")


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return "a huge number"
    return text if len(text) <= 100 else text[:97] + "..."
