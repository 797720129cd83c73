"""Matrix products of all weight formats on the GPU kernels, in Triton's interpreter."""

from __future__ import annotations

import random

import pytest
import torch

from kernels.gpu import GpuWeight, load_ops, pack_float8, pack_int4, pack_int8
from kernels.gpu.matmul import dot, few_rows, many_rows
from kernels.gpu.matmul.dispatch import matmul_cost
from kernels.gpu.matmul.weights import Float8Weight, Int4Weight, Int8Weight, dequantize
from kernels.gpu.tuning import TUNER
from tests.support.gpu_guard import NUM_CASES_FACTOR, Guards, fresh_rng, guarded

TRITON, ORACLE = load_ops("triton"), load_ops("oracle")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = ("plain", "int4", "int4 with zeros", "int8", "int8 groups", "uint8 groups", "float8")

# Of the sum of the magnitudes that are added up. Codes multiplied as they are lose nothing but the
# sum's rounding; a weight that is dequantised to 16 bits, or a result that cuBLAS rounds to them,
# loses that rounding (cut off by the interpreter where a device rounds), and no sum can lose more.
FEW_LIMIT = 2e-6
MANY_LIMITS = {torch.float32: 2e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-6.4}


def draw_weight(
    rng: random.Random, guards: Guards, name: str, dtype: torch.dtype, num_out: int, num_in: int
) -> GpuWeight:
    """``num_in`` is a multiple of 32."""
    groups = [g for g in (32, 64, 128, 256) if num_in % g == 0]
    group = rng.choice(groups)
    scale = torch.rand(num_out, num_in // group) * 0.1 + 0.01
    zero = torch.randn(num_out, num_in // group)
    if name == "plain":
        return guards.wrap(torch.randn(num_out, num_in).to(dtype))
    if name == "float8":
        codes = torch.randn(num_out, num_in).to(torch.float8_e4m3fn)
        eighths = pack_float8(codes, scale[:, 0])
        return Float8Weight(guards.wrap(eighths.codes), guards.wrap(eighths.scale))
    if name.startswith("int4"):
        codes = torch.randint(0, 16, (num_out, num_in), dtype=torch.uint8)
        w = pack_int4(codes, scale, zero if "zeros" in name else None, group)
        kept_zero = None if w.zero is None else guards.wrap(w.zero)
        return Int4Weight(guards.wrap(w.packed), guards.wrap(w.scale), kept_zero, group, num_in)
    if name == "uint8 groups":
        codes = torch.randint(0, 256, (num_out, num_in), dtype=torch.uint8)
        packed = pack_int8(codes, scale, zero, group)
    else:
        codes = torch.randint(-127, 128, (num_out, num_in), dtype=torch.int8)
        is_grouped = "groups" in name
        packed = pack_int8(
            codes, scale if is_grouped else scale[:, 0], None, group if is_grouped else None
        )
    kept_zero = None if packed.zero is None else guards.wrap(packed.zero)
    return Int8Weight(guards.wrap(packed.codes), guards.wrap(packed.scale), kept_zero, packed.group)


def check(x: torch.Tensor, weight: GpuWeight, bias: torch.Tensor | None, limit: float) -> None:
    found = TRITON.matmul(x, weight, bias, out_dtype=torch.float32)
    expected = ORACLE.matmul(x, weight, bias, out_dtype=torch.float32)
    assert found.dtype == torch.float32
    magnitudes = x.float().abs() @ dequantize(weight).abs().T
    if bias is not None:
        magnitudes += bias.abs()
    error = float(((found - expected).abs() / magnitudes.clamp_min(1e-6)).max())
    assert error <= limit, f"{error} of the magnitudes, expected at most {limit}"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("repeat", range(NUM_CASES_FACTOR))
def test_few_rows(name: str, dtype: torch.dtype, repeat: int) -> None:
    rng = fresh_rng()
    num_rows = rng.choice((1, 1, 2, 5, 16, 17, 40))
    num_out, num_in = rng.choice((1, 33, 64, 70)), rng.choice((32, 96, 128, 288, 640))
    print(f"{num_rows=} {num_out=} {num_in=}")
    with guarded() as guards:
        weight = draw_weight(rng, guards, name, dtype, num_out, num_in)
        x = guards.wrap(torch.randn(num_rows, num_in + 32).to(dtype))[:, :num_in]
        bias = rng.choice((None, guards.wrap(torch.randn(num_out))))
        check(x, weight, bias, FEW_LIMIT)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("repeat", range(NUM_CASES_FACTOR))
def test_parts_sum_to_the_product_and_gates_are_applied(name: str, repeat: int) -> None:
    """Of few rows, of many, and of none."""
    rng = fresh_rng()
    dtype = rng.choice(DTYPES)
    num_in = rng.choice((96, 256, 640))
    limit = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for num_rows in (rng.choice((1, 8, 33)), rng.choice((0, 65))):
        print(f"{dtype=} {num_rows=} {num_in=}")
        with guarded() as guards:
            weight = draw_weight(rng, guards, name, dtype, rng.choice((2, 66, 140)), num_in)
            x = guards.wrap((0.02 * torch.randn(num_rows, num_in)).to(dtype))
            parts = TRITON.matmul_parts(x, weight)
            gated = [ops.matmul_gated(x, weight, "gelu_tanh") for ops in (TRITON, ORACLE)]
        assert len(parts) <= few_rows.MAX_PARTS
        assert len(parts) == 1 or parts.dtype == torch.float32
        expected = ORACLE.matmul_parts(x, weight)[0]
        for found, wanted in ((parts.float().sum(0), expected), gated):
            assert found.shape == wanted.shape
            largest = float(wanted.abs().max()) if wanted.numel() else 1.0
            torch.testing.assert_close(
                found.float(), wanted.float(), rtol=limit, atol=limit * max(1.0, largest)
            )
        assert gated[0].dtype == dtype


def test_a_long_product_is_split() -> None:
    fresh_rng()
    x, weight = torch.randn(2, 4096), torch.randn(8, 4096)
    parts = TRITON.matmul_parts(x, weight)
    assert len(parts) > 1, "one tile would leave a device idle"
    torch.testing.assert_close(parts.sum(0), x @ weight.T, rtol=1e-4, atol=1e-3)


def test_four_codes_are_unpacked_exactly() -> None:
    """What ``codes_of`` has compiled, instruction by instruction: no interpreter runs it."""
    (number,) = torch.randint(0, 1 << 32, (1,)).tolist()
    registers = {"$4": number}
    immediate = {"0x000F000F", "0x43004300"}
    for line in dot._MAGIC.value.splitlines():
        name, _, rest = line.strip(" ;").partition(" ")
        target, *operands = rest.split(", ")
        if name == "shr.u32":
            registers[target] = registers[operands[0]] >> int(operands[1])
        elif name == "lop3.b32":
            assert set(operands[1:3]) == immediate and operands[3] == "0xEA", "a & b | c"
            registers[target] = registers[operands[0]] & 0x000F000F | 0x43004300
        else:
            assert name in ("{", "}", ".reg", "")
    for quarter in range(4):
        bits = torch.tensor([registers[f"${quarter}"]]).to(torch.uint32).view(torch.bfloat16)
        codes = [number >> 4 * quarter & 0xF, number >> 16 + 4 * quarter & 0xF]
        assert bits.tolist() == [dot.code_offset(torch.bfloat16) + code for code in codes]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("repeat", range(NUM_CASES_FACTOR))
def test_many_rows(name: str, repeat: int) -> None:
    rng = fresh_rng()
    dtype = rng.choice(DTYPES)
    num_rows = rng.choice((65, 130))
    num_out, num_in = rng.choice((40, 130)), rng.choice((96, 256))
    print(f"{dtype=} {num_rows=} {num_out=} {num_in=}")
    with guarded() as guards:
        weight = draw_weight(rng, guards, name, dtype, num_out, num_in)
        x = guards.wrap(torch.randn(num_rows, num_in).to(dtype))
        bias = rng.choice((None, guards.wrap(torch.randn(num_out))))
        check(x, weight, bias, MANY_LIMITS[dtype])


@pytest.mark.parametrize("name", ["plain", "int4 with zeros", "uint8 groups"])
def test_every_launch_configuration_gives_the_same(name: str) -> None:
    rng = fresh_rng()
    with guarded() as guards:
        weight = draw_weight(rng, guards, name, torch.float32, 40, 192)
        x = guards.wrap(torch.randn(65, 192))
        few = (*few_rows.CONFIGS, *few_rows.SMALLER)
        if name.startswith("int4"):
            few = (
                *few_rows.INT4_CONFIGS,
                *few_rows.INT4_WIDE_CONFIGS,
                *few_rows.INT4_SMALLER,
            )
        gate_up = draw_weight(rng, guards, name, torch.float32, 80, 192)
        cases = [(2, config) for config in few]
        if name != "plain":
            cases += [(65, config) for config in (*many_rows.CONFIGS, *many_rows.SMALLER)]
        for num_rows, config in cases:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(TUNER, "choose", lambda *_, config=config: config)
                check(x[:num_rows], weight, None, FEW_LIMIT)
                found, expected = (ops.matmul_gated(x[:2], gate_up) for ops in (TRITON, ORACLE))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("out_dtype", [None, torch.float16])
def test_dtype_of_the_result(out_dtype: torch.dtype | None) -> None:
    x, weight = torch.randn(2, 32).bfloat16(), torch.randn(3, 32).bfloat16()
    found = TRITON.matmul(x, weight, out_dtype=out_dtype)
    assert found.dtype == (out_dtype or torch.bfloat16)
    torch.testing.assert_close(found.float(), x.float() @ weight.float().T, rtol=2e-2, atol=2e-2)


def test_no_rows_and_wrong_widths() -> None:
    weight = torch.randn(3, 32)
    assert TRITON.matmul(torch.zeros(0, 32), weight).shape == (0, 3)
    with pytest.raises(ValueError, match="x has 31 inputs, the weight 32"):
        TRITON.matmul(torch.zeros(1, 31), weight)


@pytest.mark.parametrize("num_in", [32, 96, 256, 320])
def test_packing_int4_keeps_values(num_in: int) -> None:
    fresh_rng()
    codes = torch.randint(0, 16, (7, num_in), dtype=torch.uint8)
    scale, zero = torch.rand(7, num_in // 32), torch.randn(7, num_in // 32)
    packed = pack_int4(codes, scale, zero, 32, torch.float32)
    wide = scale.repeat_interleave(32, 1), zero.repeat_interleave(32, 1)
    torch.testing.assert_close(dequantize(packed), codes * wide[0] + wide[1])
    assert packed.num_bytes == 7 * -(-num_in // 64) * (32 + 2 * 2 * 4)


def test_packing_int4_keeps_scales_beyond_float16() -> None:
    codes = torch.full((2, 64), 3, dtype=torch.uint8)
    for scale in (1e-6, 1e6):
        packed = pack_int4(codes, torch.full((2, 1), scale), None, 64)
        assert packed.scale.dtype == torch.float32
        torch.testing.assert_close(dequantize(packed), torch.full((2, 64), 3 * scale))
    assert pack_int4(codes, torch.full((2, 1), 0.5), None, 64).scale.dtype == torch.float16


def test_packing_int8_shifts_unsigned_codes() -> None:
    codes = torch.tensor([[0, 127, 128, 255] * 8], dtype=torch.uint8)
    packed = pack_int8(codes, torch.tensor([0.5]))
    torch.testing.assert_close(dequantize(packed), codes * 0.5)


def test_packing_rejects_unsupported_groups() -> None:
    codes = torch.zeros(2, 96, dtype=torch.uint8)
    for group in (16, 48, 64):
        with pytest.raises(ValueError, match="expected 32, 64, 128 or 256"):
            pack_int4(codes, torch.ones(2, 96 // group + 1), None, group)
        with pytest.raises(ValueError, match="expected 32, 64, 128 or 256"):
            pack_int8(codes, torch.ones(2, 96 // group + 1), None, group)


def test_cost_counts_the_weight_once() -> None:
    weight = pack_int4(torch.zeros(8, 128, dtype=torch.uint8), torch.ones(8, 1), None, 128)
    x, out = torch.zeros(2, 128, dtype=torch.bfloat16), torch.zeros(2, 8)
    cost = matmul_cost(x, weight, out)
    assert cost.num_bytes == 8 * 128 // 2 + 8 * 2 + 2 * 128 * 2 + 2 * 8 * 4
    assert cost.num_flops == 2 * 2 * 8 * 128
    assert cost.floor_s(1e9, 1e15) == pytest.approx(cost.num_bytes / 1e9)
    assert cost.floor_s(1e15, 1e9) == pytest.approx(cost.num_flops / 1e9)
    assert matmul_cost(x, torch.zeros(8, 128), out).num_bytes == 4096 + 512 + 64
