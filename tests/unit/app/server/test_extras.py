"""What is installed is this Parley, not a registry's package of the same name."""

from __future__ import annotations

import re
import tomllib

import pytest

from app.extras import how_to_install
from tests.support.paths import ROOT

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_is_installed_from_the_folder(extra: str) -> None:
    assert how_to_install(extra).endswith(f"--editable '.[{extra}]'")


def test_nobody_is_told_to_install_parley_by_its_name() -> None:
    folders = ("app", "llm_core", "audio", "kernels", "bench", "docs", "web_demo")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    named = re.compile(r"install\s[^\n]*[\s'\"]parley\b(?!-)")
    wrong = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in [*paths, ROOT / "README.md"]
        if path.suffix in (".py", ".md", ".html", ".js", ".sh")
        for line in path.read_text().splitlines()
        if named.search(line)
    ]
    assert wrong == []


def test_every_extra_that_is_named_exists() -> None:
    calls = re.compile(r"how_to_install\(['\"](\w+)['\"]\)")
    named = {
        name for path in (ROOT / "app").rglob("*.py") for name in calls.findall(path.read_text())
    }
    assert named
    assert named <= EXTRAS.keys()
