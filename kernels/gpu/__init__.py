"""Operations of a decoder on a GPU: Triton kernels, and a torch reference with the same signatures.

    ops = load_ops("triton")     # or "oracle", the reference, which runs anywhere
    query = ops.rope_store(qkv, rotations, positions, slots, pages, ...)

Importing this package needs neither Triton nor CUDA; ``load_ops("triton")`` does. No operation
synchronises with the device: the caller passes upper bounds for sizes that determine a launch
(``max_length``, ``max_query_len``), and all else is read on the device. So every call can be
captured in a CUDA graph; batches are padded to a bucket with rows of slot -1 and sequences of
length 0.

Rotary pairs are interleaved (x[2j], x[2j + 1]), as everywhere in this code base.
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

from kernels.gpu import oracle
from kernels.gpu.attention.pages import KvPages
from kernels.gpu.matmul.weights import (
    Float8Weight,
    GpuWeight,
    Int4Weight,
    Int8Weight,
    pack_float8,
    pack_int4,
    pack_int8,
)
from kernels.gpu.ops import GpuOps
from kernels.gpu.sampling.inputs import SamplingInputs

__all__ = [
    "Float8Weight",
    "GpuOps",
    "GpuWeight",
    "Int4Weight",
    "Int8Weight",
    "KvPages",
    "OpsName",
    "SamplingInputs",
    "is_interpreted",
    "load_ops",
    "measuring",
    "pack_float8",
    "pack_int4",
    "pack_int8",
    "unavailable_reason",
]

OpsName = Literal["triton", "oracle"]

# bfloat16 on tensor cores and asynchronous copies begin with 8.0 (Ampere).
_MIN_CAPABILITY = (8, 0)


def is_interpreted() -> bool:
    """Does Triton run kernels in its interpreter, on the CPU (TRITON_INTERPRET=1)?"""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def unavailable_reason() -> str | None:
    """The reason why the Triton kernels cannot run on the first GPU; None if they can."""
    if not is_interpreted():
        if not torch.cuda.is_available():
            return "there is no CUDA device"
        capability = torch.cuda.get_device_capability()
        if capability < _MIN_CAPABILITY:
            name = torch.cuda.get_device_name()
            return (
                f"{name} has compute capability {capability[0]}.{capability[1]}, "
                f"expected {_MIN_CAPABILITY[0]}.{_MIN_CAPABILITY[1]} or higher"
            )
    # Only looks for the package: importing it takes 0.3 s, and `load_ops` reports failures.
    return None if importlib.util.find_spec("triton") else "triton is not installed"


def load_ops(name: OpsName = "triton") -> GpuOps:
    """The operations of one implementation. Raises ImportError if Triton cannot be imported."""
    if name == "oracle":
        return oracle
    # Triton is an extra, and takes a third of a second to import.
    from kernels.gpu import triton_ops

    return triton_ops


def measuring() -> AbstractContextManager[None]:
    """A context in which unknown launch parameters are tuned, see ``tuning``; no effect under the
    interpreter. Raises ImportError if Triton cannot be imported."""
    if is_interpreted():
        return nullcontext()
    from kernels.gpu.tuning import TUNER

    return TUNER.measuring()
