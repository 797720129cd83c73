"""``hf:`` models against a cache laid out as huggingface_hub lays it out, without a network."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from app.errors import ModelStoreError
from app.models import hub
from app.models.store import ModelStatus, ModelStore

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = b"weights " * 1000


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """The cache after a download of org/name: one large file, two small ones."""
    repo = tmp_path / "hub" / "models--org--name"
    snapshot = repo / "snapshots" / COMMIT
    for folder in (repo / "blobs", repo / "refs", snapshot):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    for name, content, blob in (
        ("model.bin", WEIGHTS, hashlib.sha256(WEIGHTS).hexdigest()),
        ("voice.onnx", b"onnx", git_sha1(b"onnx")),
        ("voice.onnx.json", b"{}", git_sha1(b"{}")),
    ):
        (repo / "blobs" / blob).write_bytes(content)
        (snapshot / name).symlink_to(Path("../../blobs") / blob)
    return tmp_path / "hub"


@pytest.fixture
def store(tmp_path: Path, cache: Path) -> ModelStore:
    return ModelStore(tmp_path / "home", hub_cache_dir=cache)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("hf:org/name", ("org/name", None, None)),
        ("hf:org/na.me-2_b@v1.0", ("org/na.me-2_b", "v1.0", None)),
        ("hf:org/name:dir/Model.Q4_1.gguf", ("org/name", None, "dir/Model.Q4_1.gguf")),
        ("hf:org/name@refs/pr/1:m.gguf", ("org/name", "refs/pr/1", "m.gguf")),
    ],
)
def test_names(name: str, parts: tuple[str, str | None, str | None]) -> None:
    model = hub.parse_hub_name(name)
    assert (model.repo, model.revision, model.file) == parts


@pytest.mark.parametrize(
    "name",
    ["hf:", "hf:name", "hf:org/name:", "hf:org/name@", "hf:a/b/c", "hf:org/na me", "org/name"],
)
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ModelStoreError, match=r"not of the form hf:org/name"):
        hub.parse_hub_name(name)


def test_cached_models_need_no_network(store: ModelStore, cache: Path, no_network: None) -> None:
    snapshot = cache / "models--org--name" / "snapshots" / COMMIT
    assert store.fetch("hf:org/name:voice.onnx") == snapshot / "voice.onnx"
    assert store.resolve(f"hf:org/name@{COMMIT}:model.bin") == snapshot / "model.bin"
    assert store.verify("hf:org/name:voice.onnx") == snapshot / "voice.onnx"


def test_a_whole_repository_is_a_directory(
    store: ModelStore, cache: Path, no_network: None
) -> None:
    snapshot = cache / "models--org--name" / "snapshots" / COMMIT
    assert store.fetch("hf:org/name") == snapshot
    assert store.verify("hf:org/name") == snapshot
    assert store.inspect("hf:org/name").size_bytes == len(WEIGHTS) + len(b"onnx") + len(b"{}")


def test_missing_model_says_what_to_run(store: ModelStore) -> None:
    with pytest.raises(ModelStoreError, match="run `parley models fetch hf:org/other`"):
        store.resolve("hf:org/other")


@pytest.mark.parametrize("file", ["model.bin", "voice.onnx.json"])
def test_verify_finds_altered_blobs(store: ModelStore, cache: Path, file: str) -> None:
    path = cache / "models--org--name" / "snapshots" / COMMIT / file
    path.resolve().write_bytes(b"something else")
    with pytest.raises(
        ModelStoreError, match=rf"{file} is damaged or altered: hash [0-9a-f]+, exp"
    ):
        store.verify("hf:org/name")


def test_files_without_a_hash_are_said_to_be_unchecked(store: ModelStore, cache: Path) -> None:
    path = cache / "models--org--name" / "snapshots" / COMMIT / "model.bin"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)  # as on a file system without links
    entry = store.inspect("hf:org/name:model.bin", full=True)
    assert entry.status is ModelStatus.INSTALLED
    assert entry.detail.startswith("not checked")


def test_offline_fetch_says_so(store: ModelStore, no_network: None) -> None:
    with pytest.raises(ModelStoreError, match=r"cannot fetch hf:org/other: .*local cache.*HF_HOME"):
        store.fetch("hf:org/other")


# The base of all errors of the hub client's HTTP library, those without a response included.
TRANSPORT_ERROR: Any = vars(errors)["HTTPError"]


def refusal(kind: Any, text: str = "no") -> Exception:
    """An error of the hub's as its client raises it: with an HTTP response."""
    response = httpx.Response(404, request=httpx.Request("GET", "http://hub.test"))
    error: Exception = kind(text, response=response)
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (refusal(errors.GatedRepoError), "gated: accept its terms.*HF_TOKEN"),
        (refusal(errors.RepositoryNotFoundError), "no such repository"),
        (refusal(errors.RevisionNotFoundError), "no revision 'v9'"),
        (refusal(errors.RemoteEntryNotFoundError), "no file 'm.gguf'"),
        (errors.OfflineModeIsEnabled("no"), "HF_HUB_OFFLINE is set"),
        (refusal(errors.HfHubHTTPError, "503\nmore"), r"the hub refused \(503\)"),
        (errors.LocalEntryNotFoundError("no"), r"Connect to the network once.*give a path instead"),
        (TRANSPORT_ERROR("reset"), r"could not be reached.*\(reset\)"),
        (errors.XetDownloadError("cut"), r"run the same command to resume"),
        (OSError(28, "No space left on device"), r"cannot be stored.*No space left"),
    ],
)
def test_hub_errors_are_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(*args: object, **options: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    model = hub.parse_hub_name("hf:org/name@v9:m.gguf")
    with pytest.raises(ModelStoreError, match=message):
        hub.download(model, tmp_path)


def test_a_repository_without_usable_weights_asks_for_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(
        hub,
        "_hub",
        lambda: SimpleNamespace(snapshot_download=lambda *a, **k: str(tmp_path), errors=errors),
    )
    with pytest.raises(ModelStoreError, match=r"name the file, as in hf:org/name:FILE.gguf"):
        hub.download(hub.parse_hub_name("hf:org/name"), None)
