"""Block formats against the gguf package, and the linear layer over them."""

from __future__ import annotations

from typing import get_args

import gguf.quants
import pytest
import torch

from kernels.torch_cpu import matmul
from llm_core.quant import linear
from llm_core.quant.formats import (
    BLOCK_BYTES,
    BlockKind,
    BlockTensor,
    GroupedCodes,
    quantize_int8,
    stack_rows,
    to_float,
)
from llm_core.quant.gguf_blocks import block_len
from llm_core.quant.grouped import to_grouped
from llm_core.quant.linear import FormatChoice, Linear, WeightFormat, choose_formats

KINDS = get_args(BlockKind)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def blocks(kind: BlockKind, weight: torch.Tensor) -> BlockTensor:
    """``weight`` quantised by the gguf package."""
    num_out, num_in = weight.shape
    shape = (num_out, num_in // block_len(kind), BLOCK_BYTES[kind])
    if kind.endswith("_K"):  # the package only reads these: random bytes, scales of fair size
        return random_blocks(kind, shape, seed=int(weight[0, 0] * 1000))
    raw = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
    return BlockTensor(kind, torch.from_numpy(raw).view(shape))


def random_blocks(kind: BlockKind, shape: tuple[int, int, int], seed: int) -> BlockTensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    for at in (208,) if kind == "Q6_K" else (0, 2):
        scales = 0.001 * torch.rand(*shape[:2], 1, generator=generator) - 0.0005
        raw[..., at : at + 2] = scales.half().view(torch.uint8)
    return BlockTensor(kind, raw)


def widened(kind: str, num_in: int) -> int:
    """``num_in``, or as many blocks of 256."""
    return num_in * 8 if kind.endswith("_K") else num_in


def by_gguf(tensor: BlockTensor) -> torch.Tensor:
    raw = tensor.blocks.flatten(1).numpy()
    kind = gguf.GGMLQuantizationType[tensor.kind]
    return torch.from_numpy(gguf.quants.dequantize(raw, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 32), (5, 96), (48, 256)])
def test_dequantize_equals_gguf_exactly(kind: BlockKind, shape: tuple[int, int]) -> None:
    shape = (shape[0], widened(kind, shape[1]))
    tensor = blocks(kind, rand(*shape))
    assert tensor.shape == shape
    assert tensor.scales_are_finite()
    assert torch.equal(tensor.dequantize(), by_gguf(tensor))


@pytest.mark.parametrize("kind", KINDS)
def test_dequantize_all_byte_values(kind: BlockKind) -> None:
    """Every code in every place, with negative, tiny and large scales."""
    raw = torch.arange(256, dtype=torch.uint8).repeat(BLOCK_BYTES[kind])
    tensor = BlockTensor(kind, raw.view(-1, 1, BLOCK_BYTES[kind]).clone())
    for at in (209,) if kind == "Q6_K" else (1, 3):
        tensor.blocks[..., at] &= 0xBF  # keep the float16 scales finite
    assert torch.equal(tensor.dequantize(), by_gguf(tensor))


@pytest.mark.parametrize("kind", KINDS)
def test_row_selection(kind: BlockKind) -> None:
    tensor = blocks(kind, rand(9, widened(kind, 64)))
    picked = torch.tensor([8, 0, 0, 3])
    assert torch.equal(tensor.rows(picked).dequantize(), tensor.dequantize()[picked])


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_codes_are_exact(kind: BlockKind) -> None:
    tensor = blocks(kind, rand(6, widened(kind, 64)))
    grouped = to_grouped(tensor)
    if kind == "Q6_K":
        assert grouped is None
        return
    assert grouped is not None
    assert (grouped.shape, grouped.group) == (tensor.shape, 32)
    assert int(grouped.codes.amax()) <= (15 if grouped.bits == 4 else 255)
    assert torch.equal(grouped.dequantize(), tensor.dequantize())
    picked = torch.tensor([5, 0])
    assert torch.equal(grouped.rows(picked).dequantize(), tensor.dequantize()[picked])


def test_stacked_codes_stay_quantised() -> None:
    grouped = [to_grouped(blocks("Q4_1", rand(n, 32, seed=n))) for n in (3, 2)]
    parts = [part for part in grouped if part is not None]
    stacked = stack_rows(parts)
    assert isinstance(stacked, GroupedCodes)
    expected = torch.cat([part.dequantize() for part in parts])
    assert torch.equal(stacked.dequantize(), expected)
    symmetric = GroupedCodes(parts[0].codes, parts[0].scale, None, 4, 32)
    mixed = stack_rows([parts[1], symmetric])
    assert isinstance(mixed, GroupedCodes)
    assert torch.equal(mixed.dequantize()[2:], symmetric.dequantize())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_scales_that_are_not_finite_are_detected(kind: BlockKind, scale: float) -> None:
    tensor = blocks(kind, rand(3, widened(kind, 64)))
    at = 208 if kind == "Q6_K" else 0
    tensor.blocks[1, 1, at : at + 2] = torch.tensor([scale]).half().view(torch.uint8)
    assert not tensor.scales_are_finite()


def test_stack_rows_keeps_one_format_and_converts_mixed_ones() -> None:
    first, second = blocks("Q4_1", rand(3, 32)), blocks("Q4_1", rand(2, 32, seed=1))
    same = stack_rows([first, second])
    assert isinstance(same, BlockTensor)
    assert torch.equal(same.dequantize(), torch.cat((first.dequantize(), second.dequantize())))
    other = blocks("Q8_0", rand(4, 32, seed=2))
    mixed = stack_rows([first, other, rand(1, 32).half()])
    assert isinstance(mixed, torch.Tensor)
    assert torch.equal(mixed[:7], torch.cat((first.dequantize(), other.dequantize())))


def test_quantize_int8_is_within_half_a_step() -> None:
    weight = rand(5, 64)
    weight[2] = 0
    codes, scale = quantize_int8(weight)
    restored = codes * scale.unsqueeze(1)
    assert bool(((restored - weight).abs() <= scale.unsqueeze(1) * 0.501).all())
    assert codes[2].count_nonzero() == 0


# What each format may add to an exact product, relative to the sum of absolute products.
ROUNDING: dict[WeightFormat, float] = {
    "float32": 1e-6,
    "float16": 2**-11,
    "bfloat16": 2**-7,
    "int4": 2**-6,
    "int8": 2**-6,
    "w8a8": 2**-6,
    "fp8": 2**-4,
}


@pytest.mark.parametrize("weight_format", ROUNDING)
@pytest.mark.parametrize("num_rows", [1, 3, 4, 5, 8, 9, 70])
@pytest.mark.parametrize("kind", [*KINDS, "F32"])
def test_linear(weight_format: WeightFormat, num_rows: int, kind: str) -> None:
    """Row counts on both sides of each switch; the meaning stays that of the stored weight."""
    num_in = widened(kind, 96)
    weight = rand(48, num_in)
    stored = weight if kind == "F32" else blocks(kind, weight)  # type: ignore[arg-type]
    exact, x = to_float(stored), rand(num_rows, num_in, seed=1)
    layer = Linear(stored, weight_format)
    result = layer(x)
    assert (layer.out_size, layer.in_size) == (48, num_in)
    assert (result.dtype, result.shape) == (torch.float32, (num_rows, 48))
    # A 4-bit form rounds scale and zero, which may be larger than the value they give.
    size = exact.abs() if weight_format != "int4" else exact.abs() + exact.abs().amax()
    bound = ROUNDING[weight_format] * (x.abs() @ size.T) + 1e-6
    if weight_format == "w8a8":  # half a step of the largest activation of a row
        bound += x.abs().amax(1, keepdim=True) / 254 * exact.abs().sum(1)
    assert bool(((result - x @ exact.T).abs() <= bound).all())


@pytest.mark.parametrize("weight_format", ROUNDING)
def test_linear_of_odd_sizes_falls_back(weight_format: WeightFormat) -> None:
    """17 rows fit no 4-bit tile, 33 columns no 8-bit tile."""
    for stored in (rand(17, 33), blocks("Q4_1", rand(17, 64))):
        exact, x = to_float(stored), rand(2, stored.shape[1], seed=1)
        bound = 2**-4 * (x.abs() @ exact.abs().T) + 1e-6
        if weight_format == "w8a8":
            bound += x.abs().amax(1, keepdim=True) / 254 * exact.abs().sum(1)
        assert bool(((Linear(stored, weight_format)(x) - x @ exact.T).abs() <= bound).all())


@pytest.mark.parametrize("group", [32, 64, 128, 256])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_linear_of_grouped_codes(group: int, is_symmetric: bool) -> None:
    """Checkpoints' 4-bit groups, with and without a zero point, on torch's 4-bit product."""
    generator = torch.Generator().manual_seed(group)
    codes = torch.randint(16, (32, 512), generator=generator, dtype=torch.uint8)
    scale = torch.rand(32, 512 // group, generator=generator)
    zero = None if is_symmetric else -scale * torch.randint(16, scale.shape, generator=generator)
    stored = GroupedCodes(codes, scale, zero, 4, group)
    exact, x = stored.dequantize(), rand(3, 512, seed=1)
    bound = 2**-6 * (x.abs() @ (exact.abs() + 16 * scale.max()).T)
    assert bool(((Linear(stored, "int4")(x) - x @ exact.T).abs() <= bound).all())


def test_no_rows_give_no_rows() -> None:
    for weight_format in ROUNDING:
        assert Linear(blocks("Q4_1", rand(16, 32)), weight_format)(rand(0, 32)).shape == (0, 16)


def test_weights_beyond_float16_stay_exact() -> None:
    weight = rand(4, 8)
    weight[0, 0] = 1e6
    x = rand(3, 8, seed=1)
    torch.testing.assert_close(Linear(weight, "float16")(x), x @ weight.T)


def test_auto_depends_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert choose_formats("auto") == FormatChoice("int4", "int4")
    assert str(choose_formats("auto")) == "int4"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(linear, "has_float16_gemm", lambda: True)
    assert str(choose_formats("auto")) == "float16"
    monkeypatch.setattr(linear, "has_float16_gemm", lambda: False)
    assert choose_formats("auto") == FormatChoice("float32", "float32")
    # Such a torch still multiplies by a weight asked for in float16.
    x = rand(2, 8)
    assert torch.equal(Linear(rand(4, 8), "float16")(x), matmul.Float32Matmul(rand(4, 8))(x))
