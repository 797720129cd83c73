"""In CI a skipped test is a failed one: what was not there to test with must not look tested."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest


def is_ci() -> bool:
    """Whether this is the run that decides, on a machine where everything can be installed."""
    return os.environ.get("CI") == "true"


def _refuse(report: pytest.TestReport | pytest.CollectReport) -> None:
    if is_ci() and report.skipped and not hasattr(report, "wasxfail"):
        # (path, line, reason) where it was skipped
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"nothing may be skipped in CI. {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Of a test, its set-up or its end."""
    report = yield
    _refuse(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Of a whole module."""
    report = yield
    _refuse(report)
    return report
