"""Grouped codes equal the stored values; quantisation to 8 bits."""

from __future__ import annotations

import gguf.quants
import pytest
import torch

from llm_core.quant.formats import BLOCK_BYTES, BlockKind, BlockTensor
from llm_core.quant.grouped import quantize_grouped, to_grouped


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def blocks(kind: BlockKind, weight: torch.Tensor) -> BlockTensor:
    raw = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
    num_out, num_in = weight.shape
    return BlockTensor(kind, torch.from_numpy(raw).view(num_out, num_in // 32, BLOCK_BYTES[kind]))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_grouped_form_equals_the_stored_values(kind: BlockKind) -> None:
    stored = blocks(kind, rand(9, 96))
    grouped = to_grouped(stored)
    assert grouped is not None
    assert grouped.shape == stored.shape == (9, 96)
    assert grouped.bits == (8 if kind == "Q8_0" else 4)
    torch.testing.assert_close(grouped.dequantize(), stored.dequantize(), atol=1e-6, rtol=1e-6)


def test_floats_are_not_stored_in_groups() -> None:
    assert to_grouped(rand(4, 32)) is None


@pytest.mark.parametrize(("num_in", "group"), [(64, 32), (70, 32), (5, 64)])
def test_quantize_grouped_is_within_half_a_step(num_in: int, group: int) -> None:
    weight = rand(6, num_in)
    weight[3] = 0
    weight[4] = 1e-38  # its scale's inverse is beyond float32
    grouped = quantize_grouped(weight, group)
    padded_len = -(-num_in // group) * group
    assert grouped.shape == (6, padded_len)
    step = grouped.scale.repeat_interleave(group, 1)[:, :num_in]
    error = (grouped.dequantize()[:, :num_in] - weight).abs()
    assert bool((error <= step * 0.501 + 1e-37).all())
    assert grouped.codes[:, num_in:].count_nonzero() == 0
    assert grouped.codes[3].count_nonzero() == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_quantize_grouped_rejects_values_that_are_not_finite(value: float) -> None:
    weight = rand(2, 32)
    weight[1, 3] = value
    with pytest.raises(ValueError, match="not finite"):
        quantize_grouped(weight, 32)
