"""In CI a skipped test is a failed one. Elsewhere the run ends with the skips, by reason."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator

import pytest


def is_ci() -> bool:
    """Whether this is the run that decides, on a machine where everything can be installed."""
    return os.environ.get("CI") == "true"


def _refuse(report: pytest.TestReport | pytest.CollectReport) -> None:
    if is_ci() and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"nothing may be skipped in CI. {_reason(report)}"


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    # A skip has (path, line, reason); from a worker of xdist it comes as a list.
    found = report.longrepr[-1] if isinstance(report.longrepr, tuple | list) else report.longrepr
    return str(found).removeprefix("Skipped: ")


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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many tests were skipped for each reason, whatever ``-r`` says."""
    skipped = terminalreporter.getreports("skipped")
    if skipped:
        terminalreporter.section(f"{len(skipped)} skipped")
        for reason, num in Counter(map(_reason, skipped)).most_common():
            terminalreporter.line(f"{num:5d}: {reason}")
