"""In CI a skip is a failure, however a test is skipped; elsewhere its reason is printed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

TESTS = """
import pytest

def test_that_skips():
    pytest.skip("no tool")

@pytest.mark.skipif(True, reason="no file")
def test_marked():
    pass

@pytest.fixture
def what_is_missing():
    pytest.skip("no model")

@pytest.mark.parametrize("i", range(3))
def test_of_a_fixture(what_is_missing, i):
    pass

@pytest.mark.xfail(strict=True)
def test_known_to_fail():
    raise AssertionError

def test_good():
    pass
"""
MODULE = """
import pytest

pytest.importorskip("a_package_that_nobody_has")
"""


@pytest.mark.parametrize(
    ("ci", "outcome"),
    [
        ("", "1 passed, 6 skipped, 1 xfailed"),
        ("true", "1 failed, 1 passed, 1 xfailed, 5 errors"),
    ],
)
def test_skips(tmp_path: Path, ci: str, outcome: str) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_module.py").write_text(MODULE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.support.no_skips",
        "-rsEf",
        "--tb=short",
        "-q",
    ]
    done = subprocess.run(
        [*command, "--continue-on-collection-errors", "--color=no", "."],
        cwd=tmp_path,
        env={**os.environ, "CI": ci, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    counted = sorted(done.stdout.splitlines()[-1].split(" in ")[0].split(", "))
    assert counted == sorted(outcome.split(", ")), done.stdout
    for reason in ("no tool", "no file", "no model", "a_package_that_nobody_has"):
        assert reason in done.stdout
    assert ("    3: no model" in done.stdout) == (not ci), done.stdout
