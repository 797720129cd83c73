"""Compilation of the C sources with the system's compiler, cached per source, compiler and CPU."""

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
# Floating-point exceptions are never trapped and errno is never read. No flag may change NaN or
# infinity semantics, or the order of sums.
_FLAGS = (
    *("-std=gnu11", "-O3", "-shared", "-fPIC", "-fvisibility=hidden"),
    *("-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra", "-Wno-psabi"),
)
_COMPILE_LIMIT_S = 120.0


class NativeUnavailableError(Exception):
    """The compiled kernels are not available; the message has the reason. ``remedy``: advice to the
    user; "" if there is none."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


_NEEDS_COMPILER = "install gcc or clang, or name a compiler that works in CC"
# PARLEY_NATIVE_DIR is a setting of the server; native_cache_dir is the engine's option.
NEEDS_FOLDER = (
    "compiled code needs a folder that belongs to this user, is writable and may hold programs: "
    "name one in PARLEY_NATIVE_DIR (native_cache_dir of an engine)"
)


def build(cache_dir: Path, *, is_scalar: bool = False) -> Path:
    """Path of the shared library for this machine, compiled unless ``cache_dir`` has it.

    ``cache_dir`` is created if missing and must not be writable by other users, as code is loaded
    from it. ``is_scalar`` selects portable C without vector intrinsics. Raises
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
    """The C compiler command: CC, or the first of the usual names that exists."""
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
    """CPU properties that -march=native depends on: homes may be shared between machines."""
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
            built.replace(target)  # atomic for other processes
    except OSError as error:
        reason = f"{target.parent} cannot be written: {error}"
        raise NativeUnavailableError(reason, NEEDS_FOLDER) from error


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",  # only the beginning of the output is shown
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
