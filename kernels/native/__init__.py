"""The compiled forward pass: C sources beside this file, built on first use and called by ctypes.

Optional: ``load`` raises ``NativeUnavailableError`` with the reason where there is no compiler, and
everything works without it.
"""

from __future__ import annotations

from kernels.native.build import NativeUnavailableError
from kernels.native.library import Library, PackedMatrix, ThreadPool, WeightMemory, load

__all__ = [
    "Library",
    "NativeUnavailableError",
    "PackedMatrix",
    "ThreadPool",
    "WeightMemory",
    "load",
]
