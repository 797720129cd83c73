"""Everything that can go wrong in the audio package, drawn first."""

from __future__ import annotations


class AudioError(Exception):
    """Base of all errors of the audio package; the message says what was wrong and expected."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class AudioFormatError(AudioError):
    """Bytes or a file that are not audio of the expected form."""


class NotWantedError(AudioError):
    """Work was given up half-way, because nobody waits for it any more."""


class ModelError(AudioError):
    """A speech model is missing, unreadable, or failed while running."""
