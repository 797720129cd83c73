"""Typed access to settings that a file claims: each refusal names key, value and expectation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llm_core.errors import ModelLoadError

# Far above any real model. Sizes below it are then checked against the tensors, and those against
# the file's length, before anything is allocated.
MAX_DIMENSION = 1 << 24
MAX_LAYERS = 1 << 12


class Fields:
    """``label`` is the file; ``kind`` is what an entry is called there, such as "metadata "."""

    def __init__(self, label: str, values: Mapping[str, Any], kind: str = "") -> None:
        self._label = label
        self._values = values
        self._kind = kind

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def is_written(self, key: str) -> bool:
        """Whether ``key`` occurs, if only as null."""
        return key in self._values

    def error(self, message: str) -> ModelLoadError:
        """A refusal in the file's name, to be raised."""
        return ModelLoadError(f"{self._label}: {message}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "text")
        return value

    def integer(self, key: str, default: int | None = None, limit: int = MAX_DIMENSION) -> int:
        """In 1 to ``limit``."""
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
        """The settings inside ``key``; absent and null are empty."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return Fields(self._label, value or {}, f"{self._kind}{key}.")

    def forbid_unless(self, key: str, *supported: Any) -> None:
        """``key`` may be absent, null or one of ``supported``; all else is a feature we lack."""
        value = self._values.get(key)
        if value is not None and value not in supported:
            expected = " or ".join(map(repr, supported))
            raise self.error(f"{self._kind}{key} is {_shown(value)}, supported is only {expected}")

    def get(self, key: str, default: Any = None) -> Any:
        """The raw value; refused when it is missing and has no default."""
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"{self._kind}{key} is missing")
        return value

    def raw(self, key: str) -> Any:
        """The raw value, None when it is missing."""
        return self._values.get(key)

    def _wrong(self, key: str, value: Any, expected: str) -> ModelLoadError:
        return self.error(f"{self._kind}{key} is {_shown(value)}, expected {expected}")


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return "a huge number"
    return text if len(text) <= 100 else text[:97] + "..."
