"""Description of the machine that a benchmark runs on, with its memory bandwidth."""

from __future__ import annotations

import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

_READ_BYTES = 256 << 20  # per thread; far beyond any cache
_NUM_READS = 5


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts of one machine. ``read_gb_s`` (1e9 bytes) bounds decoding: divide figures by it before
    you compare two machines."""

    processor: str
    num_cores: int
    memory_gib: float
    python: str
    load_average: float
    read_gb_s: float
    date: str

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def summary() -> str:
    """One line for a result file; nothing is measured."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {_processor()}, {memory / 2**30:.0f} GiB"


def describe(num_threads: int) -> Machine:
    """The machine, with its memory read by ``num_threads`` threads; takes about a second."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        processor=_processor(),
        num_cores=len(os.sched_getaffinity(0)),
        memory_gib=round(memory / 2**30, 1),
        python=platform.python_version(),
        load_average=round(os.getloadavg()[0], 2),
        read_gb_s=round(read_gb_s(num_threads), 1),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def read_gb_s(num_threads: int) -> float:
    """Memory bandwidth of ``num_threads`` threads together in GB/s (1e9 bytes), the best of five.

    Each thread takes the maximum of a large float32 array, which costs less than loading it.
    """
    arrays = [np.ones(_READ_BYTES // 4, dtype=np.float32) for _ in range(num_threads)]
    with ThreadPoolExecutor(num_threads) as pool:
        best_s = float("inf")
        for _ in range(_NUM_READS):
            start_s = time.perf_counter()
            list(pool.map(np.max, arrays))  # numpy releases the GIL
            best_s = min(best_s, time.perf_counter() - start_s)
    return num_threads * _READ_BYTES / best_s / 1e9


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                flags = next(r for r in info.read_text().splitlines() if r.startswith("flags"))
                return f"{line.split(':', 1)[1].strip()} ({_vector_level(flags.split())})"
    return platform.processor() or platform.machine()


def _vector_level(flags: list[str]) -> str:
    levels = ("amx_int8", "avx512_vnni", "avx_vnni", "avx512f", "avx2", "sse4_2")
    return next((level for level in levels if level in flags), "unknown vector unit")
