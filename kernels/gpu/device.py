"""Device properties that launches depend on. Does not import Triton."""

from __future__ import annotations

import os
from functools import cache

import torch

SWITCH = "PARLEY_GPU_DEPENDENT_LAUNCH"  # 0: disables programmatic dependent launch
_DEPENDENT_LAUNCH_CAPABILITY = (9, 0)  # Hopper


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors; under the interpreter that of a small GPU, to split work."""
    if device.type != "cuda":
        return 16
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def has_dependent_launch(device: torch.device) -> bool:
    """Can a kernel start before the kernel that it depends on has ended (programmatic dependent
    launch)?"""
    if device.type != "cuda" or os.environ.get(SWITCH, "1") == "0":
        return False
    return torch.cuda.get_device_capability(device) >= _DEPENDENT_LAUNCH_CAPABILITY
