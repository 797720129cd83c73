"""CPU operations against the reference, and our package name against PyPI's `kernels`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import gguf.quants
import numpy as np
import pytest
import torch

from kernels import reference
from kernels.torch_cpu import elementwise, matmul
from tests.support.paths import ROOT

TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(1, 1), (1, 576), (7, 33), (64, 128)])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_rms_norm(shape: tuple[int, int], eps: float) -> None:
    x, weight = rand(*shape), rand(shape[1], seed=1)
    before = x.clone()
    result = elementwise.make_rms_norm(weight, eps)(x)
    torch.testing.assert_close(result, reference.rms_norm(x, weight, eps), **TOLERANCE)
    assert torch.equal(x, before)


@pytest.mark.parametrize("magnitude", [0.0, 1e-20, 1e18])
def test_rms_norm_of_extreme_rows_is_finite(magnitude: float) -> None:
    """1e18 squared still fits float32 times 64; a zero row stays zero."""
    x = torch.full((2, 64), magnitude)
    result = elementwise.make_rms_norm(torch.ones(64), 1e-5)(x)
    torch.testing.assert_close(result, reference.rms_norm(x, torch.ones(64), 1e-5), **TOLERANCE)


@pytest.mark.parametrize(("num_rows", "num_heads", "head_dim"), [(1, 3, 64), (5, 4, 6), (2, 1, 2)])
def test_rope(num_rows: int, num_heads: int, head_dim: int) -> None:
    table = reference.rope_table(40, head_dim, 10000.0)[3 : 3 + num_rows]
    # Heads that are a part of a wider row, as in the decoder.
    rows = rand(num_rows, num_heads + 2, head_dim)
    fast, plain = rows.clone(), rows.clone()
    elementwise.apply_rope_(fast[:, :num_heads], table)
    reference.apply_rope_(plain[:, :num_heads], table)
    torch.testing.assert_close(fast, plain, **TOLERANCE)
    assert torch.equal(fast[:, num_heads:], rows[:, num_heads:])


def test_rope_table_against_the_definition() -> None:
    table = reference.rope_table(5, 4, 100.0)
    assert table.shape == (5, 1, 2)
    np.testing.assert_allclose(table[3, 0, 1].angle().item(), 3 * 100.0**-0.5, rtol=1e-6)


@pytest.mark.parametrize("shape", [(1, 2), (3, 50), (16, 3072)])
def test_swiglu(shape: tuple[int, int]) -> None:
    gate_up = 5 * rand(*shape)
    expected = reference.swiglu(gate_up)
    torch.testing.assert_close(elementwise.swiglu(gate_up.clone()), expected, **TOLERANCE)


@pytest.mark.parametrize("shape", [(1, 2), (3, 50), (16, 3072)])
def test_geglu(shape: tuple[int, int]) -> None:
    gate_up = 5 * rand(*shape)
    expected = reference.geglu(gate_up)
    torch.testing.assert_close(elementwise.geglu(gate_up.clone()), expected, **TOLERANCE)


def test_reference_keeps_float64() -> None:
    x = rand(3, 8).double()
    assert reference.rms_norm(x, torch.ones(8).double(), 1e-5).dtype == torch.float64
    assert reference.swiglu(x).dtype == torch.float64


def random_int4(num_out: int, num_in: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(16, (num_out, num_in), generator=torch.Generator().manual_seed(3))
    return codes.int(), 0.1 * rand(num_in // group, num_out, 2)


def test_int4_reference_equals_ggml_q4_1() -> None:
    """(code - 8) * scale + zero with zero = m + 8 d is Q4_1's code * d + m."""
    weight = rand(16, 64).numpy()
    packed = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q4_1)
    blocks = torch.from_numpy(packed.reshape(16, 2, 20))
    halves = blocks[..., :4].contiguous().view(torch.float16).float()
    scale, minimum = halves[..., 0], halves[..., 1]
    codes = torch.cat((blocks[..., 4:] & 15, blocks[..., 4:] >> 4), -1).flatten(1)
    scale_zero = torch.stack((scale.T, (minimum + 8 * scale).T), -1)
    expected = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_1)
    result = reference.dequantize_int4(codes, scale_zero, 32)
    torch.testing.assert_close(result, torch.from_numpy(expected), **TOLERANCE)


# One tolerance a form, relative to the sum of absolute products: the rounding of its operands.
FORMS: dict[str, tuple[Callable[[torch.Tensor], Callable[..., torch.Tensor]], float]] = {
    "float32": (matmul.Float32Matmul, 1e-6),
    "bfloat16": (matmul.BFloat16Matmul, 2**-7),
}
if matmul.has_float16_gemm():
    FORMS["float16"] = (matmul.Float16Matmul, 2**-11)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_rows", [1, 2, 7, 65])
@pytest.mark.parametrize(("num_out", "num_in"), [(1, 1), (17, 33), (96, 64)])
def test_float_matmuls(form: str, num_rows: int, num_out: int, num_in: int) -> None:
    make, tolerance = FORMS[form]
    weight, x = rand(num_out, num_in), rand(num_rows, num_in, seed=1)
    result = make(weight)(x)
    assert result.dtype == torch.float32
    assert result.shape == (num_rows, num_out)
    bound = tolerance * (x.abs() @ weight.abs().T) + 1e-6
    assert bool(((result - x @ weight.T).abs() <= bound).all())


@pytest.mark.skipif(not matmul.has_float16_gemm(), reason="this torch has no FBGEMM")
def test_float16_with_two_threads_equals_one() -> None:
    weight, x = rand(96, 64), rand(5, 64, seed=1)
    single = matmul.Float16Matmul(weight)(x)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        double = matmul.Float16Matmul(weight)(x)
    finally:
        torch.set_num_threads(num_threads)
    torch.testing.assert_close(double, single, **TOLERANCE)


@pytest.mark.skipif(not matmul.has_float16_gemm(), reason="this torch has no FBGEMM")
@pytest.mark.parametrize("value", [7e4, float("inf"), float("nan")])
def test_float16_rejects_values_out_of_range(value: float) -> None:
    weight = rand(4, 4)
    weight[1, 2] = value
    with pytest.raises(ValueError, match="range of float16"):
        matmul.Float16Matmul(weight)


@pytest.mark.parametrize("num_rows", [1, 4, 9])
@pytest.mark.parametrize(
    ("num_out", "num_in", "group"), [(16, 32, 32), (48, 256, 32), (64, 128, 64)]
)
def test_int4_matmul(num_rows: int, num_out: int, num_in: int, group: int) -> None:
    codes, scale_zero = random_int4(num_out, num_in, group)
    x = rand(num_rows, num_in, seed=1)
    result = matmul.Int4Matmul(codes, scale_zero, group)(x)
    weight = reference.dequantize_int4(codes, scale_zero, group)
    bound = 2**-6 * (x.abs() @ (weight.abs() + 8 * scale_zero[..., 0].abs().max()).T)
    assert bool(
        ((result - reference.int4_matmul(x, codes, scale_zero, group)).abs() <= bound).all()
    )


@pytest.mark.parametrize("num_rows", [1, 4, 9])
def test_int8_matmul(num_rows: int) -> None:
    codes = torch.randint(-127, 128, (48, 64), generator=torch.Generator().manual_seed(3))
    scale, x = 0.01 * rand(48, seed=2).abs(), rand(num_rows, 64, seed=1)
    result = matmul.Int8Matmul(codes.to(torch.int8), scale)(x)
    bound = 2**-6 * (x.abs() @ (codes.abs() * scale.unsqueeze(1)).T) + 1e-6
    difference = result - reference.int8_matmul(x, codes.to(torch.int8), scale)
    assert bool((difference.abs() <= bound).all())


@pytest.mark.parametrize("num_rows", [0, 1, 4, 9])
@pytest.mark.parametrize(("num_in", "num_groups"), [(5, 1), (64, 1), (64, 2)])
def test_dynamic_int8_matmul(num_rows: int, num_in: int, num_groups: int) -> None:
    """Only values between two steps may round otherwise, by one step of one token."""
    generator = torch.Generator().manual_seed(num_rows)
    codes = torch.randint(-127, 128, (48, num_in), generator=generator).to(torch.int8)
    scale, x = 0.01 * rand(48, num_groups, seed=2).abs(), rand(num_rows, num_in, seed=1)
    if num_rows > 1:
        x[1] = 0
    result = matmul.DynamicInt8Matmul(codes, scale)(x)
    torch.testing.assert_close(
        result, reference.dynamic_int8_matmul(x, codes, scale), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("num_rows", [0, 1, 9])
def test_float8_matmul(num_rows: int) -> None:
    codes = rand(17, 33).to(torch.float8_e4m3fn)
    scale, x = rand(17, seed=2).abs(), rand(num_rows, 33, seed=1)
    result = matmul.Float8Matmul(codes, scale)(x)
    torch.testing.assert_close(
        result, reference.float8_matmul(x, codes, scale), atol=1e-5, rtol=1e-5
    )


def test_transformers_ignores_our_package_of_the_same_name() -> None:
    """transformers integrates PyPI's `kernels`; from the repository root it finds ours.

    It must conclude "not available" (it decides by the version of the distribution that provides
    the package) and run a Llama without it.
    """
    pytest.importorskip("transformers")
    script = (
        "import kernels, torch\n"
        "assert hasattr(kernels, 'select_backend'), kernels.__file__\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "from transformers.utils import is_kernels_available\n"
        "assert not is_kernels_available()\n"
        "config = LlamaConfig(vocab_size=40, hidden_size=32, intermediate_size=48,\n"
        "    num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)\n"
        "print(tuple(LlamaForCausalLM(config)(torch.arange(5)[None]).logits.shape))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(1, 5, 40)"
