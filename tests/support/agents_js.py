"""The realtime client of the OpenAI Agents SDK for JavaScript, by npm, kept in a cache."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.server_env import download_dir

PACKAGES = ("@openai/agents-realtime@0.20.0", "@openai/agents-core@0.20.0", "zod@4.6.7")


def agents_folder() -> Path:
    """The folder with its ``node_modules``. Skips where npm cannot be had."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(
            "npm is needed for the JavaScript client; tests/support/install_system.sh gets it"
        )
    folder = download_dir() / ("agents-" + "-".join(p.rsplit("@", 1)[1] for p in PACKAGES))
    if (folder / "installed").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "package.json").write_text('{"private": true}')
    command = [npm, "install", "--no-audit", "--no-fund", "--no-package-lock", *PACKAGES]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=300, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip("npm could not install the JavaScript client within 300 s")
    if done.returncode != 0:
        pytest.skip(f"npm could not install the JavaScript client: {done.stderr[-500:]}")
    (folder / "installed").touch()
    return folder
