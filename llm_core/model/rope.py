"""Tables of rotary position embeddings (Su et al. 2021), with the common context extensions.

A table is complex64 [num_positions, 1, head_dim / 2]; entry (p, j) rotates the dimensions
(2j, 2j + 1) of a head at position p. Its magnitude is 1, or the attention factor of YaRN or
LongRoPE, which thereby multiplies queries and keys. Pairs beyond ``rotary_dim`` are 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from llm_core.config import (
    FrequencyFactors,
    LinearRope,
    Llama3Rope,
    LongRope,
    ModelConfig,
    RopeScaling,
    YarnRope,
)

_CHUNK_LEN = 4096


@dataclass(frozen=True, slots=True)
class RopeTables:
    """The distinct tables of a model, and the index of each layer's table."""

    tables: tuple[torch.Tensor, ...]
    layer_table: tuple[int, ...]

    def of_layer(self, layer: int) -> torch.Tensor:
        """complex64 [num_positions, 1, head_dim / 2]."""
        return self.tables[self.layer_table[layer]]


def rope_tables(config: ModelConfig, num_positions: int) -> RopeTables:
    """The tables for positions [0, num_positions).

    LongRoPE's short or long factors are selected once, by ``num_positions``: cached keys could not
    be updated when a sequence grows.
    """
    main = _table(config, num_positions, config.rope_theta, config.rope_scaling)
    if config.local_rope_theta is None or not any(config.layer_is_sliding):
        return RopeTables((main,), (0,) * config.num_layers)
    local = _table(config, num_positions, config.local_rope_theta, None)
    return RopeTables((main, local), tuple(map(int, config.layer_is_sliding)))


def _table(
    config: ModelConfig, num_positions: int, theta: float, scaling: RopeScaling | None
) -> torch.Tensor:
    """Computed in float64 in chunks of positions, and rounded once."""
    rotary_dim = config.num_rotated
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    frequencies, magnitude = _scaled(theta**-exponents, theta, scaling, num_positions)
    table = torch.ones(num_positions, config.head_dim // 2, dtype=torch.complex64)
    for first in range(0, num_positions, _CHUNK_LEN):
        last = min(first + _CHUNK_LEN, num_positions)
        angles = torch.outer(torch.arange(first, last, dtype=torch.float64), frequencies)
        turned = torch.polar(torch.full_like(angles, magnitude), angles)
        table[first:last, : rotary_dim // 2] = turned
    return table.unsqueeze(1)


def _scaled(
    frequencies: torch.Tensor, theta: float, scaling: RopeScaling | None, num_positions: int
) -> tuple[torch.Tensor, float]:
    """(frequencies in radians per position, magnitude) after ``scaling``."""
    if isinstance(scaling, LinearRope):
        return frequencies / scaling.factor, 1.0
    if isinstance(scaling, FrequencyFactors):
        return frequencies / frequencies.new_tensor(scaling.factors), 1.0
    if isinstance(scaling, Llama3Rope):
        return _llama3(frequencies, scaling), 1.0
    if isinstance(scaling, YarnRope):
        return _yarn(frequencies, theta, scaling), scaling.attention_factor
    if isinstance(scaling, LongRope):
        is_long = num_positions > scaling.original_context_len
        factors = scaling.long_factors if is_long else scaling.short_factors
        return frequencies / frequencies.new_tensor(factors), scaling.attention_factor
    return frequencies, 1.0


def _llama3(frequencies: torch.Tensor, scaling: Llama3Rope) -> torch.Tensor:
    """Blends by the number of rotations of a frequency within the original context."""
    num_turns = frequencies * scaling.original_context_len / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_share = ((num_turns - low) / (high - low)).clamp(0, 1)
    return frequencies * kept_share + frequencies / scaling.factor * (1 - kept_share)


def _yarn(frequencies: torch.Tensor, theta: float, scaling: YarnRope) -> torch.Tensor:
    """A linear ramp over dimensions, from kept (beta_fast rotations or more) to interpolated."""
    num_pairs = frequencies.shape[0]

    def pair_with_turns(num_turns: float) -> float:
        ratio = scaling.original_context_len / (2 * math.pi * num_turns)
        return num_pairs * math.log(ratio) / math.log(theta)

    first, last = pair_with_turns(scaling.beta_fast), pair_with_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    # The published code clamps the upper end to 2 * num_pairs - 1, not to the last pair.
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    if first == last:
        last += 0.001
    pairs = torch.arange(num_pairs, dtype=torch.float64)
    interpolated_share = ((pairs - first) / (last - first)).clamp(0, 1)
    return frequencies * (1 - interpolated_share + interpolated_share / scaling.factor)
