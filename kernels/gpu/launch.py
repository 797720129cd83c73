"""What launches have in common."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.device import has_dependent_launch, num_multiprocessors


def power_of_2(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return int(triton.next_power_of_2(number))


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def dependent(device: torch.device) -> dict[str, bool]:
    """Options of a launch whose kernel begins with ``wait_for_inputs(EARLY)``."""
    return {"EARLY": True, "launch_pdl": True} if has_dependent_launch(device) else {"EARLY": False}


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """What kernels before this one have written can be read from here on, and what they have read
    can be written. Every program must come here, even one that has nothing to do: the next kernel
    relies on it that this one's end is also the end of those before it."""
    if EARLY:
        gdc_launch_dependents()  # the next one may take its place on the device, and wait
        gdc_wait()


@triton.jit
def prefetch(pointers):
    """Brings the lines (128 bytes) at these places into the second-level cache. Only of what no
    kernel writes, as weights, and only compiled: the interpreter has no cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // nothing in $0",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def num_splits(num_programs: int, num_pieces: int, device: torch.device, most: int) -> int:
    """Into how many parts the loop of each of ``num_programs`` programs is cut, so that the device
    is filled about twice; each part keeps at least one of ``num_pieces`` pieces of the loop."""
    wanted = cdiv(2 * num_multiprocessors(device), max(num_programs, 1))
    return max(1, min(wanted, num_pieces, most))


def parts_of_a_wave(
    num_programs: int, wanted: int, room: int, num_pieces: int, device: torch.device, most: int
) -> int:
    """Into how many parts the loop of each of ``num_programs`` programs is cut, so that there are
    ``wanted`` of them for each multiprocessor, but not more than the ``room`` that it has: a second
    wave of a few would run as long as the first. Each part keeps at least one of ``num_pieces``
    pieces of the loop."""
    count = num_multiprocessors(device)
    parts = min(cdiv(wanted * count, num_programs), room * count // num_programs)
    return max(1, min(parts, num_pieces, most))
