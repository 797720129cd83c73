"""Language codes."""

from __future__ import annotations


def language_code(language: str) -> str:
    """Whisper's code of a language: "en" for "en-US", "EN" or "english"."""
    code = language.strip().lower().replace("_", "-").split("-")[0]
    return "en" if code == "english" else code
