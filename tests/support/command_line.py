"""The command line as a user runs it: in a process of its own, with the real models."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.paths import ROOT
from tests.support.server_env import BRIEF

# Below the limit of a test, so that a command that hangs is told with its output.
_TIMEOUT_S = 110


def parley(
    *arguments: str, stdin: str | None = None, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run it to its end. ``settings``: environment variables beside the tests' own."""
    return subprocess.run(
        [sys.executable, "-m", "app", *arguments],
        cwd=ROOT,
        env=os.environ | BRIEF | {"COLUMNS": "100"} | settings,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
