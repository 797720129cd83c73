"""Helpers for launching kernels."""

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
    """Launch options for a kernel that starts with ``wait_for_inputs(EARLY)``."""
    return {"EARLY": True, "launch_pdl": True} if has_dependent_launch(device) else {"EARLY": False}


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Waits for the preceding kernels: after it their output may be read and their input
    overwritten. Every program must call it, even one without work, as the next kernel relies on
    this one ending after all preceding ones."""
    if EARLY:
        gdc_launch_dependents()  # the next kernel may start and wait
        gdc_wait()


@triton.jit
def prefetch(pointers):
    """Prefetches the 128-byte lines at ``pointers`` into the L2 cache. Only for data that no kernel
    writes, such as weights, and not under the interpreter."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // nothing in $0",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def num_splits(num_programs: int, num_pieces: int, device: torch.device, most: int) -> int:
    """Number of parts into which the loop of each of ``num_programs`` programs is split, such that
    the device is filled about twice and each part has at least one of ``num_pieces`` iterations."""
    wanted = cdiv(2 * num_multiprocessors(device), max(num_programs, 1))
    return max(1, min(wanted, num_pieces, most))


def parts_of_a_wave(
    num_programs: int, wanted: int, room: int, num_pieces: int, device: torch.device, most: int
) -> int:
    """Number of parts into which the loop of each of ``num_programs`` programs is split, such that
    each multiprocessor runs ``wanted`` parts but no more than the ``room`` it has: a second wave,
    however small, takes as long as the first. Each part has at least one of ``num_pieces``
    iterations."""
    count = num_multiprocessors(device)
    parts = min(cdiv(wanted * count, num_programs), room * count // num_programs)
    return max(1, min(parts, num_pieces, most))
