"""The number of tests that need recordings is limited, wherever the recordings are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.speech import MAX_TESTS_OF_RECORDINGS

TESTS = ROOT / "tests"


@pytest.mark.parametrize("num_more", [0, 1])
def test_too_many_tests_of_recordings_are_refused(tmp_path: Path, num_more: int) -> None:
    for folder, num in (("integration", MAX_TESTS_OF_RECORDINGS - 1), ("browser", 1 + num_more)):
        (tmp_path / folder).mkdir()
        tests = [f"def test_{i}(recordings): pass\n" for i in range(num)]
        (tmp_path / folder / f"test_{folder}.py").write_text("".join(tests))
    (tmp_path / "test_fast.py").write_text("def test_fast(recordings): pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.speech", "-q", "--collect-only"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(TESTS.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    said = f"{MAX_TESTS_OF_RECORDINGS + 1} tests need recordings"
    assert (done.returncode, said in done.stderr) == ((4, True) if num_more else (0, False)), done


def test_recordings_are_found_in_one_place() -> None:
    """A test that looked for the folder itself would not be counted."""
    named = re.compile(r"[\"'/]shared[\"'/]")
    found = {
        path.name for path in TESTS.rglob("*.py") if named.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"paths.py", "speech.py"}
