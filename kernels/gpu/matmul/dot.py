"""The matrix product of tiles, in one place for the device and for the interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def to_float(codes, DTYPE: tl.constexpr):
    """Whole numbers or floats as DTYPE. Whole numbers go by way of float32, which costs the device
    nothing: it converts so anyway, and the interpreter takes an integer for bfloat16's bits. 8-bit
    floats go by way of float16, which they are made with, and float32: from float16 to bfloat16
    there is a conversion too, of a quarter of the speed or less."""
    if codes.dtype.is_int():
        return codes.to(tl.float32).to(DTYPE)
    if codes.dtype.primitive_bitwidth == 8:
        return codes.to(tl.float16).to(tl.float32).to(DTYPE)
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


# Codes of 4 bits become bfloat16 by being put below the exponent of 128, whose last place is 1.
_MAGIC = tl.constexpr("""
{
.reg .b32 a, b, c;
shr.u32 a, $4, 4;
shr.u32 b, $4, 8;
shr.u32 c, $4, 12;
lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 $1, a, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 $2, b, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 $3, c, 0x000F000F, 0x43004300, 0xEA;
}
""")


def code_offset(dtype: torch.dtype) -> float:
    """What is added to each code of 4 bits that becomes a number of ``dtype``."""
    return 128.0 if dtype == torch.bfloat16 else 0.0


@triton.jit
def codes_of(words, DTYPE: tl.constexpr, OFFSET: tl.constexpr):
    """The four codes of each of ``words`` (int16, the first one lowest) as DTYPE, plus OFFSET, its
    ``code_offset``. A conversion for each number would take longer than reading it does;
    so bfloat16's bits are made, of two words at a time, in seven instructions for eight codes."""
    if tl.bfloat16 == DTYPE and not _IS_INTERPRETED:
        return tl.inline_asm_elementwise(
            _MAGIC,
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    wide = words.to(tl.int32)
    return (
        ((wide & 0xF).to(tl.float32) + OFFSET).to(DTYPE),
        ((wide >> 4 & 0xF).to(tl.float32) + OFFSET).to(DTYPE),
        ((wide >> 8 & 0xF).to(tl.float32) + OFFSET).to(DTYPE),
        ((wide >> 12 & 0xF).to(tl.float32) + OFFSET).to(DTYPE),
    )
