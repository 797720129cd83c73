"""Autotuning of launch parameters, cached in a file per GPU model and Triton version.

Each kernel has a few candidate configurations, the first of which is the default. Measuring
synchronises with the device, so it happens only inside ``Tuner.measuring()``, which warm-up enters
before any CUDA graph is captured, and never under the interpreter.

The file is JSON: {"<device name>, triton <version>": {"<kernel> <key>": {"BLOCK_N": 64, ...}}}.
Entries that are not among the kernel's candidates (written by another version) are ignored.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import triton
from triton.runtime.errors import OutOfResources

logger = logging.getLogger("kernels.gpu.tuning")

Config = Mapping[str, int]  # block sizes, num_warps, num_stages
Key = tuple[int | str, ...]

_NUM_TIMED = 12
# Larger than the L2 cache of any GPU; written between two runs to evict it.
_FLUSH_BYTES = 256 << 20


class Tuner:
    """Launch configurations of one device, persisted in ``path`` (None: not persisted)."""

    def __init__(
        self,
        path: Path | None,
        device_name: str,
        time_ms: Callable[[Callable[[], None]], float] | None = None,
    ) -> None:
        """``time_ms`` measures a run; None: ``device_time_ms``."""
        self._path = path
        self._device = f"{device_name}, triton {triton.__version__}"
        self._time_ms = time_ms or device_time_ms
        self._configs = _read(path).get(self._device, {}) if path else {}
        self._fitting: dict[str, Config] = {}  # replacements for configurations that do not fit
        self._is_measuring = False

    def choose(
        self,
        kernel: str,
        key: Key,
        candidates: Sequence[Config],
        run: Callable[[Config], None] | None = None,
    ) -> Config:
        """The configuration of ``kernel`` for ``key``.

        Inside ``measuring()`` an unknown key is measured with ``run``, which must be repeatable.
        """
        name = " ".join((kernel, *map(str, key)))
        known = self._configs.get(name)
        if known is not None and known in candidates:
            return known
        if not self._is_measuring or run is None or _is_capturing():
            return candidates[0]
        best = self._fastest(candidates, run)
        self._configs[name] = dict(best)
        logger.info("tuned %s: %s", name, dict(best))
        return best

    def launch(
        self,
        kernel: str,
        key: Key,
        candidates: Sequence[Config],
        run: Callable[[Config], None],
        smaller: Sequence[Config] = (),
    ) -> None:
        """Runs ``kernel`` with the configuration of ``choose``. If that needs more shared memory or
        registers than the GPU has, falls back to the first of ``candidates`` and ``smaller`` that
        fits, for this and all later launches. Raises RuntimeError if none fits."""
        name = " ".join((kernel, *map(str, key)))
        config = self._fitting.get(name) or self.choose(kernel, key, candidates, run)
        try:
            run(config)
            return
        except OutOfResources as error:
            logger.info("%s: %s does not fit: %s", name, dict(config), error)
        for other in (*candidates, *smaller):
            try:
                run(other)
            except OutOfResources:
                continue
            self._fitting[name] = other
            return
        raise RuntimeError(f"no launch configuration of {name} fits this device")

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """A context in which ``choose`` measures unknown keys; writes the file at exit. A failure
        to write is logged, and the keys are measured again next time."""
        self._is_measuring = True
        try:
            yield
        finally:
            self._is_measuring = False
            if self._path is not None:
                self._write(self._path)

    @property
    def chosen(self) -> dict[str, dict[str, int]]:
        """All measured configurations and fallbacks."""
        return {**self._configs, **{name: dict(c) for name, c in self._fitting.items()}}

    def put(self, kernel: str, key: Key, config: Config) -> None:
        """Fixes a configuration without measuring it."""
        self._configs[" ".join((kernel, *map(str, key)))] = dict(config)

    def clear(self) -> None:
        """Drops all configurations; does not change the file."""
        self._configs.clear()
        self._fitting.clear()

    def _fastest(self, candidates: Sequence[Config], run: Callable[[Config], None]) -> Config:
        times: list[tuple[float, int]] = []
        for index, config in enumerate(candidates):
            try:
                run(config)  # compiles
            except OutOfResources:  # too much shared memory or too many registers for this card
                continue
            times.append((self._time_ms(partial(run, config)), index))
        # If none fits, ``launch`` tries the smaller ones.
        return candidates[min(times)[1]] if times else candidates[0]

    def _write(self, path: Path) -> None:
        # Read again, as another process may have written it.
        contents = _read(path)
        contents[self._device] = {**contents.get(self._device, {}), **self._configs}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace(path, json.dumps(contents, indent=1, sort_keys=True))
        except OSError as error:
            logger.warning("the tuning file %s cannot be written: %s", path, error)


def _is_capturing() -> bool:
    """Synchronising with the device would invalidate a CUDA graph that is being captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def default_path() -> Path:
    """Under XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "parley" / "gpu_tuning.json"


def make_tuner() -> Tuner:
    """A tuner for the current CUDA device; without a device nothing is persisted."""
    if not torch.cuda.is_available():
        return Tuner(None, "cpu")
    return Tuner(default_path(), torch.cuda.get_device_name())


def _read(path: Path) -> dict[str, dict[str, dict[str, int]]]:
    """The contents of the file; empty, and logged, if it cannot be read or parsed."""
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("the tuning file %s cannot be read and is not used: %s", path, error)
        return {}
    is_ours = isinstance(contents, dict) and all(
        isinstance(configs, dict) and all(isinstance(c, dict) for c in configs.values())
        for configs in contents.values()
    )
    if not is_ours:
        logger.warning("the tuning file %s is not of our form and is not used", path)
        return {}
    return dict(contents)


def _replace(path: Path, text: str) -> None:
    """Replaces the file atomically, as readers take no lock."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=path.suffix)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def device_time_ms(run: Callable[[], None]) -> float:
    """Median time of several runs on the current CUDA device, each with a cold L2 cache."""
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(_NUM_TIMED)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(_NUM_TIMED)]
    for start, end in zip(starts, ends, strict=True):
        flush.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) for start, end in zip(starts, ends, strict=True))
    return float(times[_NUM_TIMED // 2])


TUNER = make_tuner()
