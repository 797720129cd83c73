"""What launches have in common."""

from __future__ import annotations

from functools import cache

import torch
import triton


def power_of_2(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return int(triton.next_power_of_2(number))


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU; under the interpreter a number that makes work be split as on a small one."""
    if device.type != "cuda":
        return 16
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def num_splits(num_programs: int, num_pieces: int, device: torch.device, most: int) -> int:
    """Into how many parts the loop of each of ``num_programs`` programs is cut, so that the device
    is filled about twice; each part keeps at least one of ``num_pieces`` pieces of the loop."""
    wanted = cdiv(2 * num_multiprocessors(device), max(num_programs, 1))
    return max(1, min(wanted, num_pieces, most))
