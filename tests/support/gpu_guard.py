"""Memory for kernels under test: poisoned, with poisoned guard bands around every tensor.

All poison is the byte 0xFF: NaN in every float type, -1 in every integer. A kernel that reads
beyond a tensor, or forgets to write some of its output, gives NaN; one that writes beyond a tensor
is found when the bands are looked at.
"""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

_BAND_BYTES = 256
_POISON = 0xFF

# How many random cases a test tries; more by hand, fewer for nobody.
NUM_CASES_FACTOR = int(os.environ.get("PARLEY_GPU_CASES", "1"))

# float32 sums in another order; the 16-bit types round the operands of products and the result, and
# Triton's interpreter cuts bfloat16 off where a device rounds it.
TOLERANCES = {torch.float32: 3e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}


def fresh_rng() -> random.Random:
    """Another seed each time, printed (pytest shows it where a test fails); PARLEY_GPU_SEED repeats
    one."""
    seed = int(os.environ.get("PARLEY_GPU_SEED", secrets.randbits(31)))
    print(f"PARLEY_GPU_SEED={seed}")
    torch.manual_seed(seed)
    return random.Random(seed)


def assert_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Within the tolerance of ``dtype``, NaN never equal to anything."""
    limit = TOLERANCES[dtype]
    torch.testing.assert_close(found.float(), expected.float(), atol=limit, rtol=limit)


class Guards:
    """Allocates poisoned tensors and looks after their bands."""

    def __init__(self) -> None:
        self._raw: list[tuple[torch.Tensor, int]] = []

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Poison."""
        num_bytes = dtype.itemsize
        for size in shape:
            num_bytes *= size
        raw = torch.full((2 * _BAND_BYTES + num_bytes,), _POISON, dtype=torch.uint8)
        self._raw.append((raw, num_bytes))
        inner = raw[_BAND_BYTES : _BAND_BYTES + num_bytes]
        return inner.view(dtype).view(shape)

    def wrap(self, values: torch.Tensor) -> torch.Tensor:
        """A copy of ``values`` between bands."""
        kept = self.empty(*values.shape, dtype=values.dtype)
        kept.copy_(values)
        return kept

    def check(self) -> None:
        """Raises AssertionError where a band was written."""
        for raw, num_bytes in self._raw:
            bands = torch.cat((raw[:_BAND_BYTES], raw[_BAND_BYTES + num_bytes :]))
            assert bool((bands == _POISON).all()), "a kernel wrote outside of a tensor"


@contextmanager
def guarded() -> Iterator[Guards]:
    """Inside, what torch allocates uninitialised is poisoned and guarded; checked at the end."""
    guards = Guards()

    def empty(*shape: int | torch.Size, **options: object) -> torch.Tensor:
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        dtype = options.get("dtype", torch.float32)
        assert isinstance(dtype, torch.dtype)
        return guards.empty(*sizes, dtype=dtype)  # type: ignore[arg-type]

    def empty_like(like: torch.Tensor, **options: object) -> torch.Tensor:
        return empty(*like.shape, dtype=options.get("dtype", like.dtype))

    with (
        mock.patch.object(torch, "empty", empty),
        mock.patch.object(torch, "empty_like", empty_like),
        mock.patch.object(
            torch.Tensor, "new_empty", lambda x, *s, **o: empty(*s, **{"dtype": x.dtype, **o})
        ),
    ):
        yield guards
    guards.check()
