"""For a machine that has torch, triton and numpy, and not what the rest of Parley needs.

``llm_core``'s root is the engine's client, which needs msgspec. What computes needs none of it.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).resolve().parents[2] / "llm_core"


def without_client() -> None:
    """Where msgspec is missing, ``llm_core``'s modules can be imported from now on, and its root is
    empty. Nothing anywhere else."""
    if "llm_core" in sys.modules or importlib.util.find_spec("msgspec") is not None:
        return
    for name in ("llm_core", "llm_core.model", "llm_core.loading"):
        package = ModuleType(name)
        package.__path__ = [str(_FOLDER.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
