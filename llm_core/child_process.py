"""How the package starts processes of its own modules: they run this very code, wherever we are."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

_PACKAGE_PARENT = str(Path(__file__).resolve().parent.parent)


def module_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs ``module``."""
    # -P: what lies in the current directory must not be imported instead of us.
    return [sys.executable, "-P", "-m", module, *arguments]


def importable(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment``, with this package first among what a new process imports."""
    others = environment.get("PYTHONPATH")
    path = f"{_PACKAGE_PARENT}{os.pathsep}{others}" if others else _PACKAGE_PARENT
    return {**environment, "PYTHONPATH": path}
