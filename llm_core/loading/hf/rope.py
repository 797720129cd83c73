"""RoPE settings of a Hugging Face config.json, in the old and the new schema.

Old: ``rope_theta`` and ``rope_scaling``. New: ``rope_parameters``, which has both, for Gemma 3 per
kind of layer. Defaults are those of transformers.
"""

from __future__ import annotations

import math
from typing import TypedDict

from llm_core.config import Family, LinearRope, Llama3Rope, LongRope, RopeScaling, YarnRope
from llm_core.loading.fields import Fields


class RopeSettings(TypedDict):
    """The fields of ModelConfig about RoPE."""

    rope_theta: float
    rope_scaling: RopeScaling | None
    local_rope_theta: float | None
    rotary_dim: int | None


def read_rope(fields: Fields, family: Family, head_dim: int, context_len: int) -> RopeSettings:
    """Raises ModelLoadError, or ValueError for impossible numbers."""
    old, new = fields.section("rope_scaling"), fields.section("rope_parameters")
    scaling, theta, local_theta = (new if fields.is_written("rope_parameters") else old), 1e4, None
    if family == "gemma3":
        theta = fields.number("rope_theta", 1e6)
        local_theta = fields.number("rope_local_base_freq", 1e4)
        local = new.section("sliding_attention")
        local_theta = local.number("rope_theta", local_theta)
        local.forbid_unless("rope_type", "default")
        if "full_attention" in new:
            scaling = new.section("full_attention")
    else:
        theta = fields.number("rope_theta", theta)
    share = scaling.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if not 0 < share <= 1:
        raise fields.error(f"partial_rotary_factor is {share}, expected in 0 to 1")
    rotary_dim = int(head_dim * share)
    return RopeSettings(
        rope_theta=scaling.number("rope_theta", theta),
        rope_scaling=_scaling(scaling, fields, family, context_len),
        local_rope_theta=local_theta,
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
    )


def _scaling(rope: Fields, fields: Fields, family: Family, context_len: int) -> RopeScaling | None:
    kind = rope.text("rope_type", rope.text("type", "default"))
    if family == "phi3" and kind in ("su", "yarn"):  # the first name of longrope
        kind = "longrope"
    if kind == "default":
        return None
    if kind == "dynamic":
        # No effect up to max_position_embeddings, and longer sequences are not accepted.
        return None
    if kind == "linear":
        return LinearRope(factor=rope.number("factor"))
    if kind not in ("llama3", "yarn", "longrope"):
        raise rope.error(
            f"rope type {kind!r:.40} is not supported, only default, linear, dynamic, llama3, "
            "yarn and longrope"
        )
    original_len = (fields if "original_max_position_embeddings" in fields else rope).integer(
        "original_max_position_embeddings", context_len
    )
    if kind == "llama3":
        return Llama3Rope(
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_context_len=original_len,
        )
    factor = rope.number("factor", context_len / original_len)
    if kind == "yarn":
        return YarnRope(
            factor=factor,
            original_context_len=original_len,
            attention_factor=_yarn_attention_factor(rope, factor),
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            truncate=rope.flag("truncate", True),
        )
    default = 1.0
    if factor > 1 and original_len > 1:
        default = math.sqrt(1 + math.log(factor) / math.log(original_len))
    return LongRope(
        short_factors=rope.numbers("short_factor"),
        long_factors=rope.numbers("long_factor"),
        original_context_len=original_len,
        attention_factor=rope.number("attention_factor", default),
    )


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    """Peng et al. 2023, equation 22, with the optional factors added by DeepSeek."""

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    given = rope.optional_number("attention_factor")
    if given is not None:
        return given
    above, below = rope.optional_number("mscale"), rope.optional_number("mscale_all_dim")
    return magnitude(above) / magnitude(below) if above and below else magnitude(1.0)
