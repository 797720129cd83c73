"""The compiled decoder: C sources in this folder, built on first use and called via ctypes.

Optional: ``load`` raises ``NativeUnavailableError`` with the reason if there is no compiler.
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
