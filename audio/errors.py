"""Exceptions of the audio package."""

from __future__ import annotations


class AudioError(Exception):
    """Base class; the message says what was wrong and what was expected."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class AudioFormatError(AudioError):
    """Bytes or a file that are not audio of the expected format."""


class AbandonedError(AudioError):
    """Work was cancelled between two steps."""


class ModelError(AudioError):
    """A speech model is missing, unreadable, or failed while running."""
