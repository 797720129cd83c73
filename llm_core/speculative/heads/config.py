"""Configuration of a draft head, stored as JSON beside its tensors.

EAGLE-3 (arXiv 2503.01840), with three optional additions that published heads do not have. For the
pair (features f_i of position i, token x_(i+1)) at RoPE position i::

    f      = f_i as K parts of H; each divided by its RMS where ``normalises_features``
    hidden = fc [H, K*H] @ f                                    first step: the target's features
             hidden_proj [H, H] @ g if ``has_hidden_proj``, else g   later steps: own output g
    e      = target's embedding of x_(i+1), [H], with the target's embedding_scale
    resid  = hidden + embedding_proj [H, H] @ e if ``has_embedding_proj``, else hidden
    x      = cat(input_layernorm(e), hidden_norm(resid))        [2H]
    y      = resid + o_proj(attention(q_proj x, k_proj x, v_proj x))   RoPE as the target's
    g      = y + down_proj(silu(gate_proj z) * up_proj z),  z = post_attention_layernorm(y)
    logits = lm_head [V, H] @ (RMSNorm(g) * norm)    of x_(i+2), draft vocabulary

EAGLE-1/2 (arXiv 2401.15077, 2406.16858): K = 1, the feature is the hidden state after the final
norm, and hidden = fc [H, 2H] @ cat(e, f) + fc bias in every step. The layer is a plain Llama layer
without input norm (x = hidden, q/k/v are [*, H]); g is the next feature and the input of the
target's output head; there is no norm.

Medusa (arXiv 2401.10774): ``num_medusa_heads`` heads on the final hidden state n: head k predicts
x_(i+2+k) by lm_head @ (n + silu(W_k n + b_k)).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args

from llm_core.config import HeadKind, ModelConfig

KINDS: tuple[HeadKind, ...] = get_args(HeadKind)

_MAX_SIZE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Raises ValueError for values that are out of range or contradict each other.

    ``hidden_size`` and ``vocab_size`` are the target's. ``feature_layers``: i is the residual
    stream after layer i (from 0); the target's number of layers stands for the hidden state after
    the final norm. ``has_lm_head`` False: the rows of the target's output head for the draft
    vocabulary are used. ``has_draft_vocab`` False: the draft vocabulary is the target's.
    ``target_fingerprint``: as ``files.fingerprint``; "" if unknown.
    """

    kind: HeadKind
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    feature_layers: tuple[int, ...]
    num_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 2
    intermediate_size: int = 1
    rms_eps: float = 1e-5
    rope_theta: float = 10000.0
    normalises_features: bool = False
    has_embedding_proj: bool = False
    has_hidden_proj: bool = False
    has_lm_head: bool = True
    has_draft_vocab: bool = True
    num_medusa_heads: int = 0
    target_name: str = ""
    target_fingerprint: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r:.40}, expected one of {', '.join(KINDS)}")
        for name in _SIZES:
            value = getattr(self, name)
            if not 1 <= value <= _MAX_SIZE:
                raise ValueError(f"{name} is {value}, expected 1 to {_MAX_SIZE}")
        for name in ("rms_eps", "rope_theta"):
            value = getattr(self, name)
            if not math.isfinite(value) or value <= 0:
                raise ValueError(f"{name} is {value}, expected a positive number")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} exceeds vocab_size {self.vocab_size}"
            )
        if not self.has_draft_vocab and self.draft_vocab_size != self.vocab_size:
            raise ValueError("without a draft vocabulary, draft_vocab_size must be vocab_size")
        if self.num_heads % self.num_kv_heads != 0 or self.head_dim % 2 != 0:
            raise ValueError(
                f"{self.num_heads} heads, {self.num_kv_heads} key/value heads of {self.head_dim}: "
                "heads must be shared evenly and their size be even"
            )
        if not self.feature_layers or min(self.feature_layers) < 0:
            raise ValueError(f"feature_layers are {self.feature_layers}, expected some from 0 on")
        if self.kind != "eagle3" and len(self.feature_layers) != 1:
            raise ValueError(f"{self.kind} reads one layer's features, not {self.feature_layers}")
        if (self.kind == "medusa") != (self.num_medusa_heads > 0):
            raise ValueError(f"num_medusa_heads is {self.num_medusa_heads} for kind {self.kind}")

    @property
    def num_features(self) -> int:
        """Width of the target's features of a position: K * H."""
        return len(self.feature_layers) * self.hidden_size

    @property
    def query_size(self) -> int:
        """num_heads * head_dim."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """num_kv_heads * head_dim."""
        return self.num_kv_heads * self.head_dim

    def layer(self, context_len: int) -> ModelConfig:
        """The head's layer as a model of one layer, as ``KvCache`` and ``rope_tables`` need it."""
        return ModelConfig(
            num_layers=1,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            vocab_size=self.draft_vocab_size,
            context_len=context_len,
            rms_eps=self.rms_eps,
            rope_theta=self.rope_theta,
        )

    def to_json(self) -> str:
        """JSON text; the inverse of ``from_values``."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> HeadConfig:
        """From a file's JSON object. Raises ValueError for fields that are missing, unknown or of
        the wrong type."""
        missing = [name for name in _NEEDED if name not in values]
        if missing:
            raise ValueError(f"lacks {', '.join(missing)}")
        return cls(**{name: _checked(name, value) for name, value in values.items()})


_SIZES = (
    *("hidden_size", "vocab_size", "draft_vocab_size"),
    *("num_heads", "num_kv_heads", "head_dim", "intermediate_size"),
)
_TYPES = {field.name: str(field.type) for field in fields(HeadConfig)}
_NEEDED = ("kind", "hidden_size", "vocab_size", "draft_vocab_size", "feature_layers")


def _checked(name: str, value: Any) -> Any:
    """``value``, converted to the type of the field."""
    kind = _TYPES.get(name)
    if kind is None:
        raise ValueError(f"{name!r:.60} is not a field of a head's configuration")
    if name == "feature_layers":
        if isinstance(value, list) and all(type(layer) is int for layer in value):
            return tuple(value)
        raise ValueError(f"feature_layers is {value!r:.60}, expected a list of layers")
    if kind == "float" and type(value) is int:
        return float(value)
    expected = {"int": int, "float": float, "bool": bool}.get(kind, str)
    if type(value) is not expected:
        raise ValueError(f"{name} is {value!r:.60}, expected {expected.__name__}")
    return value
