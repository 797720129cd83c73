"""Matrix products on a CPU, one class per storage format.

Each packs a float32 weight (or codes) and keeps only the packed form, and maps float32 activations
[T, K] to float32 [T, N]. ``llm_core.quant.linear`` selects the format. Packed bytes depend on the
CPU's instruction set and must not be stored.
"""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F

FLOAT16_MAX = 65504.0


def has_float16_gemm() -> bool:
    """Does this torch have FBGEMM's kernels (x86 with AVX2 or better)?"""
    return "fbgemm" in torch.backends.quantized.supported_engines


class Float32Matmul:
    """The float32 product, the exact reference of all others."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight.contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight)


class BFloat16Matmul:
    """Weights and activations in bfloat16; only fast on CPUs with bfloat16 products."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight.to(torch.bfloat16).contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(torch.bfloat16), self._weight).float()


class Float16Matmul:
    """FBGEMM: weights stored in float16, activations and sums in float32.

    There are two entry points to the same kernels. The older one takes 28 us less per call (no
    TorchBind object to unwrap) but uses one thread; the newer one uses torch's threads. The thread
    count at construction decides. The packed form pads the input dimension to a multiple of 512.
    Raises ValueError for weights beyond float16's range.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        if not bool(weight.abs().max() <= FLOAT16_MAX):
            raise ValueError("weight has values beyond the range of float16")
        weight = weight.float().contiguous()
        self._is_single_threaded = torch.get_num_threads() == 1
        if self._is_single_threaded:
            self._zero_bias = torch.zeros(weight.shape[0])
            with warnings.catch_warnings():
                # Deprecated, but in the pinned torch; each of the two warns once per process.
                warnings.filterwarnings("ignore", "fbgemm_.* is deprecated", UserWarning)
                self._packed = torch.fbgemm_pack_gemm_matrix_fp16(weight)
                self(torch.zeros(1, weight.shape[1]))
        else:
            self._packed = torch.ops.quantized.linear_prepack_fp16(weight, None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_single_threaded:
            return torch.fbgemm_linear_fp16_weight_fp32_activation(x, self._packed, self._zero_bias)
        result: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return result


class Int4Matmul:
    """Grouped 4-bit weights; bfloat16 activations and scales.

    codes int32 [N, K] in 0..15, scale_zero [K / group, N, 2], value (code - 8) * scale + zero;
    N % 16 == 0, group in 32, 64, 128, 256.
    """

    def __init__(self, codes: torch.Tensor, scale_zero: torch.Tensor, group: int) -> None:
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        self._scale_zero = scale_zero.to(torch.bfloat16).contiguous()
        self._group = group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.to(torch.bfloat16), self._packed, self._group, self._scale_zero
        )
        return result.float()


class Int8Matmul:
    """8-bit weights with one scale per output row; bfloat16 activations. K % 16 == 0."""

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self._codes = codes.contiguous()
        self._scale = scale.to(torch.bfloat16)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.aten._weight_int8pack_mm(
            x.to(torch.bfloat16), self._codes, self._scale
        )
        return result.float()


class DynamicInt8Matmul:
    """W8A8: 8-bit weights, and activations quantised to 8 bits at each call.

    codes int8 [N, K]; scale float32 [N, G], one per K / G inputs; activations have a scale per
    token and group. A single scale per token would be dominated by outliers, which in language
    models are a thousand times larger than other inputs. The dequantised values are multiplied in
    float32: torch's 8-bit products saturate on this class of CPUs (oneDNN without VNNI) or take 50
    times as long (``_int_mm``).
    """

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self._num_groups = scale.shape[1]
        self._codes = codes.contiguous().view(codes.shape[0], self._num_groups, -1)
        self._scale = scale.unsqueeze(-1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.reshape(x.shape[0], self._num_groups, self._codes.shape[-1])
        scale = (groups.abs().amax(-1, keepdim=True) / 127).clamp_min(
            torch.finfo(torch.float32).tiny
        )
        rounded = (groups / scale).round_().mul_(scale)
        weight = self._codes.float().mul_(self._scale)
        return F.linear(rounded.flatten(1), weight.flatten(1))


class Float8Matmul:
    """Weights stored as float8 e4m3 with a scale per row, converted to float32 at each use."""

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self._codes = codes.contiguous()
        self._scale = scale

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._codes.float()).mul_(self._scale)
