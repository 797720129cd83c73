"""Whole numbers in text from clients."""

from __future__ import annotations


def whole_number(text: str, max_digits: int) -> int | None:
    """The number in ``text``; None if that is not 1 to ``max_digits`` ASCII digits."""
    # str.isdigit() alone also takes "²", which int() refuses, and digits of other scripts.
    is_number = text.isascii() and text.isdigit() and len(text) <= max_digits
    return int(text) if is_number else None
