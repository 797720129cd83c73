"""Identifiers in the form that Realtime clients know."""

from __future__ import annotations

import secrets
from typing import Literal


def new_id(prefix: Literal["sess", "item", "resp", "turn", "event", "call"]) -> str:
    """A fresh identifier, unguessable and short enough for logs."""
    return f"{prefix}_{secrets.token_hex(10)}"
