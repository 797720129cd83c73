"""RoPE tables against transformers, and the table of each layer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kernels.reference import rope_table
from llm_core.config import (
    FrequencyFactors,
    LinearRope,
    Llama3Rope,
    LongRope,
    RopeScaling,
    YarnRope,
)
from llm_core.model.rope import rope_tables
from tests.support.random_llama import tiny_config

SHORT, LONG = (1.0, 1.1, 1.3, 1.7, 2.0, 2.0, 3.0, 4.0), (1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0, 34.0)


def theirs(rope: dict[str, Any], num_positions: int) -> torch.Tensor:
    """The same table from transformers' float32 frequencies (head_dim 16, theta 500)."""
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=128,
        rope_parameters={"rope_theta": 500.0} | rope,
        pad_token_id=0,
    )
    seq_len = num_positions if rope["rope_type"] == "longrope" else None
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu", seq_len)
    angles = torch.outer(torch.arange(num_positions).double(), frequencies.double())
    table = torch.ones(num_positions, 8, dtype=torch.complex64)
    turned = torch.polar(torch.full_like(angles, magnitude), angles)
    table[:, : angles.shape[1]] = turned.to(torch.complex64)
    return table.unsqueeze(1)


@pytest.mark.parametrize(
    ("scaling", "rope"),
    [
        (LinearRope(factor=4.0), {"rope_type": "linear", "factor": 4.0}),
        (
            Llama3Rope(
                factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_len=32
            ),
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
        *(
            (
                YarnRope(
                    factor=4.0,
                    original_context_len=length,
                    attention_factor=0.1 * math.log(4) + 1,
                    truncate=truncate,
                ),
                {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": length,
                    "truncate": truncate,
                },
            )
            for length in (32, 2048)
            for truncate in (True, False)
        ),
        (
            LongRope(
                short_factors=SHORT,
                long_factors=LONG,
                original_context_len=50,
                attention_factor=1.25,
            ),
            {
                "rope_type": "longrope",
                "short_factor": SHORT,
                "long_factor": LONG,
                "original_max_position_embeddings": 50,
                "attention_factor": 1.25,
            },
        ),
    ],
)
@pytest.mark.parametrize("num_positions", [40, 90])
def test_tables_equal_transformers(
    scaling: RopeScaling, rope: dict[str, Any], num_positions: int
) -> None:
    config = tiny_config(rope_theta=500.0, rope_scaling=scaling)
    table = rope_tables(config, num_positions).of_layer(1)
    torch.testing.assert_close(table, theirs(rope, num_positions), atol=2e-5, rtol=0)


def test_partial_rotary_dim() -> None:
    config = tiny_config(rope_theta=500.0, rotary_dim=8, rope_scaling=LinearRope(factor=2.0))
    table = rope_tables(config, 40).of_layer(0)
    rope = {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}
    torch.testing.assert_close(table, theirs(rope, 40), atol=2e-5, rtol=0)
    assert bool((table[..., 4:] == 1).all())


def test_stored_factors_divide() -> None:
    factors = tuple(float(2**j) for j in range(8))
    table = rope_tables(tiny_config(rope_scaling=FrequencyFactors(factors=factors)), 3).of_layer(0)
    plain = rope_table(3, 16, 10000.0)
    torch.testing.assert_close(table[2].angle() * torch.tensor(factors), plain[2].angle())


def test_plain_table_is_the_reference() -> None:
    tables = rope_tables(tiny_config(), 50)
    assert len(tables.tables) == 1
    assert torch.equal(tables.of_layer(1), rope_table(50, 16, 10000.0))


def test_sliding_layers_have_their_own_unscaled_table() -> None:
    config = tiny_config(
        num_layers=3,
        sliding_window=4,
        layer_is_sliding=(True, False, True),
        local_rope_theta=100.0,
        rope_scaling=LinearRope(factor=8.0),
    )
    tables = rope_tables(config, 20)
    assert tables.layer_table == (1, 0, 1)
    assert torch.equal(tables.of_layer(0), rope_table(20, 16, 100.0))
    assert [config.window_of(layer) for layer in range(3)] == [4, None, 4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_dim": 18}, "rotary_dim is 18, expected an even number up to head_dim 16"),
        ({"rotary_dim": 7}, "rotary_dim is 7"),
        ({"activation": "relu"}, "activation is 'relu'"),
        ({"layer_is_sliding": (True,)}, "layer_is_sliding has 1 entries, .* 2 layers"),
        ({"layer_is_sliding": (True, False)}, "sliding_window is None"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"logit_softcap": -3.0}, "logit_softcap is -3.0"),
        ({"attention_scale": float("inf")}, "attention_scale is inf"),
        (
            {"rope_scaling": FrequencyFactors(factors=(1.0,) * 7)},
            "rope factors has 7 entries, expected 8",
        ),
    ],
)
def test_inconsistent_configs_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(**changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearRope(factor=0.0), "factor is 0.0"),
        (lambda: FrequencyFactors(factors=(1.0, float("nan"))), "factors is nan"),
        (
            lambda: Llama3Rope(
                factor=8.0, low_freq_factor=4.0, high_freq_factor=4.0, original_context_len=8
            ),
            "high_freq_factor is 4.0, expected above",
        ),
        (
            lambda: YarnRope(
                factor=2.0, original_context_len=8, attention_factor=1.0, beta_fast=1.0
            ),
            "beta_fast is 1.0, expected above",
        ),
    ],
)
def test_invalid_scalings_are_rejected(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
