"""The matrix product of tiles, in one place for the device and for the interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

_IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def to_float(codes, DTYPE: tl.constexpr):
    """Whole numbers or floats as DTYPE. Whole numbers go by way of float32, which costs the device
    nothing: it converts so anyway, and the interpreter takes an integer for bfloat16's bits."""
    if codes.dtype.is_int():
        return codes.to(tl.float32).to(DTYPE)
    return codes.to(DTYPE)


@triton.jit
def dot(a, b, acc):
    """acc float32 + a @ b, whose operands are both float32 (in full precision, not TF32) or both
    of one 16-bit type."""
    if _IS_INTERPRETED:
        # The interpreter (3.7.1) multiplies the bit patterns of bfloat16 as if they were integers.
        # float32 holds the operands exactly, as the tensor core's sums do.
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")
