"""Models named ``hf:org/name[@revision][:file]``: the Hugging Face hub and its local cache.

The hub's own cache is used as it is, so models that other programs downloaded are found and
nothing is stored twice. Looking up never touches the network; only `download` does.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.errors import ModelStoreError
from app.models.wheel import sha256_of

# A whole repository is taken without the formats we never load: pickles (pytorch_model.bin),
# other frameworks' weights, and all the quantisations of a GGUF repository.
_SNAPSHOT_PATTERNS = [
    *("*.json", "*.txt", "*.model", "*.jinja", "*.safetensors", "model.bin"),
    *("*.onnx", "README.md", "LICENSE*", "NOTICE*", "MODEL_CARD*"),
]
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".onnx")
_NAME = re.compile(
    r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?(?::(?P<file>[^:@]+))?"
)


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository on the hub, whole or one file of it; ``revision`` None is its default branch."""

    name: str
    repo: str
    revision: str | None
    file: str | None


def parse_hub_name(name: str) -> HubModel:
    """Parse ``hf:org/name[@revision][:file]``; raises `ModelStoreError` for anything else."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ModelStoreError(f"{name!r} is not of the form hf:org/name[@revision][:file]")
    return HubModel(name, match["repo"], match["revision"], match["file"])


def locate(model: HubModel, cache_dir: Path | None) -> Path | None:
    """The model's path in the local cache, or None when it is not there. Never uses the network."""
    hub = _hub()
    try:
        return _get(model, cache_dir, local_files_only=True)
    except (hub.errors.LocalEntryNotFoundError, hub.errors.EntryNotFoundError):
        return None
    except hub.errors.HFValidationError as error:
        raise ModelStoreError(f"{model.name}: {error}") from error


def download(model: HubModel, cache_dir: Path | None) -> Path:
    """Download the model into the hub's cache (its own progress bars show) and return its path."""
    hub = _hub()
    unreachable = (
        "the hub could not be reached and it is not (wholly) in the local cache. Connect to the "
        "network once, copy the repository into the hub cache (HF_HOME), or give a path instead"
    )
    # The order matters: gated and missing repositories are HTTP errors too.
    explanations: tuple[tuple[type[Exception], str], ...] = (
        (
            hub.errors.GatedRepoError,
            "it is gated: accept its terms on its page and set HF_TOKEN to a token of that account",
        ),
        (
            hub.errors.RepositoryNotFoundError,
            "there is no such repository, or it is private: check the name, or set HF_TOKEN",
        ),
        (hub.errors.RevisionNotFoundError, f"it has no revision {model.revision!r}"),
        (hub.errors.RemoteEntryNotFoundError, f"it has no file {model.file!r}"),
        (hub.errors.OfflineModeIsEnabled, "HF_HUB_OFFLINE is set and it is not in the cache"),
        (hub.errors.HFValidationError, "the name is not valid"),
        (hub.errors.HfHubHTTPError, "the hub refused"),
        (hub.errors.XetDownloadError, "the transfer failed; run the same command to resume it"),
        (hub.errors.LocalEntryNotFoundError, unreachable),
        # What is left of its HTTP library's errors: the connection could not be made, or broke.
        (hub.errors.HTTPError, unreachable),
        (OSError, "it cannot be stored, or the connection failed"),
    )
    try:
        path = _get(model, cache_dir, local_files_only=False)
    except tuple(kind for kind, _ in explanations) as error:
        why = next(text for kind, text in explanations if isinstance(error, kind))
        raise ModelStoreError(f"cannot fetch {model.name}: {why} ({_first_line(error)})") from error
    if model.file is None and not any(p.suffix in _WEIGHT_SUFFIXES for p in path.iterdir()):
        raise ModelStoreError(
            f"{model.name} has no safetensors, CTranslate2 or ONNX weights at its top; for GGUF "
            f"name the file, as in hf:{model.repo}:FILE.gguf"
        )
    return path


def check(path: Path) -> int:
    """Re-hash every cached file under ``path``; returns the number of files that could be checked.

    The hub's cache names each blob by its content: SHA-256 for large files, git's SHA-1 otherwise.
    Files that are not links into the blob store carry no such name and cannot be checked.
    Raises `ModelStoreError` naming the first file whose content does not fit its name.
    """
    num_checked = 0
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if not file.is_symlink() or not file.is_file():
            continue
        blob = file.resolve()
        if re.fullmatch(r"[0-9a-f]{64}", blob.name):
            got = sha256_of(blob)
        elif re.fullmatch(r"[0-9a-f]{40}", blob.name):
            content = blob.read_bytes()
            got = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        else:
            continue
        if got != blob.name:
            raise ModelStoreError(f"{file} is damaged or altered: hash {got}, expected {blob.name}")
        num_checked += 1
    return num_checked


def _get(model: HubModel, cache_dir: Path | None, *, local_files_only: bool) -> Path:
    hub = _hub()
    common = {
        "revision": model.revision,
        "cache_dir": cache_dir,
        "local_files_only": local_files_only,
    }
    if model.file is None:
        snapshot = hub.snapshot_download(model.repo, allow_patterns=_SNAPSHOT_PATTERNS, **common)
        return Path(snapshot)
    get_file: Callable[..., str] = hub.hf_hub_download
    path = Path(get_file(model.repo, model.file, **common))
    if path.suffix == ".onnx":
        # A Piper voice has its settings beside it; other ONNX models may have nothing there.
        with suppress(hub.errors.EntryNotFoundError):
            get_file(model.repo, model.file + ".json", **common)
    return path


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _hub() -> Any:
    # Imported only when an hf: name is used: it costs half a second at the start of every command.
    import huggingface_hub
    import huggingface_hub.errors

    return huggingface_hub
