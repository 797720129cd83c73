"""What a launch needs to know of a device. Imports no Triton."""

from __future__ import annotations

import os
from functools import cache

import torch

SWITCH = "PARLEY_GPU_DEPENDENT_LAUNCH"  # 0: kernels wait for each other's end
_DEPENDENT_LAUNCH_CAPABILITY = (9, 0)  # Hopper


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU; under the interpreter a number that makes work be split as on a small one."""
    if device.type != "cuda":
        return 16
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def has_dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may be launched before the one that it depends on has ended (programmatic
    dependent launch)."""
    if device.type != "cuda" or os.environ.get(SWITCH, "1") == "0":
        return False
    return torch.cuda.get_device_capability(device) >= _DEPENDENT_LAUNCH_CAPABILITY
