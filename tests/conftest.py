"""Fixtures that several test modules share. Where a model or recording is missing, the tests that
need it are skipped with a reason."""

from __future__ import annotations

import os

# Before anything imports Triton: it reads this once. Its kernels then run on the CPU, here and in
# what tests start; nothing chooses them by itself.
os.environ.setdefault("TRITON_INTERPRET", "1")

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.no_skips import (
    is_ci,
    pytest_make_collect_report,
    pytest_runtest_makereport,
    pytest_terminal_summary,
)
from tests.support.paths import ROOT
from tests.support.server_env import BRIEF
from tests.support.speech import pytest_collection_modifyitems, recordings, voice

__all__ = [
    "pytest_collection_modifyitems",
    "pytest_make_collect_report",
    "pytest_runtest_makereport",
    "pytest_terminal_summary",
    "recordings",
    "voice",
]


# No limits of time, which a busy machine exceeds; and in CI every run tries the same examples.
settings.register_profile(
    "parley", deadline=None, derandomize=is_ci(), suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("parley")


def _model(name: str) -> Path:
    from app.config import load_settings
    from app.errors import ModelStoreError
    from app.models.store import ModelStore

    try:
        return ModelStore(load_settings().home).resolve(name)
    except ModelStoreError as error:
        pytest.skip(f"{name} is not installed ({error}); `parley models fetch` gets it")


@pytest.fixture(scope="session")
def llm_model_path() -> Path:
    """The embedded LLM's GGUF file."""
    return _model("package:smollm2-135m-instruct")


@pytest.fixture(scope="session")
def asr_model_dir() -> Path:
    """The embedded faster-whisper model's folder."""
    return _model("package:whisper-tiny.en")


@pytest.fixture(scope="session")
def tts_voice_path() -> Path:
    """The embedded Piper voice's .onnx file."""
    return _model("package:piper-en_US-joe-medium")


@pytest.fixture(scope="session")
def server_url(llm_model_path: Path, asr_model_dir: Path, tts_voice_path: Path) -> Iterator[str]:
    """Base URL of a real server with the embedded models, run as a user would run it."""
    command = [sys.executable, "-m", "app", "serve", "--port", "0"]
    env = {**os.environ, **BRIEF}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=env) as server:
        assert server.stdout is not None
        url = None
        for line in server.stdout:
            if "listening on http" in line:
                url = line.split("listening on ")[1].split()[0]
                break
        assert url is not None, f"the server ended with {server.wait()} before it was ready"
        yield url
        server.terminate()
        server.stdout.read()
        assert server.wait(timeout=30) == 0, "the server did not shut down cleanly"


@pytest.fixture
def closed_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
