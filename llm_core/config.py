"""Architecture parameters of a decoder-only model.

One decoder implementation serves all model families; every difference between families is a field
here. Independent of files and tensors. The defaults are those of Llama.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

Family = Literal["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"]
Activation = Literal["silu", "gelu_tanh"]
KvDtype = Literal["float32", "bfloat16", "int8", "fp8"]  # of keys and values
HeadKind = Literal["eagle3", "eagle1", "medusa"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRope:
    """Position interpolation (Chen et al. 2023): divides every frequency by ``factor``."""

    factor: float

    def __post_init__(self) -> None:
        _require_positive(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Rope:
    """Llama 3.1: divides low frequencies by ``factor``, keeps high ones, blends those between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_len: int

    def __post_init__(self) -> None:
        _require_positive(self)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor is {self.high_freq_factor}, expected above low_freq_factor "
                f"{self.low_freq_factor}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnRope:
    """YaRN (Peng et al. 2023). ``attention_factor`` multiplies the rotated queries and keys.

    ``truncate``: round the ends of the ramp outwards to whole dimensions.
    """

    factor: float
    original_context_len: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        _require_positive(self)
        if self.beta_fast <= self.beta_slow:
            raise ValueError(
                f"beta_fast is {self.beta_fast}, expected above beta_slow {self.beta_slow}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRope:
    """LongRoPE (Ding et al. 2024): a divisor per frequency, one set for contexts up to
    ``original_context_len`` and one for longer ones. ``attention_factor`` as in YaRN."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_context_len: int
    attention_factor: float

    def __post_init__(self) -> None:
        _require_positive(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrequencyFactors:
    """A stored divisor per frequency (the form of Llama 3's scaling in GGUF files)."""

    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        _require_positive(self)


RopeScaling = LinearRope | Llama3Rope | YarnRope | LongRope | FrequencyFactors


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Hyperparameters of a decoder. Raises ValueError for inconsistent values.

    ``attention_bias``: query, key and value have a bias. ``qk_norm``: RMS norm over head_dim of
    each query and key head, before RoPE. ``post_norms``: RMS norm of the outputs of attention and
    feed-forward before the residual addition (Gemma). ``attention_scale`` None: head_dim ** -0.5.
    Soft caps: x -> cap * tanh(x / cap), on attention scores and on logits. ``sliding_window``: in
    layers marked in ``layer_is_sliding`` (one entry per layer, or ()) a position sees itself and
    the sliding_window - 1 previous ones. ``rotary_dim``: rotated dimensions of a head (None: all);
    ``local_rope_theta``: theta of sliding layers, which then have no scaling (Gemma 3).
    """

    family: Family = "llama"
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_len: int
    rms_eps: float = 1e-5
    tie_embeddings: bool = False
    activation: Activation = "silu"
    attention_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    sliding_window: int | None = None
    layer_is_sliding: tuple[bool, ...] = ()
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    rotary_dim: int | None = None

    def __post_init__(self) -> None:
        _require_positive(self)
        if self.num_heads % self.num_kv_heads != 0:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2 != 0:
            raise ValueError(f"head_dim is {self.head_dim}, but rotary embedding needs it even")
        if self.rotary_dim is not None and (self.rotary_dim % 2 or self.rotary_dim > self.head_dim):
            raise ValueError(
                f"rotary_dim is {self.rotary_dim}, expected an even number up to head_dim "
                f"{self.head_dim}"
            )
        if self.activation not in get_args(Activation):
            raise ValueError(f"activation is {self.activation!r}, expected 'silu' or 'gelu_tanh'")
        self._check_windows()
        self._check_factors()

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads (or value heads) together."""
        return self.num_kv_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def score_scale(self) -> float:
        """Factor of the attention scores."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def num_rotated(self) -> int:
        """Number of dimensions of a head that RoPE rotates."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    def window_of(self, layer: int) -> int | None:
        """The sliding window of a layer; None for full attention."""
        is_sliding = bool(self.layer_is_sliding) and self.layer_is_sliding[layer]
        return self.sliding_window if is_sliding else None

    def _check_windows(self) -> None:
        if self.layer_is_sliding and len(self.layer_is_sliding) != self.num_layers:
            raise ValueError(
                f"layer_is_sliding has {len(self.layer_is_sliding)} entries, expected one for each "
                f"of {self.num_layers} layers"
            )
        if any(self.layer_is_sliding) and self.sliding_window is None:
            raise ValueError("layer_is_sliding marks layers, but sliding_window is None")

    def _check_factors(self) -> None:
        scaling, expected = self.rope_scaling, self.num_rotated // 2
        if isinstance(scaling, YarnRope) and self.rope_theta <= 1:
            raise ValueError(f"rope_theta is {self.rope_theta}, expected above 1 for YaRN")
        lists: dict[str, tuple[float, ...]] = {}
        if isinstance(scaling, LongRope):
            lists = {"short_factors": scaling.short_factors, "long_factors": scaling.long_factors}
        elif isinstance(scaling, FrequencyFactors):
            lists = {"factors": scaling.factors}
        for name, factors in lists.items():
            if len(factors) != expected:
                raise ValueError(
                    f"rope {name} has {len(factors)} entries, expected {expected} "
                    "(one for each pair that turns)"
                )


def _require_positive(config: object) -> None:
    """Raises ValueError unless all numbers of a dataclass and its tuples are positive."""
    for field in fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            if not math.isfinite(number) or number <= 0:
                raise ValueError(f"{field.name} is {number}, expected a positive number")
