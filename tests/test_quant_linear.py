"""Block formats against the gguf package, and the layer that multiplies by them."""

from __future__ import annotations

from typing import get_args

import gguf.quants
import pytest
import torch

from kernels import cpu_matmul
from llm_core.quant import linear
from llm_core.quant.formats import (
    BLOCK_BYTES,
    BlockKind,
    BlockTensor,
    quantize_int8,
    stack_rows,
    to_float,
)
from llm_core.quant.linear import FormatChoice, Linear, WeightFormat, choose_formats

KINDS = get_args(BlockKind)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def blocks(kind: BlockKind, weight: torch.Tensor) -> BlockTensor:
    """``weight`` quantised by the gguf package."""
    raw = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
    num_out, num_in = weight.shape
    return BlockTensor(kind, torch.from_numpy(raw).view(num_out, num_in // 32, BLOCK_BYTES[kind]))


def by_gguf(tensor: BlockTensor) -> torch.Tensor:
    raw = tensor.blocks.flatten(1).numpy()
    kind = gguf.GGMLQuantizationType[tensor.kind]
    return torch.from_numpy(gguf.quants.dequantize(raw, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 32), (5, 96), (48, 256)])
def test_dequantize_equals_gguf_exactly(kind: BlockKind, shape: tuple[int, int]) -> None:
    tensor = blocks(kind, rand(*shape))
    assert tensor.shape == shape
    assert torch.equal(tensor.dequantize(), by_gguf(tensor))


@pytest.mark.parametrize("kind", KINDS)
def test_dequantize_all_byte_values(kind: BlockKind) -> None:
    """Every code in every place, with negative, tiny and large scales."""
    raw = torch.arange(256, dtype=torch.uint8).repeat(BLOCK_BYTES[kind])
    tensor = BlockTensor(kind, raw.view(-1, 1, BLOCK_BYTES[kind]).clone())
    tensor.blocks[..., 1] &= 0x3F  # keep the float16 scales finite
    tensor.blocks[..., 3] &= 0x3F
    assert torch.equal(tensor.dequantize(), by_gguf(tensor))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_rows(kind: BlockKind) -> None:
    tensor = blocks(kind, rand(9, 64))
    picked = torch.tensor([8, 0, 0, 3])
    assert torch.equal(tensor.rows(picked).dequantize(), tensor.dequantize()[picked])


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_int4_form_means_the_same_values(kind: BlockKind) -> None:
    tensor = blocks(kind, rand(16, 96))
    codes, scale_zero = tensor.int4()
    assert (codes.dtype, codes.shape, scale_zero.shape) == (torch.int32, (16, 96), (3, 16, 2))
    scale, zero = scale_zero.double().repeat_interleave(32, 0).permute(2, 1, 0)
    values = (codes - 8) * scale + zero
    torch.testing.assert_close(values.float(), tensor.dequantize(), atol=1e-6, rtol=1e-6)


def test_q8_0_has_no_int4_form() -> None:
    with pytest.raises(ValueError, match="Q8_0"):
        blocks("Q8_0", rand(2, 32)).int4()


def test_stack_rows_keeps_one_kind_and_mixes_others() -> None:
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
}


@pytest.mark.parametrize("weight_format", ROUNDING)
@pytest.mark.parametrize("num_rows", [1, 3, 4, 5, 8, 9, 70])
@pytest.mark.parametrize("kind", [*KINDS, "F32"])
def test_linear(weight_format: WeightFormat, num_rows: int, kind: str) -> None:
    """Row counts on both sides of each switch; the meaning stays that of the stored weight."""
    weight = rand(48, 96)
    stored = weight if kind == "F32" else blocks(kind, weight)  # type: ignore[arg-type]
    exact, x = to_float(stored), rand(num_rows, 96, seed=1)
    layer = Linear(stored, weight_format)
    result = layer(x)
    assert (layer.out_size, layer.in_size) == (48, 96)
    assert (result.dtype, result.shape) == (torch.float32, (num_rows, 48))
    # A 4-bit form rounds scale and zero, which may be larger than the value they give.
    size = exact.abs() if weight_format != "int4" else exact.abs() + exact.abs().amax()
    bound = ROUNDING[weight_format] * (x.abs() @ size.T) + 1e-6
    assert bool(((result - x @ exact.T).abs() <= bound).all())


@pytest.mark.parametrize("weight_format", ROUNDING)
def test_linear_of_odd_sizes_falls_back_to_what_fits(weight_format: WeightFormat) -> None:
    """17 rows fit no 4-bit tile, 33 columns no 8-bit tile."""
    for stored in (rand(17, 33), blocks("Q4_1", rand(17, 64))):
        exact, x = to_float(stored), rand(2, stored.shape[1], seed=1)
        bound = 2**-6 * (x.abs() @ exact.abs().T) + 1e-6
        assert bool(((Linear(stored, weight_format)(x) - x @ exact.T).abs() <= bound).all())


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
    assert torch.equal(Linear(rand(4, 8), "float16")(x), cpu_matmul.Float32Matmul(rand(4, 8))(x))
