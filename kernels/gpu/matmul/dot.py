"""Products of tiles, on the device and in the interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def to_float(codes, DTYPE: tl.constexpr):
    """Integers or floats converted to DTYPE. Integers are converted via float32, as the device does
    anyway; the interpreter would reinterpret them as bits of bfloat16. 8-bit floats are converted
    via float16 and float32: the direct conversion of float16 to bfloat16 has at most a quarter of
    the speed."""
    if codes.dtype.is_int():
        return codes.to(tl.float32).to(DTYPE)
    if codes.dtype.primitive_bitwidth == 8:
        return codes.to(tl.float16).to(tl.float32).to(DTYPE)
    return codes.to(DTYPE)


@triton.jit
def dot(a, b, acc):
    """acc float32 + a @ b; operands are both float32 (in full precision, not TF32) or both of the
    same 16-bit type."""
    if _IS_INTERPRETED:
        # The interpreter (3.7.1) multiplies bfloat16 as integers. float32 represents the operands
        # exactly.
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


# Converts 4-bit codes to bfloat16 128 + code by or-ing them into the mantissa of 128.
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
    """The offset that ``codes_of`` adds to 4-bit codes converted to ``dtype``."""
    return 128.0 if dtype == torch.bfloat16 else 0.0


@triton.jit
def codes_of(words, DTYPE: tl.constexpr, OFFSET: tl.constexpr):
    """The four codes of each of ``words`` (int16, lowest bits first) as DTYPE, plus OFFSET
    (``code_offset(DTYPE)``). Converting each code would take longer than reading it, so the bits of
    bfloat16 are assembled for two words at a time, in seven instructions for eight codes."""
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
