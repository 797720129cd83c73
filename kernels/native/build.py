"""Compiles the C sources with the system's compiler, once for each source, compiler and CPU."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE_DIR = Path(__file__).parent
# Errors of arithmetic are never trapped and errno never read. Nothing that would change what NaN
# or infinity mean, or the order of sums.
_FLAGS = (
    *("-std=gnu11", "-O3", "-shared", "-fPIC", "-fvisibility=hidden"),
    *("-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra", "-Wno-psabi"),
)
_COMPILE_LIMIT_S = 120.0


class NativeUnavailableError(Exception):
    """The compiled kernels cannot be had here; the message says why. ``remedy``: what would bring
    them; "" where nothing would."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


_NEEDS_COMPILER = "install gcc or clang, or name a compiler that works in CC"
# The setting is the server's; who uses the engine alone gives the folder as native_cache_dir.
NEEDS_FOLDER = (
    "compiled code needs a folder that belongs to this user, is writable and may hold programs: "
    "name one in PARLEY_NATIVE_DIR (native_cache_dir of an engine)"
)


def build(cache_dir: Path, *, is_scalar: bool = False) -> Path:
    """The shared library for this machine, compiled unless ``cache_dir`` already has it.

    ``cache_dir`` is made if missing and must be ours alone, because code is loaded from it.
    ``is_scalar`` leaves out all vector instructions (what an unknown CPU gets). Raises
    NativeUnavailableError.
    """
    compiler = _compiler()
    sources = sorted(SOURCE_DIR.glob("*.c"))
    flags = [*_FLAGS, *(["-DPARLEY_SCALAR"] if is_scalar else [_tuning_flag()])]
    digest = hashlib.sha256()
    for path in [*sources, *sorted(SOURCE_DIR.glob("*.h"))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for text in (*flags, *compiler, _version(compiler), _cpu_identity()):
        digest.update(text.encode() + b"\0")
    target = cache_dir / f"parley-{digest.hexdigest()[:24]}.so"
    _make_private(cache_dir)
    if not target.exists():
        _compile([*compiler, *flags], sources, target)
    return target


def _compiler() -> list[str]:
    """The command of a C compiler, from CC or by its usual names."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    for name in names:
        try:
            words = shlex.split(name)
        except ValueError as error:
            raise NativeUnavailableError(
                f"CC is {name!r}, which is no command line: {error}", _NEEDS_COMPILER
            ) from error
        if words and shutil.which(words[0]):
            return words
    raise NativeUnavailableError(
        f"no C compiler found (looked for {', '.join(names)})", _NEEDS_COMPILER
    )


def _version(compiler: list[str]) -> str:
    return _run([*compiler, "--version"])


def _tuning_flag() -> str:
    return "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"


def _cpu_identity() -> str:
    """What -march=native depends on: a library must not move to another CPU by a shared home."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    keys = ("flags", "model name", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(keys)}))


def _make_private(cache_dir: Path) -> None:
    try:
        cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = cache_dir.stat()
    except OSError as error:
        raise NativeUnavailableError(
            f"{cache_dir} cannot be used: {error}", NEEDS_FOLDER
        ) from error
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        reason = f"{cache_dir} is another user's or writable by others"
        raise NativeUnavailableError(reason, NEEDS_FOLDER)


def _compile(command: list[str], sources: list[Path], target: Path) -> None:
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as work_dir:
            built = Path(work_dir) / target.name
            _run([*command, *map(str, sources), "-o", str(built), "-lpthread", "-lm"])
            built.replace(target)  # atomic: another process finds all of it or nothing
    except OSError as error:
        reason = f"{target.parent} cannot be written: {error}"
        raise NativeUnavailableError(reason, NEEDS_FOLDER) from error


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",  # of what a compiler says only the beginning is shown
            check=False,
            timeout=_COMPILE_LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = f"{command[0]} does not run: {error}"
        raise NativeUnavailableError(reason, _NEEDS_COMPILER) from error
    if done.returncode != 0:
        first_lines = " | ".join((done.stderr or done.stdout).strip().splitlines()[:3])
        raise NativeUnavailableError(
            f"{command[0]} fails with status {done.returncode}: {first_lines}", _NEEDS_COMPILER
        )
    return done.stdout
