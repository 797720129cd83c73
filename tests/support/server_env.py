"""What tests need of the machine, and the settings of the real servers that they start."""

from __future__ import annotations

import os
from pathlib import Path

# Tests listen to whole answers, and the embedded model likes to talk; greedy, so that it says the
# same every time.
BRIEF = {
    "PARLEY_MAX_REPLY_TOKENS": "48",
    "PARLEY_TEMPERATURE": "0",
    "PARLEY_TRACE_DB": "false",  # the home has the models, and maybe somebody's real traces
    "PARLEY_LLM_STANDBY": "false",  # few of them lose their engine, and all share one machine
}


def download_dir() -> Path:
    """Where what tests fetch once is kept; ``PARLEY_TEST_CACHE`` names another folder."""
    return Path(os.environ.get("PARLEY_TEST_CACHE") or Path.home() / ".cache" / "parley-tests")
