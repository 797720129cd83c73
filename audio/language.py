"""How callers and clients name a language."""

from __future__ import annotations


def language_code(language: str) -> str:
    """Whisper's code for it: of "en-US", "EN" or "english": "en"."""
    code = language.strip().lower().replace("_", "-").split("-")[0]
    return "en" if code == "english" else code
