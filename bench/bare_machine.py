"""For a machine that has torch, triton and numpy, and not what the rest of Parley needs.

``llm_core``'s root is the engine's client, which needs msgspec. What computes needs none of it.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).resolve().parent.parent / "llm_core"


def without_client() -> None:
    """Where msgspec is missing, ``llm_core``'s modules can be imported from now on, and its root is
    empty. Nothing anywhere else."""
    if "llm_core" in sys.modules or importlib.util.find_spec("msgspec") is not None:
        return
    root = ModuleType("llm_core")
    root.__path__ = [str(_FOLDER)]
    sys.modules["llm_core"] = root
