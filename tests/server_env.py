"""What tests need of the machine, and the settings of the real servers that they start."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

# Tests listen to whole answers, and the embedded model likes to talk; greedy, so that it says the
# same every time.
BRIEF = {
    "PARLEY_MAX_REPLY_TOKENS": "48",
    "PARLEY_TEMPERATURE": "0",
    "PARLEY_TRACE_DB": "false",  # the home has the models, and maybe somebody's real traces
    "PARLEY_LLM_STANDBY": "false",  # few of them lose their engine, and all share one machine
}


def missing(what: str) -> NoReturn:
    """Skip for want of ``what``; in CI that is a failure: a skipped test must not look passed."""
    if os.environ.get("CI") == "true":
        pytest.fail(what)
    pytest.skip(what)
