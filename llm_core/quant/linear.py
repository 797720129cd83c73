"""The linear layer of the torch decoder, and the selection of its kernel.

Measured on one thread of an AMD EPYC Zen 3 (AVX2; no AVX512, VNNI or BF16), torch 2.13.0, weights
rotated so that caches are cold, microseconds. The machine was shared: compare within a row.

    weight [out, in]  rows  float32  float16  int4pack  int8pack  oneDNN int8  bfloat16
    960x576              1      159       55        81       100          143       147
                         8      312      133       219       253          181      1062
                        64      982      908      1749      1787          517      7485
                       256     3419     3588      7677     10704         1761     34730
    3072x576             1      506      200       256       310          350       388
                         8     1069      529      1132       841          715      3289
                        64     4104     2534      9745      9583         1632     26785
                       256    15024    14565     31220     41567         5798    108126
    49152x576            1     9003     3110      4263     10251         7432      7489
                         8    23523     9385     18974     19973        12030     51508

So on AVX2 float16 weights with float32 arithmetic (FBGEMM) are fastest at few rows and equal to
float32 at many; their only error is rounding the weight to 11 bits. int4pack and int8pack round
activations to bfloat16. oneDNN's int8 is twice as fast from 64 rows on, but needs one scale per
output row and 8-bit activations, a loss that is not acceptable as a default. float16 costs memory:
2 bytes per weight, and FBGEMM pads the input dimension to a multiple of 512 (576 -> 1024).

With AVX512 the 4-bit kernel is no longer bound by arithmetic (20 us for 960x576 and 55 us for
3072x576 at one row on two threads, 33 and 94 us at four) and is used for few rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch

from kernels.torch_cpu.matmul import (
    FLOAT16_MAX,
    BFloat16Matmul,
    DynamicInt8Matmul,
    Float8Matmul,
    Float16Matmul,
    Float32Matmul,
    Int4Matmul,
    Int8Matmul,
    has_float16_gemm,
)
from llm_core.quant.formats import Weight, quantize_float8, quantize_int8, to_float
from llm_core.quant.grouped import GroupedCodes, to_grouped

WeightFormat = Literal["float32", "float16", "bfloat16", "int4", "int8", "w8a8", "fp8"]
Matmul = Callable[[torch.Tensor], torch.Tensor]

_UNLIMITED_ROWS = 1 << 62
# Up to this many rows "int4" and "int8" use the quantised kernel, above it the float one.
_FEW_ROWS = 4
_INT4_GROUPS = (32, 64, 128, 256)
_W8A8_GROUP = 32  # as in compiled code


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """Formats of the layers' weights and of the output head."""

    layers: WeightFormat
    head: WeightFormat

    def __str__(self) -> str:
        return self.layers if self.layers == self.head else f"{self.layers}+{self.head} head"


def choose_formats(requested: str) -> FormatChoice:
    """The formats for ``requested``: a WeightFormat for all, or "auto" for this CPU's fastest.

    Raises ValueError for an unknown name.
    """
    if requested == "auto":
        if "AVX512" in torch.backends.cpu.get_cpu_capability():
            return FormatChoice("int4", "int4")
        best: WeightFormat = "float16" if has_float16_gemm() else "float32"
        return FormatChoice(best, best)
    known = get_args(WeightFormat)
    if requested not in known:
        raise ValueError(f"weight format {requested!r} is not known, only auto, {', '.join(known)}")
    name = cast(WeightFormat, requested)
    return FormatChoice(name, name)


class Linear:
    """float32 x [T, K] -> float32 x @ weight.T [T, N]."""

    def __init__(self, weight: Weight, weight_format: WeightFormat) -> None:
        self.out_size, self.in_size = weight.shape
        self._plan = _plan(weight, weight_format)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_rows = x.shape[0]
        for max_rows, matmul in self._plan:
            if num_rows <= max_rows:
                return matmul(x)
        raise AssertionError("the last entry of a plan has no row limit")


def _plan(weight: Weight, weight_format: WeightFormat) -> tuple[tuple[int, Matmul], ...]:
    """(maximum number of rows, kernel) in ascending order; the only place that selects kernels."""
    values = to_float(weight)
    num_out, num_in = values.shape
    if weight_format == "float32":
        return ((_UNLIMITED_ROWS, Float32Matmul(values)),)
    if weight_format == "bfloat16":
        return ((_UNLIMITED_ROWS, BFloat16Matmul(values)),)
    if weight_format == "w8a8":
        group = _W8A8_GROUP if num_in % _W8A8_GROUP == 0 else num_in
        codes, scale = quantize_int8(values.reshape(-1, group))
        matmul = DynamicInt8Matmul(codes.view(num_out, num_in), scale.view(num_out, -1))
        return ((_UNLIMITED_ROWS, matmul),)
    if weight_format == "fp8":
        return ((_UNLIMITED_ROWS, Float8Matmul(*quantize_float8(values))),)
    many_rows = _many_rows_matmul(values)
    if weight_format == "int8" and num_in % 16 == 0:
        return ((_FEW_ROWS, Int8Matmul(*quantize_int8(values))), (_UNLIMITED_ROWS, many_rows))
    # Only weights stored in 4 bits: quantising others to 4 bits would lose accuracy that the
    # model's publisher did not accept.
    few_rows = _int4_matmul(to_grouped(weight)) if weight_format == "int4" else None
    if few_rows is not None:
        return ((_FEW_ROWS, few_rows), (_UNLIMITED_ROWS, many_rows))
    return ((_UNLIMITED_ROWS, many_rows),)


def _many_rows_matmul(values: torch.Tensor) -> Matmul:
    """float16 if the values are in range and the CPU supports it, else float32."""
    if has_float16_gemm() and bool(values.abs().max() <= FLOAT16_MAX):
        return Float16Matmul(values)
    return Float32Matmul(values)


def _int4_matmul(grouped: GroupedCodes | None) -> Int4Matmul | None:
    """torch's 4-bit product with values (code - 8) * scale + zero; None if unsupported."""
    if grouped is None or grouped.bits != 4:
        return None
    if grouped.group not in _INT4_GROUPS or grouped.shape[0] % 16 != 0:
        return None
    zero = 8 * grouped.scale
    if grouped.zero is not None:
        zero = zero + grouped.zero
    scale_zero = torch.stack((grouped.scale.T, zero.T), -1)
    return Int4Matmul(grouped.codes.int(), scale_zero, grouped.group)
